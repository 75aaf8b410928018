"""Forward passes whose input gradient can be differentiated again, at no more than that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from robustdist.core.strided import read_pixels

__all__ = ["CheapDoubleBackward", "twice_differentiable"]

_RELUS = (torch.relu, torch.Tensor.relu, F.relu)
_CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
_convolution_backward = torch.ops.aten.convolution_backward
_batch_norm_backward = torch.ops.aten.native_batch_norm_backward


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Make the input gradients of the forward passes within differentiable, and cheaply so.

    Fused attention has no second derivative: scaled dot products are written out.
    """
    with sdpa_kernel(SDPBackend.MATH), CheapDoubleBackward():
        yield


class CheapDoubleBackward(TorchFunctionMode):
    r"""Make the gradient of an input gradient cheaper, for the forward passes within.

    For ``torch.autograd.grad(loss, inputs, create_graph=True)``: torch takes the weights' part of the second derivative
    of a convolution by a convolution with a kernel as large as the image, that of batch norm in some twenty passes
    over the activations, and that of ReLU by adding zeros. Here they are one weight gradient, one backward pass of
    batch norm plus a sum per channel of each activation, and nothing. With :math:`v` the gradient that arrives at
    :math:`g_x`, the input gradient,

    .. math::
        g_x = \mathrm{conv}^T(g_y, w): \quad \partial g_y = \mathrm{conv}(v, w), \;
        \partial w = \mathrm{wgrad}(v, g_y)

    .. math::
        g_x = \gamma r (g_y - \overline{g_y} - \hat x B): \quad
        \partial x = \gamma r^2 \big((2AB - S)\,\hat x - B (v - \bar v) - A (g_y - \overline{g_y})\big)

    with :math:`r` the inverse deviation, :math:`A = \overline{v \hat x}`, :math:`B = \overline{g_y \hat x}`,
    :math:`S = \overline{v g_y} - \bar v\, \overline{g_y} - AB` and means over a channel of the batch.

    Values and first derivatives are torch's own. Left to torch: other devices (nothing was measured there), autocast,
    batch norm in evaluation mode, padding by name, and everything else. A third derivative is refused by autograd.

    Example:
        >>> import torch
        >>> x = torch.rand(2, 3, 8, 8, requires_grad=True)
        >>> module = torch.nn.Conv2d(3, 4, 3)
        >>> with CheapDoubleBackward():
        ...     loss = module(x).square().sum()
        >>> (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        >>> grad.square().sum().backward()
        >>> module.weight.grad.shape
        torch.Size([4, 3, 3, 3])
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, or what takes its place."""
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            return _convolution(func, *args, **kwargs)
        if func is F.batch_norm:
            return _batch_norm(*args, **kwargs)
        if func in _RELUS:
            return _relu(func, *args, **kwargs)
        return func(*args, **kwargs)


def _applies(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.requires_grad and not torch.is_autocast_enabled("cpu")


def _convolution(
    func: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    dims = _CONVOLUTIONS[func]
    if not _applies(x) or isinstance(padding, str) or x.dim() != dims + 2:
        return func(x, weight, bias, stride, padding, dilation, groups)
    geometry = [[size] * dims if isinstance(size, int) else list(size) for size in (stride, padding, dilation)]
    geometry = [size * dims if len(size) == 1 else size for size in geometry]
    if weight.shape[2:].numel() == 1 and not any(geometry[1]):
        x, geometry[0] = read_pixels(x, geometry[0]), [1] * dims
    args = (*geometry, False, [0] * dims, groups)
    out: Tensor = _Convolution.apply(x, weight, args)
    # a path of its own for the weight gradient, so that autograd leaves it out where it is not asked for
    out = _Join.apply(out, _WeightGradient.apply(x.detach(), weight, args, out.shape))
    return out if bias is None else out + bias.view(-1, *[1] * dims)


class _Convolution(Function):
    """A convolution with a derivative in ``x`` alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, args: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args = args
        return torch.convolution(x, weight, None, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        return _InputGradient.apply(grad, weight, x.detach(), ctx.args), None, None


class _InputGradient(Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, weight: Tensor, x: Tensor, args: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(grad, weight)
        ctx.args = args
        gradient: Tensor = _convolution_backward(grad, x, weight, None, *args, [True, False, False])[0]
        return gradient

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grad, weight = ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = _convolution_backward(grad, v, weight, None, *ctx.args, [False, True, False])[1]
        return torch.convolution(v, weight, None, *ctx.args), of_weight, None, None


class _WeightGradient(Function):
    """Zeros without memory that carry the weight's share of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, args: tuple[Any, ...], shape: torch.Size) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args = args
        return x.new_zeros(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        return None, _convolution_backward(grad, x, weight, None, *ctx.args, [False, True, False])[1], None, None


class _Join(Function):
    """``out`` with the gradients of both."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, zeros: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not (training and _applies(x)) or weight is None or x.dim() < 3:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    out: Tensor = _BatchNorm.apply(x, weight, bias, running_mean, running_var, momentum, eps)
    return out


class _BatchNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        running_mean, running_var, momentum, ctx.eps = options
        out, mean, inv_std = torch.native_batch_norm(
            x, weight, bias, running_mean, running_var, True, momentum, ctx.eps
        )
        ctx.save_for_backward(x, weight, mean, inv_std)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias = _BatchNormGradient.apply(grad, *ctx.saved_tensors, ctx.eps)
        return of_x, of_weight, of_bias if ctx.needs_input_grad[2] else None, None, None, None, None


class _BatchNormGradient(Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
        mean, inv_std, ctx.eps = options
        of_x, of_weight, of_bias = _batch_norm_backward(
            grad, x, weight, None, None, mean, inv_std, True, ctx.eps, [True, True, True]
        )
        ctx.save_for_backward(grad, x, weight, mean, inv_std, of_weight, of_bias)
        ctx.set_materialize_grads(False)
        return of_x, of_weight, of_bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(other is not None for other in others):
            raise RuntimeError("within CheapDoubleBackward only gradients of inputs can be differentiated again")
        if v is None:
            return (None,) * 6
        grad, x, weight, mean, inv_std, sum_gx, sum_g = ctx.saved_tensors
        of_grad, sum_vx, sum_v = _batch_norm_backward(
            v, x, weight, None, None, mean, inv_std, True, ctx.eps, [True, True, True]
        )
        count = x.numel() // x.shape[1]
        mean_v, mean_g, a, b = sum_v / count, sum_g / count, sum_vx / count, sum_gx / count
        ones = torch.ones_like(inv_std)
        sum_vg = _batch_norm_backward(v, grad, weight, None, None, mean_g, ones, True, ctx.eps, [False, True, False])[1]
        s = sum_vg / count - a * b
        of_weight = count * inv_std * s

        def per_channel(values: Tensor) -> Tensor:
            return values.view(-1, *[1] * (x.dim() - 2))

        scale = weight * inv_std.square()
        of_hat = scale * (2 * a * b - s) * inv_std
        constant = scale * (b * mean_v + a * mean_g) - of_hat * mean
        # x times one value per channel plus another, in one pass: what batch norm is in evaluation mode
        of_x = torch.native_batch_norm(x, of_hat, constant, torch.zeros_like(a), ones, False, 0.0, 0.0)[0]
        of_x.addcmul_(v, per_channel(-scale * b)).addcmul_(grad, per_channel(-scale * a))
        return of_grad, of_x, of_weight, None, None, None


def _relu(func: Callable[..., Tensor], x: Tensor, inplace: bool = False) -> Tensor:
    if inplace or not _applies(x):
        return func(x, inplace=True) if inplace else func(x)
    out: Tensor = _ReLU.apply(x)
    return out


class _ReLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.relu(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        masked: Tensor = _Mask.apply(grad, out.detach())
        return masked


class _Mask(Function):
    """The gradient where the output was positive; how often that changes with the input is zero almost everywhere."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, out: Tensor) -> Tensor:
        ctx.save_for_backward(out)
        masked: Tensor = torch.ops.aten.threshold_backward(grad, out, 0)
        return masked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(v, out, 0), None
