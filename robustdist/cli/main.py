"""Entry point: dispatch, and one line instead of a traceback for what the user can mend."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence

import robustdist
from robustdist.cli.messages import usage_message

__all__ = ["main"]

OK, FAILED, USAGE = 0, 1, 2

_DESCRIPTION = """Robust, small and distributed models from unmodified LightningModules.

fit, validate, test and predict are those of LightningCLI; evaluate measures robustness and writes a report;
remeasure measures adversarial examples that evaluate saved;
`robustdist bench attack` measures what attacks cost on this machine;
plan says what StructuredPruning would remove; export writes a checkpoint, pruned or not, as ONNX or for torch.export.
"""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        args: Arguments after the program's name; default ``sys.argv[1:]``.

    Returns:
        0 when done, 2 for wrong usage or configuration (one line says which option and what to do), 1 for a failure.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments == ["--version"]:
        print(f"robustdist {robustdist.__version__}")
        return OK
    # Lightning and torch disagree about one of torch's private names; nothing a user could act on
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated.*")
    # user modules are named by import path, as in a script of the user's in this folder
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        if arguments[:1] == ["bench"]:
            from robustdist.cli.bench import run_bench

            run_bench(arguments[1:])
        elif arguments[:1] == ["export"]:
            from robustdist.cli.exporting import model_of_checkpoint
            from robustdist.cli.lightning_cli import run_lightning_cli

            # Lightning warns of arguments beside sys.argv: these are its arguments, spelt out
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            spelt = [argument.replace("--torch-export", "--torch_export", 1) for argument in arguments]
            run_lightning_cli([*spelt, *model_of_checkpoint(spelt)], _DESCRIPTION)
        else:
            from robustdist.cli.lightning_cli import run_lightning_cli

            # None: LightningCLI reads sys.argv itself, and so do the children of the subprocess launcher
            run_lightning_cli((args if arguments else ["--help"]), _DESCRIPTION)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else (OK if exit_.code is None else FAILED)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        message = usage_message(error)
        if message is None:
            traceback.print_exc()
            return FAILED
        # children of the subprocess launcher run the same command: what all of them know, one of them says
        rank = os.environ.get("LOCAL_RANK", "0")
        if rank == "0":
            print(f"robustdist: error: {message}", file=sys.stderr)
        elif not getattr(error, "shared", False):
            print(f"robustdist: error: process {rank}: {message}", file=sys.stderr)
        return USAGE
    return OK
