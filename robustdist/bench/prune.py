"""``robustdist bench prune``: what removing half of the units brings, beside other ways to prune."""

from __future__ import annotations

import copy
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from robustdist.bench.machine import describe_machine, installed_version
from robustdist.bench.measure import Timing, interleave, ratios, spread
from robustdist.bench.output import check_out, make_console, write_json
from robustdist.bench.prune_rows import MAKERS, Case, Variant
from robustdist.bench.sentences import minilm_folder
from robustdist.bench.small_training import quiet
from robustdist.errors import UsageError
from robustdist.pruning.cost import CostModel
from robustdist.pruning.example import with_rows
from robustdist.pruning.spare import call
from robustdist.types import check_count

__all__ = ["bench_prune"]

_BATCH_SIZES = (1, 32)
_CPU = torch.device("cpu")


def bench_prune(
    out: str | None = None,
    networks: list[str] | None = None,
    rows: list[str] | None = None,
    share: float = 0.5,
    image_size: int = 128,
    sequence_length: int = 32,
    rounds: int = 7,
    model: str | None = None,
) -> dict[str, Any]:
    """Remove half of the units of two networks by magnitude and compare size, time, and what is kept.

    Networks: ResNet-18 of torchvision with random weights, half of the channels of every layer; and MiniLM, half of
    the heads and of the feed-forward units of every layer. Before it is pruned each network takes one step of AdamW.
    Times are processor time of this process in one thread, all rows in turn, once per round after one that does not
    count; a ratio is taken within a round, and the table shows the median. A row that fails is shown with its message.

    Args:
        out: JSON file for the same figures; its folder must exist.
        networks: Some of resnet18 and minilm; None for both.
        rows: Keys of the rows: dense, ours, torch_pruning, model_pruning; dense is always one. None for all.
        share: What stays of every layer's units.
        image_size: Height and width of the images.
        sequence_length: Tokens per sentence.
        rounds: Number of rounds that count.
        model: Name or folder of the encoder in place of MiniLM.

    Returns:
        ``benchmark``, ``settings``, ``machine`` and ``rows``, as in the file.

    Raises:
        UsageError: If an argument is out of range or a network is not installed, before anything is measured.
    """
    for option, value in {"image_size": image_size, "sequence_length": sequence_length, "rounds": rounds}.items():
        check_count(value, option)
    if not 0 < share < 1:
        raise UsageError(f"share={share} is out of range: give what stays, a number between 0 and 1")
    chosen = _chosen("networks", networks, ["resnet18", "minilm"])
    keys = _chosen("rows", rows, list(MAKERS))
    path = check_out(out)
    settings = {
        "share": share,
        "image_size": image_size,
        "sequence_length": sequence_length,
        "rounds": rounds,
        "threads": 1,
        "clock": "cpu",
    }
    measured: list[dict[str, Any]] = []
    with quiet(1, 0):
        cases = {name: _CASES[name](share, image_size, sequence_length, model) for name in chosen}
        for name, case in cases.items():
            measured += _measure(name, case, ["dense", *(key for key in keys if key != "dense")], rounds)
    versions = {name: installed_version(name) for name in ("torch-pruning", "lightning", "torchvision", "transformers")}
    result: dict[str, Any] = {
        "benchmark": "prune",
        "settings": settings,
        "machine": {**describe_machine(_CPU), **versions},
        "rows": measured,
    }
    if path is not None:
        write_json(path, result)
    _print(make_console(), result)
    return result


def _chosen(option: str, given: list[str] | None, known: list[str]) -> list[str]:
    unknown = set(given or ()) - set(known)
    if unknown or given == []:
        raise UsageError(f"{option}={given} is unknown: choose some of {', '.join(known)}")
    return [name for name in known if given is None or name in given]


def _resnet18(share: float, image_size: int, sequence_length: int, model: str | None) -> Case:
    try:
        from torchvision.models import resnet18
    except ImportError as error:
        raise UsageError(f"resnet18 needs torchvision ({error}): pip install 'robustdist[attacks]'") from error

    def make() -> nn.Module:
        torch.manual_seed(0)
        net: nn.Module = resnet18(num_classes=1000)
        for part in net.modules():
            if isinstance(part, nn.BatchNorm2d):
                # statistics and scales as a trained net has them: all different
                torch.nn.init.uniform_(part.weight, 0.5, 1.5)
                torch.nn.init.uniform_(part.bias, -0.5, 0.5)
        return net

    convolutions = tuple(path for path, part in make().named_modules() if isinstance(part, nn.Conv2d))
    example = torch.rand(2, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    return Case(make, example, share, ("channels",), convolutions)


def _minilm(share: float, image_size: int, sequence_length: int, model: str | None) -> Case:
    folder = minilm_folder() if model is None else model
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise UsageError(f"minilm needs transformers ({error}): pip install 'robustdist[text]'") from error

    # the pooler has no part in what is compared
    net: Any = AutoModel.from_pretrained(folder, add_pooling_layer=False)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(net.config.vocab_size // 2, net.config.vocab_size, (2, sequence_length), generator=generator)
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    linear = [path for path, part in net.named_modules() if isinstance(part, nn.Linear)]
    heads = {path: net.config.num_attention_heads for path in linear if path.endswith(("query", "key", "value"))}
    ffn = tuple(path for path in linear if path.endswith("intermediate.dense"))
    return Case(lambda: copy.deepcopy(net), example, share, ("heads", "ffn"), ffn, heads)


_CASES = {"resnet18": _resnet18, "minilm": _minilm}


def _measure(network: str, case: Case, keys: list[str], rounds: int) -> list[dict[str, Any]]:
    found: dict[str, Variant] = {}
    rows: dict[str, dict[str, Any]] = {}
    for key in keys:
        name, make = MAKERS[key]
        rows[key] = {"network": network, "key": key, "name": name, "failure": None}
        try:
            found[key] = make(case)
        except Exception as error:
            # whatever a library cannot do with this network is a result
            if key in ("dense", "ours") or isinstance(error, UsageError):
                raise
            rows[key]["failure"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    timings: dict[int, dict[str, list[Timing]]] = {}
    with torch.no_grad():
        for size in _BATCH_SIZES:
            batch = with_rows(case.example, size)
            calls = {key: partial(call, variant.model, batch) for key, variant in found.items()}
            for run in calls.values():
                run()
            timings[size] = interleave(calls, dict.fromkeys(calls, 1), rounds, _CPU)
    unit: tuple[int, int] | None = None
    for key, variant in found.items():
        cost = CostModel(variant.model, [], partial(call, variant.model, with_rows(case.example, 1))).dense
        unit = unit or (cost.params, cost.macs)
        rows[key] |= {
            "params": cost.params,
            "macs": cost.macs,
            "params_left": cost.params / unit[0],
            "macs_left": cost.macs / unit[1],
            "zeros": sum(int((p == 0).sum()) for p in variant.model.parameters()) / cost.params,
            "masked_error": variant.masked_error,
            "reloads": variant.reloads,
            "optimizer": variant.optimizer,
            "cpu_ms": {str(s): asdict(spread([1000 * t.cpu for t in timings[s][key]])) for s in _BATCH_SIZES},
            "faster": {str(s): asdict(ratios(timings[s]["dense"], timings[s][key], "cpu")) for s in _BATCH_SIZES},
        }
    return list(rows.values())


def _print(console: Console, result: dict[str, Any]) -> None:
    settings = result["settings"]
    for network in dict.fromkeys(row["network"] for row in result["rows"]):
        table = Table(title=f"{network}, {settings['share']:.0%} of the units left", title_justify="left", box=None)
        table.add_column("", no_wrap=True)
        for name in ("params", "left", "MACs\nleft", "ms 1 / 32", "faster\n1 / 32", "masked -\nremoved"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("loads again", overflow="fold")
        table.add_column("optimiser\ngoes on", overflow="fold")
        for row in (row for row in result["rows"] if row["network"] == network):
            table.add_row(*map(Text, _cells(row)))
        console.print(table)
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "torch-pruning", "lightning", "transformers"))
    console.print(Text(f"{machine['processor']} ({machine['num_cpus']} CPUs), {versions}"))
    console.print(
        Text(
            f"one thread, process CPU time, medians of {settings['rounds']} rounds in turn; images of "
            f"{settings['image_size']}, {settings['sequence_length']} tokens"
        )
    )


def _cells(row: dict[str, Any]) -> list[str]:
    if row["failure"] is not None:
        return [row["name"], "failed", "", "", "", "", "", row["failure"], ""]
    times, faster = row["cpu_ms"], row["faster"]
    error = row["masked_error"]
    return [
        row["name"],
        f"{row['params']:,}",
        f"{row['params_left']:.1%}",
        f"{row['macs_left']:.1%}",
        " / ".join(f"{times[str(size)]['median']:.1f}" for size in _BATCH_SIZES),
        " / ".join(f"{faster[str(size)]['median']:.2f}x" for size in _BATCH_SIZES),
        "-" if error is None else f"{error:.0e}",
        row["reloads"],
        row["optimizer"],
    ]
