"""Who may import whom, read from the sources: docs/design/foundation.md as a test."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import robustdist
from robustdist import _lightning

ROOT = Path(__file__).parents[2]
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}

_GROUND = {"types", "errors"}
_BELOW_OBJECTIVES = {*_GROUND, "core", "attacks"}
#: What each part of robustdist may import. A new package gets a row here and one in docs/design/foundation.md.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": {"errors", "strategies"},
    "errors": set(),
    "types": {"errors"},
    "_lightning": {"errors"},
    "core": _GROUND,
    "attacks": {*_GROUND, "core"},
    "comm": {*_GROUND, "core"},
    "domains": {*_GROUND, "core"},
    "learners": {*_GROUND, "core"},
    "optim": {*_GROUND, "core"},
    "pruning": {*_GROUND, "core"},
    "report": {*_GROUND, "core"},
    "objectives": _BELOW_OBJECTIVES,
    "evaluation": {*_BELOW_OBJECTIVES, "report"},
    "diagnostics": {*_BELOW_OBJECTIVES, "report", "evaluation"},
    "bench": {
        *_BELOW_OBJECTIVES,
        "objectives",
        "evaluation",
        "callbacks",
        "comm",
        "pruning",
        "strategies",
        "data",
        "_lightning",
    },
    "data": {*_GROUND, "core", "_lightning"},
    "callbacks": {
        *_BELOW_OBJECTIVES,
        "domains",
        "learners",
        "objectives",
        "evaluation",
        "diagnostics",
        "pruning",
        "report",
        "strategies",
        "_lightning",
    },
    "strategies": {*_GROUND, "core", "comm", "optim", "pruning", "_lightning"},
    "cli": {
        *_BELOW_OBJECTIVES,
        "evaluation",
        "callbacks",
        "pruning",
        "report",
        "bench",
        "data",
        "_lightning",
        "__init__",
    },
    "configs": set(),
    "__main__": {"cli"},
}

#: Third-party packages that may be imported at the top of a file; optional ones are imported where they are needed.
_TORCH = {"torch"}
MAY_USE: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    "types": _TORCH,
    "_lightning": LIGHTNING,
    "core": {*_TORCH, "torchmetrics"},
    "attacks": _TORCH,
    "comm": _TORCH,
    "domains": _TORCH,
    "learners": _TORCH,
    "optim": _TORCH,
    "pruning": _TORCH,
    "report": {*_TORCH, "rich"},
    "objectives": _TORCH,
    "evaluation": _TORCH,
    "diagnostics": _TORCH,
    "bench": {*_TORCH, "rich"},
    "data": _TORCH,
    "callbacks": _TORCH,
    "strategies": _TORCH,
    "cli": {*_TORCH, "rich", "jsonargparse"},
    "configs": set(),
    "__main__": set(),
}
#: The one file of core that needs more than torch: metrics have to be told from other modules.
USES_TORCHMETRICS = {"core.muted"}

#: Private names of other people's code, and where they are used. Each is a risk at the next release.
FOREIGN_PRIVATE: dict[str, set[str]] = {
    "bench.measure": {"_C", "_current_graph_task_id"},  # torch: which run of the autograd engine a hook is in
    "bench.ranks": {"_exit"},  # os: at once, while another thread waits for the network
    "core.containers": {"_fields", "_replace"},  # named tuples: documented, public in spite of the underscore
    "core.compiled": {
        "_compiled_call_impl",
        "_orig_mod",
        "_torchdynamo_orig_callable",
    },  # what torch.compile leaves behind
    "core.folding": {"_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"},  # Module
    "core.guard": {"_buffers", "_fields"},  # torch.nn.Module, named tuples
    "core.space": {"_version"},  # torch.Tensor: how often it was written into
    "core.muted": {"_modules"},  # torch.nn.Module
    "pruning.cost": {"_scaled_dot_product_flash_attention_for_cpu"},  # torch: an operator its flop counter leaves out
    "pruning.example": {"_fields"},  # named tuples: documented, public in spite of the underscore
    "pruning.attention": {"_qkv_same_embed_dim"},  # nn.MultiheadAttention: turns the fused path around it off
    "strategies.refusals": {"_in_backward_optimizers", "_use_python_reducer"},  # torch: what a hook cannot serve
    "_lightning": {"_MultiProcessingLauncher"},  # the public name of its module is private
    "strategies.launchers": {"_recover_results_in_main_process", "_start_method"},  # its launcher, DDPStrategy
    "callbacks.pruning.surgery": {"_average_model"},  # WeightAveraging: the averaged copy of the module
    "callbacks.learner_tuning": {"_average_model"},  # WeightAveraging: the averaged copy of the module
    "callbacks.robust_evaluation": {"_generate_state_key"},  # Callback
    "cli.lightning_cli": {"_get", "_prepare_subcommand_kwargs", "_run_subcommand", "_set_seed"},  # LightningCLI
}


def files(folder: Path) -> Iterator[Path]:
    """Python files under ``folder``, links followed."""
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        yield from (Path(place) / name for name in names if name.endswith(".py"))


def module_name(path: Path) -> str:
    """Dotted name inside robustdist, for example "core.batch", "core" or "__init__"."""
    parts = list(path.relative_to(ROOT / "robustdist").with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


SOURCES = {module_name(path): ast.parse(path.read_text(), str(path)) for path in sorted(files(ROOT / "robustdist"))}
PACKAGES = {module_name(path) for path in files(ROOT / "robustdist") if path.name == "__init__.py"}


def unit(module: str) -> str:
    return module.split(".")[0]


def imported(tree: ast.AST, package: str = "") -> set[str]:
    """All modules that a file imports anywhere, also inside functions and as text; relative ones made absolute."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            texts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            found |= {text for text in texts if isinstance(text, str) and text.strip(".") == text != ""}
    return found


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def package_of(module: str) -> str:
    full = f"robustdist.{module}"
    return full if module in PACKAGES else full.rpartition(".")[0]


def own_imports(module: str) -> set[str]:
    """Parts of robustdist that ``module`` imports."""
    found = set()
    for name in imported(SOURCES[module], package_of(module)):
        if name.split(".")[0] == "robustdist":
            part = name.split(".")[1] if "." in name else "__init__"
            found.add(part if part in MAY_IMPORT else "__init__")
    return found


# --- the graph


def test_every_part_has_its_row():
    assert {unit(module) for module in SOURCES} == set(MAY_IMPORT) == set(MAY_USE)


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_downwards(module):
    part = unit(module)
    assert own_imports(module) - {part} <= MAY_IMPORT[part]


def test_the_table_is_used_and_has_no_circle():
    order = list(TopologicalSorter(MAY_IMPORT).static_order())
    assert order.index("core") < order.index("attacks") < order.index("objectives") < order.index("callbacks")
    used = {part: set().union(*(own_imports(m) for m in SOURCES if unit(m) == part)) for part in MAY_IMPORT}
    assert used["callbacks"] >= {"objectives", "evaluation", "report", "_lightning"}
    assert used["evaluation"] >= {"attacks", "core", "report"}


def test_sibling_algorithms_do_not_know_each_other():
    siblings = {"attacks", "comm", "domains", "learners", "optim", "pruning", "report", "data"}
    assert {part: MAY_IMPORT[part] & siblings for part in siblings} == {part: set() for part in siblings}


@pytest.mark.parametrize("module", SOURCES)
def test_only_required_packages_are_imported_at_the_top(module):
    executed = AtImport().visit(ast.parse(ast.unparse(SOURCES[module])))
    roots = {name.split(".")[0] for name in imported(executed, package_of(module))}
    foreign = roots - set(sys.stdlib_module_names) - {"robustdist"}
    assert foreign <= MAY_USE[unit(module)]
    assert "torchmetrics" not in foreign or module in USES_TORCHMETRICS


class AtImport(ast.NodeTransformer):
    """Drops what does not run when a file is imported: functions, and what is only for type checkers."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        return None

    def visit_If(self, node: ast.If) -> ast.AST:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
        return self.generic_visit(node)


# --- Lightning


@pytest.mark.parametrize("module", [module for module in SOURCES if module != "_lightning"])
def test_lightning_is_imported_through_the_shim_alone(module):
    assert {name for name in imported(SOURCES[module], package_of(module)) if name.split(".")[0] in LIGHTNING} == set()


def test_the_reader_of_imports_sees_all_of_them():
    code = "import os\ndef f():\n    from lightning.pytorch import Trainer\n    import_module('pytorch_lightning')"
    assert imported(ast.parse(code)) == {"os", "lightning.pytorch.Trainer", "pytorch_lightning"}
    assert imported(ast.parse("from ..core import rng\nfrom . import x"), "robustdist.attacks") == {
        "robustdist.core.rng",
        "robustdist.attacks.x",
    }
    assert imported(SOURCES["_lightning"]) >= {"lightning.pytorch.Trainer"}


# --- other people's private names


def private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def private_uses(tree: ast.AST) -> set[str]:
    """Private attributes that a file reads or writes, also through getattr and the like, and private imports."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in ("getattr", "setattr", "hasattr", "delattr", "attrgetter"):
            found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "robustdist":
            found |= {alias.name for alias in node.names} | set((node.module or "").split("."))
        elif isinstance(node, ast.Import):
            found |= {part for alias in node.names for part in alias.name.split(".")}
    return {name for name in found if private(name)} - {"_lightning"}


def defined(tree: ast.AST) -> set[str]:
    """Private names that a file makes itself: functions, classes, variables, attributes of self."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = getattr(node.value, "id", "")
            found |= {node.attr} if owner in ("self", "cls") else set()
    return {name for name in found if private(name)}


def overridden(module: str) -> set[str]:
    """Private names of Lightning or torch classes that our subclasses define too."""
    loaded = importlib.import_module(f"robustdist.{module}" if module != "__init__" else "robustdist")
    found = set()
    for cls in vars(loaded).values():
        if inspect.isclass(cls) and cls.__module__ == loaded.__name__:
            foreign = [base for base in cls.__mro__ if base.__module__.split(".")[0] != "robustdist"]
            inherited = set().union(*(vars(base) for base in foreign))
            found |= {name for name in vars(cls) if private(name) and name in inherited}
    return found - {"_abc_impl", "_is_protocol", "_backward_cls"}  # made by metaclasses


def known(module: str) -> set[str]:
    """Private names that ``module`` or a file of ours that it imports makes."""
    names = {name.removeprefix("robustdist.") for name in imported(SOURCES[module], package_of(module))}
    files = {module} | {name for entry in names for name in (entry, entry.rpartition(".")[0]) if name in SOURCES}
    return set().union(*(defined(SOURCES[name]) for name in files))


@pytest.mark.parametrize("module", [module for module in SOURCES if module != "__main__"])
def test_private_names_of_others_are_used_only_where_listed(module):
    overriding = overridden(module)
    used = (private_uses(SOURCES[module]) - (known(module) - overriding)) | overriding
    assert used == FOREIGN_PRIVATE.get(module, set())


@pytest.mark.parametrize(
    "name", ["_forward_redirection", "_register_ddp_hooks", "_combined_loader", "_data_source", "_results", "_launcher"]
)
def test_inner_workings_of_lightning_are_not_even_ours_by_name(name):
    assert [module for module, tree in SOURCES.items() if name in private_uses(tree) | defined(tree)] == []


@pytest.mark.parametrize(
    ("owner", "module"),
    [
        ("LightningCLI", "cli.lightning_cli"),
        ("Callback", "callbacks.robust_evaluation"),
    ],
)
def test_the_private_names_of_lightning_are_still_there(owner, module):
    cls = getattr(_lightning, owner)
    assert [name for name in sorted(FOREIGN_PRIVATE[module]) if not callable(getattr(cls, name, None))] == []


def test_the_inner_workings_that_pruning_needs_are_still_there():
    launcher = _lightning.MultiProcessingLauncher
    assert "worker_output" in inspect.signature(launcher._recover_results_in_main_process).parameters
    assert _lightning.DDPStrategy(start_method="fork")._start_method == "fork"
    assert _lightning.WeightAveraging()._average_model is None


# --- one name for each thing


def test_the_outer_folders_are_never_imported_by_their_short_names():
    folders = ("robustdist", "callbacks", "configs", "examples", "tests", "docs")
    offenders = [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in files(ROOT / folder)
        if {name.split(".")[0] for name in imported(ast.parse(path.read_text()))} & {"callbacks", "configs"}
    ]
    assert offenders == []


def test_texts_and_configs_name_them_in_full():
    pattern = re.compile(r"class_path: *[\"']?(callbacks|configs)\.|^\s*(from|import) (callbacks|configs)\b", re.M)
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.yaml")]
    assert len(texts) > 5
    assert [str(path) for path in texts if pattern.search(path.read_text())] == []
    assert pattern.search("    - class_path: callbacks.AdversarialTraining")
    assert pattern.search("from callbacks import AdversarialTraining")


@pytest.mark.parametrize("name", ["classifiers.py", "text_classifier.py"])
def test_the_shipped_modules_are_unmodified_lightning_modules(name):
    path = ROOT / "examples" / name
    roots = {name.split(".")[0] for name in imported(ast.parse(path.read_text()))}
    assert "robustdist" not in roots
    assert "lightning" in roots
    assert "robustdist" not in path.read_text()


def test_every_module_can_be_imported_under_one_name():
    names = [info.name for info in pkgutil.walk_packages(robustdist.__path__, "robustdist.")]
    assert {name.removeprefix("robustdist.") for name in names} == set(SOURCES) - {"__init__"}
