"""How each library makes a network small; what it keeps and what it loses on the way."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from robustdist._lightning import Callback, LightningModule, ModelPruning, Trainer
from robustdist.errors import UsageError
from robustdist.pruning import Kind, compile_recipe, discover, optimizers_follow
from robustdist.pruning.example import tensors_in
from robustdist.pruning.importance import Magnitude, named_tensors
from robustdist.pruning.masks import mask_units
from robustdist.pruning.selection import Target, select
from robustdist.pruning.spare import call

__all__ = ["MAKERS", "Case", "Variant", "first_tensor"]


@dataclass(frozen=True)
class Case:
    """A network and what shall go.

    Attributes:
        make: Builds it, always with the same weights.
        example: Two samples, a tensor or entries by name.
        share: What stays of every layer's units.
        kinds: Units that may go.
        halved: Paths of the layers that lose rows.
        heads: Paths of query, key and value projections -> number of heads, for torch-pruning; empty without attention.
    """

    make: Callable[[], nn.Module]
    example: Any
    share: float
    kinds: tuple[Kind, ...]
    halved: tuple[str, ...]
    heads: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Variant:
    """What a library made of the network.

    Attributes:
        model: The result, in eval mode.
        masked_error: Largest difference of outputs between units at zero and units cut, over the largest output; None
            if the library has no masks to compare with.
        reloads: Whether its state dict loads into a fresh network, in words.
        optimizer: Whether an optimiser goes on with its state, in words.
    """

    model: nn.Module
    masked_error: float | None
    reloads: str
    optimizer: str


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor of an output."""
    return tensors_in(output)[0]


def _trained(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The network after one step, so that there are moments."""
    model = case.make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    _step(model, optimizer, case.example)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, example: Any) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(first_tensor(call(model, example)).square().mean())
    optimizer.step()


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Whether the optimiser holds the parameters of ``model`` with moments of their shapes; how many are others."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = [
        parameter
        for parameter in used
        if id(parameter) in held
        and optimizer.state.get(parameter, {}).get("exp_avg", torch.zeros(())).shape == parameter.shape
    ]
    return "yes" if len(kept) == len(used) else f"no: {len(used) - len(kept)} of {len(used)} are others"


def _same_outputs(model: nn.Module, other: nn.Module, example: Any) -> bool:
    with torch.no_grad():
        return torch.equal(first_tensor(call(model.eval(), example)), first_tensor(call(other.eval(), example)))


def _loads_plainly(model: nn.Module, case: Case) -> str:
    fresh = case.make()
    try:
        fresh.load_state_dict(_through_a_file(model.state_dict()))
    except RuntimeError as error:
        return f"no: {str(error).splitlines()[1].strip().partition(':')[0]}"
    return "yes" if _same_outputs(model, fresh, case.example) else "no: other outputs"


def _through_a_file(content: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def dense(case: Case) -> Variant:
    """The network as it is."""
    model, optimizer = _trained(case)
    return Variant(model.eval(), None, _loads_plainly(model, case), _held(model, optimizer))


def ours(case: Case) -> Variant:
    """Units by magnitude, removed by a recipe."""
    model, optimizer = _trained(case)
    groups = discover(model, case.example, kinds=case.kinds)
    tensors, criterion = named_tensors(model), Magnitude()
    scores = {group.name: criterion.score(group, tensors) for group in groups}
    removed = select(groups, scores, target=Target.parse({"width": case.share}), round_to=1)
    masked = copy.deepcopy(model).eval()
    mask_units(masked, groups, removed)
    recipe = compile_recipe(model, groups, removed)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    recipe.apply(model)
    optimizers_follow([optimizer], model, recipe, shapes)
    kept = _held(model, optimizer)
    with torch.no_grad():
        expected = first_tensor(call(masked, case.example))
        found = first_tensor(call(model.eval(), case.example))
    fresh = case.make()
    type(recipe).from_json(recipe.to_json()).apply(fresh)
    fresh.load_state_dict(_through_a_file(model.state_dict()))
    reloads = "yes, by a recipe" if _same_outputs(model, fresh, case.example) else "no: other outputs"
    return Variant(model, float((expected - found).abs().max() / expected.abs().max()), reloads, kept)


def torch_pruning(case: Case) -> Variant:
    """torch-pruning's own pruner, by its magnitude, as its examples call it."""
    try:
        import torch_pruning as library
    except ModuleNotFoundError as error:
        raise UsageError("torch-pruning is not installed: pip install 'robustdist[prune]'") from error
    model, optimizer = _trained(case)
    model.eval()
    halved = {model.get_submodule(path) for path in case.halved}
    heads = {model.get_submodule(path): number for path, number in case.heads.items()}
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    pruner = library.pruner.MagnitudePruner(
        model,
        case.example,
        importance=library.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=1 - case.share,
        ignored_layers=[layer for layer in layers if layer not in halved and layer not in heads],
        num_heads=heads,
        prune_num_heads=bool(heads),
        prune_head_dims=False,
        head_pruning_ratio=1 - case.share if heads else 0.0,
        output_transform=first_tensor,
    )
    pruner.step()
    for layer in model.modules():
        # Hugging Face's attention counts heads itself; the pruner knows how many are left
        query = getattr(layer, "query", None)
        if query in heads:
            layer.num_attention_heads = pruner.num_heads[query]
            layer.all_head_size = query.out_features
    with torch.no_grad():
        call(model, case.example)
    return Variant(model, None, _loads_plainly(model, case), _held(model, optimizer))


class _Holder(LightningModule):
    """A network under Lightning's Trainer."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, example: Any) -> None:
        super().__init__()
        self.net = net
        self.example = example
        self.kept = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return first_tensor(call(self.net, self.example)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kept


def model_pruning(case: Case) -> Variant:
    """Lightning's ModelPruning, structured by the 2-norm of rows, made permanent at the end of fit."""
    model, optimizer = _trained(case)
    holder = _Holder(model, optimizer, case.example)
    callback: Callback = ModelPruning(
        "ln_structured",
        parameters_to_prune=[(model.get_submodule(path), "weight") for path in (*case.halved, *case.heads)],
        use_global_unstructured=False,
        amount=1 - case.share,
        pruning_norm=2,
        pruning_dim=0,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(holder, DataLoader([0], 1))  # type: ignore[arg-type]
    return Variant(model.eval(), None, _loads_plainly(model, case), _held(model, optimizer))


#: Key of a row -> its name and how it is made.
MAKERS: dict[str, tuple[str, Callable[[Case], Variant]]] = {
    "dense": ("dense", dense),
    "ours": ("robustdist", ours),
    "torch_pruning": ("torch-pruning", torch_pruning),
    "model_pruning": ("Lightning ModelPruning", model_pruning),
}
