"""Learners: what is trained of a model when, with or without a Trainer."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from robustdist.core.rng import derive_seed
from robustdist.errors import UsageError
from robustdist.learners.pair import LowRankPair, add_pair, load_unmerged, merge_pairs, pair_of, paired_layers, unmerged
from robustdist.learners.selection import (
    ALL_LINEAR,
    ATTENTION,
    HEAD,
    Patterns,
    biases,
    check_patterns,
    head_parameters,
    linear_parameters,
    targets_of,
)
from robustdist.types import check_count

__all__ = ["Learners", "Method"]

Method: TypeAlias = Literal["learners", "bitfit", "freeze_ffn"]
_METHODS = ("learners", "bitfit", "freeze_ffn")


class Learners:
    r"""Trains a model through low-rank pairs beside its frozen linear layers.

    .. math:: y = x W + b + s \, x P_1 P_2, \qquad P_1 \in R^{in \times r}, \; P_2 \in R^{r \times out}

    With :math:`s = 1` these are learners; with :math:`s = \alpha / r` the same pair is LoRA's. :math:`P_2` starts at
    zero, so the model starts as it is. While priming, the linear layers of attention are trained too.

    Args:
        rank: The rank :math:`r`, at least 1.
        targets: "all-linear" for every linear layer outside the head, or regular expressions that are searched for in
            the dotted names of layers.
        head: The same for the layers that are trained in full; the default knows the usual names. None for no head.
        prime: The same for the linear layers, weight and bias, that are trained while priming.
        alpha: LoRA's :math:`\alpha`; None for :math:`s = 1`.
        method: "learners"; for comparison without pairs "bitfit", which trains all biases and the head, and
            "freeze_ffn", which trains the layers of ``prime`` and the head.
        seed: Seed of :math:`P_1`.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Vucetic et al., "Efficient Fine-Tuning of Compressed Language Models with Learners".
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models".
        Ben Zaken et al., "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked Language-models".

    Example:
        >>> model = nn.Sequential()
        >>> for name in ("attention", "ffn", "head"):
        ...     model.add_module(name, nn.Linear(8, 8))
        >>> learners = Learners(rank=2)
        >>> learners.attach(model)
        >>> sum(p.numel() for p in model.parameters() if p.requires_grad)  # two pairs and the head
        136
        >>> learners.merge()
        >>> list(model.state_dict())[:2]
        ['attention.weight', 'attention.bias']
    """

    def __init__(
        self,
        rank: int = 64,
        *,
        targets: Patterns = ALL_LINEAR,
        head: Patterns | None = HEAD,
        prime: Patterns = ATTENTION,
        alpha: float | None = None,
        method: Method = "learners",
        seed: int = 0,
    ) -> None:
        if method not in _METHODS:
            raise UsageError(f"method={method!r} is unknown: choose one of {', '.join(_METHODS)}")
        if alpha is not None and not alpha > 0:
            raise UsageError(f"alpha={alpha} must be above 0, or None for learners")
        for option, patterns in (("targets", targets), ("head", head), ("prime", prime)):
            check_patterns(patterns, option)
        self.rank = check_count(rank, "rank")
        self.scale = 1.0 if alpha is None else alpha / rank
        self.targets, self.head, self.prime = targets, head, prime
        self.method, self.seed = method, seed
        self.module: nn.Module | None = None
        self._before: dict[str, bool] = {}
        self._trained: set[str] = set()
        self._primed: set[str] = set()

    def attach(self, module: nn.Module, *, priming: bool = False) -> None:
        """Put the pairs into ``module`` and freeze what is not trained. What was frozen before stays so.

        Raises:
            UsageError: If targets, head or prime do not fit the module.
        """
        head = head_parameters(module, self.head)
        if self.method == "bitfit":
            others = biases(module)
        elif self.method == "freeze_ffn":
            others = linear_parameters(module, self.prime, self.head, "prime")
        else:
            others = []
        primed = linear_parameters(module, self.prime, self.head, "prime") if priming else []
        layers = targets_of(module, self.targets, self.head) if self.method == "learners" else {}
        self._before = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        usable = {name for name, flag in self._before.items() if flag}
        self._trained, self._primed = usable & {*head, *others}, usable & set(primed)
        for name, layer in layers.items():
            seed = derive_seed(self.seed, "learner", name)
            pair = LowRankPair(layer.in_features, layer.out_features, self.rank, scale=self.scale, seed=seed)
            add_pair(layer, pair)
        self.module = module
        self._set(self._trained | self._primed)

    def end_priming(self) -> None:
        """Freeze what was trained for the sake of priming, and drop its gradients."""
        self._set(self._trained)

    def merge(self) -> None:
        """Add the pairs to the weights, remove them, and give all parameters the flags they had before."""
        if self.module is None:
            return
        merge_pairs(self.module)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(self._before.get(name, parameter.requires_grad))
        self.module = None

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained now, by name."""
        return {name: p for name, p in self._attached().named_parameters() if p.requires_grad}

    def silent(self) -> list[str]:
        """Return the layers whose pair has no gradient: after a backward pass, those it did not take part in."""
        return [name for name, layer in paired_layers(self._attached()).items() if pair_of(layer).up.grad is None]

    def state_dict(self) -> dict[str, Any]:
        """Return rank, scale and the unmerged matrices, by reference."""
        return {"rank": self.rank, "scale": self.scale, "layers": unmerged(self._attached())}

    def load_state_dict(self, state: dict[str, Any], module: nn.Module | None = None) -> None:
        """Write unmerged matrices back, into ``module`` if it is another one of the same build, such as an average.

        Raises:
            UsageError: If the state is one of other pairs.
        """
        mine = self.state_dict()
        layers: dict[str, dict[str, Tensor]] = state["layers"]
        if (state["rank"], state["scale"], set(layers)) != (mine["rank"], mine["scale"], set(mine["layers"])):
            raise UsageError(
                f"rank={self.rank}, scale {self.scale:g} and {len(mine['layers'])} layers do not fit the checkpoint, "
                f"which has rank {state['rank']}, scale {state['scale']:g} and {len(layers)} layers: use the same "
                "rank, alpha, targets and method"
            )
        load_unmerged(self._attached() if module is None else module, layers)

    def _attached(self) -> nn.Module:
        if self.module is None:
            raise RuntimeError("attach learners to a module first")
        return self.module

    def _set(self, trained: set[str]) -> None:
        for name, parameter in self._attached().named_parameters():
            parameter.requires_grad_(name in trained or name not in self._before)
            if not parameter.requires_grad:
                # an optimiser would go on with a gradient that is left over
                parameter.grad = None
