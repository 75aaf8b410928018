"""Modules that take the place of dense ones: attention whose heads can go, and a block that passes its input on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robustdist.errors import UsageError

__all__ = ["PassThrough", "SlimMultiheadAttention", "slim"]


class SlimMultiheadAttention(nn.MultiheadAttention):
    r"""``nn.MultiheadAttention`` in which ``num_heads * head_dim`` need not be ``embed_dim``.

    .. math:: y = W_o \, \mathrm{concat}_h \, \mathrm{softmax}(q_h k_h^\top / \sqrt{d} + M) \, v_h + b_o

    with d = ``head_dim``. Parameters have the names of the parent class: with n = ``num_heads`` * ``head_dim``,
    ``in_proj_weight`` is (3 n, embed_dim), ``in_proj_bias`` (3 n,), ``out_proj.weight`` (embed_dim, n). Never built
    directly: :func:`slim` turns a dense attention into one, and the parameters stay the same objects.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as the parent class does; arguments, shapes and results are the same.

        Raises:
            UsageError: If ``attn_mask`` has three dimensions and not ``batch * num_heads`` masks.
            RuntimeError: If ``is_causal`` comes without ``attn_mask``, as in the parent class.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = query.dim() == 3
        q, k, v = (self._batch_first(x, batched) for x in self._projected(query, key, value))
        batch = q.shape[0]  # of any size in an export, where len() fixes it
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(batch, 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(batch, 1, -1)], 1)
            extra += 1
        if self.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(batch, 1, x.shape[-1])], 1) for x in (k, v))
            extra += 1
        q, k, v = (x.view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2) for x in (q, k, v))
        # as in the parent class, where it hides an added key too, the hint replaces a mask that nothing else needs
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q, extra)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            weights = F.dropout(weights, dropout) if dropout else weights
            heads = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        out: Tensor = self.out_proj(heads.transpose(1, 2).flatten(-2))
        if not batched:
            return out.squeeze(0), weights
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        packed = cast("Tensor | None", self.in_proj_weight)  # None with widths of their own
        if packed is not None and query is key and key is value:
            return F.linear(query, packed, self.in_proj_bias).chunk(3, -1)
        apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = apart if packed is None else packed.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, extra: int) -> Tensor | None:
        """Return what is added to the scores, broadcastable to (batch, num_heads, target, source)."""
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, q.dtype)
            if mask.dim() == 3 and len(mask) == len(q) * self.num_heads:
                mask = mask.view(len(q), self.num_heads, *mask.shape[1:])
            elif mask.dim() != 2:
                raise UsageError(
                    f"attn_mask has shape {tuple(mask.shape)}, and {self.num_heads} heads are left: give one mask of "
                    f"shape (target, source), or {len(q)} * {self.num_heads} of them"
                )
            mask = F.pad(mask, (0, extra))
        if padding is None:
            return mask
        padding = F.pad(_additive(padding, q.dtype), (0, extra))
        padding = (padding if padding.dim() == 2 else padding.unsqueeze(0))[:, None, None]
        return padding if mask is None else mask + padding


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)


def slim(module: nn.Module) -> Callable[[], None]:
    """Turn an ``nn.MultiheadAttention`` into a :class:`SlimMultiheadAttention`, in place; results stay the same.

    ``nn.TransformerEncoderLayer`` has a fused path that reads the attention's parameters past its ``forward`` and
    takes ``num_heads`` to divide ``embed_dim``; it is switched off by the flag it asks for.

    Returns:
        A function that makes the module what it was.

    Raises:
        UsageError: If ``module`` is something else; a subclass may compute something else.
    """
    before = type(module)
    if before is SlimMultiheadAttention:
        return lambda: None
    if before is not nn.MultiheadAttention or not isinstance(module, nn.MultiheadAttention):
        raise UsageError(f"heads of {before.__name__} cannot go: only those of nn.MultiheadAttention itself can")
    attention, packed = module, module._qkv_same_embed_dim
    attention.__class__ = SlimMultiheadAttention
    attention._qkv_same_embed_dim = False

    def undo() -> None:
        attention.__class__ = before
        attention._qkv_same_embed_dim = packed

    return undo


class PassThrough(nn.Module):
    """Stands in the place of a dropped block, so that the names of all others stay: returns its first argument.

    Args:
        layer: The block it replaces; its plain attributes are kept, since some models ask their blocks for them.
    """

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        for name, value in vars(layer).items() if layer is not None else ():
            if name not in self.__dict__ and isinstance(value, (bool, int, float, str)):
                setattr(self, name, value)
        self.train(layer.training if layer is not None else True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument, by position or, if there are none, by keyword."""
        return args[0] if args else next(iter(kwargs.values()))
