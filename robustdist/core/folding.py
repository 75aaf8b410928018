"""Batch norm with fixed statistics is an affine map: part of the convolution before it, or cheap to differentiate."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robustdist.core.rng import Noise
from robustdist.core.strided import PickedPixels

__all__ = [
    "ConvNormPair",
    "conv_norm_pairs",
    "disturbed_norms",
    "fixed_norms",
    "folded_pair",
    "identity",
    "input_only_norm",
    "is_watched",
]

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DTYPES = (torch.float32, torch.float64)

#: Functions that read the form of a tensor, not its numbers.
_METADATA = ("__get__", "dim", "ndimension", "size", "numel", "stride", "is_contiguous", "__len__")


class ConvNormPair(NamedTuple):
    """Names of a convolution and of the batch norm that alone reads its output."""

    conv: str
    norm: str


def fixed_norms(module: nn.Module, mode: Literal["eval", "train"]) -> Iterator[tuple[str, Any]]:
    """Yield the batch norms of ``module`` that use their running statistics when it is called in ``mode``.

    Mode "train" leaves the flags of all parts as they are, so there only the norms frozen on purpose are fixed. A
    subclass may compute anything, hence exact types; a norm without running statistics uses those of the batch. Norms
    in half precision are left out: the folded numbers would be rounded once more.
    """
    for name, norm in module.named_modules():
        if (
            type(norm) in _NORMS
            and (mode == "eval" or not norm.training)
            and "forward" not in vars(norm)
            and isinstance(norm.running_mean, Tensor)
            and isinstance(norm.running_var, Tensor)
            and norm.running_var.dtype in _DTYPES
        ):
            yield name, norm


def conv_norm_pairs(module: nn.Module, run: Callable[[], object], mode: Literal["eval", "train"]) -> list[ConvNormPair]:
    """Find the convolutions that a batch norm with fixed statistics can be folded into.

    ``run`` is called once and every torch function in it is watched. A pair is a convolution and a batch norm, each
    called once, where the output of the first goes into the second and nowhere else (not into a shortcut, an attribute
    or the result) and nobody but the two themselves reads their parameters. Parts with hooks, parametrisations or
    weights in half precision are left alone, and so are transposed convolutions.

    Args:
        module: The module that ``run`` calls.
        run: Runs one forward pass of a real batch, without a graph.
        mode: The mode in which ``module`` will be called.
    """
    norms = dict(fixed_norms(module, mode))
    trace = _Trace()
    for name, part in module.named_modules():
        if (type(part) in _CONVS or name in norms) and _is_plain(part):
            trace.watch(name, part)
    return trace.pairs(run)


def folded_pair(conv: Any, norm: Any) -> tuple[Tensor, Tensor]:
    r"""Return weight and bias of the convolution that equals ``norm(conv(x))``, without a graph.

    .. math:: w' = s w, \quad b' = s (b - \mu) + \beta, \qquad s = \gamma / \sqrt{\sigma^2 + \epsilon}
    """
    with torch.no_grad():
        scale = _scale(norm)
        weight = conv.weight * scale.view(-1, *[1] * (conv.weight.dim() - 1))
        bias = scale * (-norm.running_mean if conv.bias is None else conv.bias - norm.running_mean)
        return weight, bias if norm.bias is None else bias + norm.bias


def identity(x: Tensor) -> Tensor:
    """Return ``x``: what is left of a batch norm after its fold."""
    return x


def input_only_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """Return the forward of a batch norm with fixed statistics whose backward pass serves its input alone.

    PyTorch's own backward pass sums over the batch for the gradients of weight and bias also where nobody asks for
    them, and keeps the input for it. The values of the forward pass are the same bits.
    """
    with torch.no_grad():
        scale = _scale(norm)
        zero, one = torch.zeros_like(scale), torch.ones_like(scale)
    weight, bias = (None if value is None else value.detach() for value in (norm.weight, norm.bias))
    mean, var, eps = norm.running_mean, norm.running_var, norm.eps

    def forward(x: Tensor) -> Tensor:
        result: Tensor = _InputOnlyNorm.apply(x, mean, var, weight, bias, eps, scale, zero, one)
        return result

    return forward


def disturbed_norms(norms: list[Any], seed: int) -> dict[tuple[nn.Module, str], Tensor]:
    """Return stand-ins for statistics and affine parameters of ``norms`` that are far from those of a new layer.

    A new batch norm is next to the identity, and a check of a fold on it would pass whatever was folded.
    """
    values: dict[tuple[nn.Module, str], Tensor] = {}
    for place, norm in enumerate(norms):
        for name in ("running_mean", "running_var", "weight", "bias"):
            value = getattr(norm, name)
            if value is None:
                continue
            draw = Noise(seed).uniform(value.detach(), name, place)
            # means and shifts in [-0.5, 0.5), variances and scales in [0.5, 1.5)
            values[norm, name] = draw - 0.5 if name in ("running_mean", "bias") else draw + 0.5
    return values


class _InputOnlyNorm(torch.autograd.Function):
    """The backward pass is the forward one without the shift: gradients are multiplied by the same scale."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        scale: Tensor,
        zero: Tensor,
        one: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(scale, zero, one)
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scale, zero, one = ctx.saved_tensors
        return F.batch_norm(grad, zero, one, scale, None, False, 0.0, 0.0), *[None] * 8


@dataclass
class _Convolution:
    """What happened to a convolution and to its output."""

    calls: int = 0
    output: weakref.ref[Tensor] | None = None
    users: list[nn.Module | None] = field(default_factory=list)


class _Trace(TorchFunctionMode):
    """Notes who uses the outputs of convolutions, and the parameters of convolutions and norms."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[nn.Module, str] = {}
        self._convs: dict[nn.Module, _Convolution] = {}
        self._calls: dict[nn.Module, int] = {}
        # id of a parameter or buffer -> the modules that have it
        self._owners: dict[int, set[nn.Module]] = {}
        # id of a living output of a convolution -> that convolution
        self._outputs: dict[int, nn.Module] = {}
        self._read_by_others: set[nn.Module] = set()
        self._running: list[nn.Module] = []

    def watch(self, name: str, part: nn.Module) -> None:
        """Add a convolution or a batch norm."""
        self._names[part] = name
        self._calls[part] = 0
        if type(part) in _CONVS:
            self._convs[part] = _Convolution()
        for tensor in (*part.parameters(False), *part.buffers(False)):
            self._owners.setdefault(id(tensor), set()).add(part)

    def pairs(self, run: Callable[[], object]) -> list[ConvNormPair]:
        """Call ``run`` and return what can be folded."""
        with ExitStack() as hooks, torch.no_grad():
            for part in self._names:
                hooks.callback(part.register_forward_pre_hook(self._enter).remove)
                hooks.callback(part.register_forward_hook(self._leave).remove)
            with self:
                result = run()
            found = [pair for conv in self._convs if (pair := self._pair(conv)) is not None]
            del result  # an output of a convolution in it was alive until here
        return found

    def _pair(self, conv: nn.Module) -> ConvNormPair | None:
        seen = self._convs[conv]
        users = set(seen.users)
        if len(users) != 1 or seen.output is None or seen.output() is not None:
            return None
        norm = users.pop()
        if norm is None or norm in self._convs or {conv, norm} & self._read_by_others:
            return None
        if self._calls[conv] != 1 or self._calls[norm] != 1:
            return None
        return ConvNormPair(self._names[conv], self._names[norm])

    def _enter(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        self._calls[part] += 1
        self._running.append(part)

    def _leave(self, part: Any, args: tuple[Any, ...], output: Any) -> None:
        self._running.pop()
        # an output without a batch dimension would meet the norm's channels at another place
        if part in self._convs and output.dim() == part.weight.dim():
            key = id(output)
            self._outputs[key] = part
            # an id is given to another tensor once this one is gone
            self._convs[part].output = weakref.ref(output, lambda _: self._outputs.pop(key, None))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the tensors among the arguments."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _METADATA and not isinstance(result, Tensor):
            return result
        user = self._running[-1] if self._running else None
        for tensor in _tensors((args, kwargs)):
            for owner in self._owners.get(id(tensor), ()):
                if owner is not user:
                    self._read_by_others.add(owner)
            conv = self._outputs.get(id(tensor))
            if conv is not None:
                self._convs[conv].users.append(user)
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def is_watched(part: nn.Module) -> bool:
    """Whether ``part`` has hooks, which would see other tensors after a fold."""
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    return any(hooks)


def _is_plain(part: nn.Module) -> bool:
    """Whether ``part`` computes what its class says, from its own parameters, and nobody looks on."""
    attributes = vars(part)
    tensors = [*part.parameters(False), *part.buffers(False)]
    return (
        not is_watched(part)
        and isinstance(attributes.get("forward"), (PickedPixels, type(None)))
        and not any(name in attributes for name in ("weight", "bias", "running_mean", "running_var"))
        and all(tensor.dtype in _DTYPES for tensor in tensors if tensor.is_floating_point())
    )


def _scale(norm: Any) -> Tensor:
    scale: Tensor = torch.rsqrt(norm.running_var + norm.eps)
    return scale if norm.weight is None else norm.weight.detach() * scale
