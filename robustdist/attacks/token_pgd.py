"""Projected gradient descent on embeddings, bounded per token or per sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from robustdist.attacks.base import Problem
from robustdist.attacks.pgd import PGD
from robustdist.core.rng import Noise
from robustdist.errors import UsageError
from robustdist.types import AttackLoss, Number

__all__ = ["TokenPGD", "TokenProblem"]

_BLOCK = 16


class TokenPGD(PGD):
    r"""Gradient ascent on the embeddings of a sequence, in an l2 ball around every token.

    With :math:`e_t` the embedding of token t and :math:`r_t` the unit of length,

    .. math:: \delta_t \leftarrow \Pi_{\|\delta_t\|_2 \le \epsilon r_t}
              \Big( \delta_t + \alpha \, r_t \frac{\nabla_{\delta_t} \ell}{\|\nabla_{\delta_t} \ell\|_2} \Big)

    ``relative=True`` takes :math:`r_t = \|e_t\|_2`, the length of the token's own embedding, so that ``eps=0.05`` means
    the same for every model and does not depend on who shares the batch; ``relative=False`` takes :math:`r_t = 1`.
    ``per="sequence"`` bounds and normalises all tokens of a sequence together: the norms run over tokens and hidden
    dimensions, and :math:`r` is the length of the whole clean sequence. The start is uniform in the ball.

    Which tokens count is told by the function under attack: ``mask``, an attribute of ``forward`` of shape
    (batch, tokens), as views of :class:`~robustdist.core.space.Embeddings` have it. At all others the perturbation is
    exactly zero, and neither they nor the padded length change what the real tokens get.

    Args:
        eps: Radius, in units of r.
        steps: Number of gradient steps, at least 1.
        step_size: Length of a step, in units of r; default ``2.5 * eps / steps``.
        per: "token" or "sequence".
        relative: Whether r is the length of the clean embedding, or 1.
        norm: "l2"; there for the sake of reports.
        random_start, restarts, start_std, targeted, attack_loss, model_mode, seed: As in
            :class:`~robustdist.attacks.PGD`.

    Raises:
        UsageError: If an argument is out of range; in a call, if the input is not of shape (batch, tokens, hidden).

    References:
        Zhu et al., "FreeLB: Enhanced Adversarial Training for Natural Language Understanding".
        Miyato et al., "Adversarial Training Methods for Semi-Supervised Text Classification".

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3))
        >>> x, y = torch.randn(2, 3, 2), torch.tensor([0, 2])
        >>> delta = TokenPGD(eps=0.1, steps=3)(model, x, y) - x
        >>> bool((delta.norm(dim=2) <= 0.1 * x.norm(dim=2) + 1e-6).all())
        True
    """

    def __init__(
        self,
        *,
        eps: Number = 0.05,
        steps: int = 3,
        step_size: Number | None = None,
        per: Literal["token", "sequence"] = "token",
        relative: bool = True,
        norm: Literal["l2"] = "l2",
        random_start: bool = True,
        restarts: int = 1,
        start_std: float | None = None,
        targeted: bool = False,
        attack_loss: Literal["ce", "margin"] | AttackLoss = "ce",
        model_mode: Literal["eval", "train"] = "eval",
        seed: int = 0,
    ) -> None:
        if per not in ("token", "sequence"):
            raise UsageError(f"per={per!r} is unknown: choose token or sequence")
        if norm != "l2":
            raise UsageError(f"norm={norm!r} is not bounded per token: TokenPGD knows l2, PGD(bounds=None) the others")
        super().__init__(
            eps=eps,
            steps=steps,
            step_size=step_size,
            random_start=random_start,
            restarts=restarts,
            start_std=start_std,
            norm=norm,
            bounds=None,
            targeted=targeted,
            attack_loss=attack_loss,
            model_mode=model_mode,
            seed=seed,
        )
        self.per: Literal["token", "sequence"] = per
        self.relative = relative

    def check_inputs(self, x: Tensor) -> Tensor:
        """Return ``x`` in at least float32 if it is a batch of sequences.

        Raises:
            UsageError: If it is not.
        """
        if x.dim() != 3:
            raise UsageError(
                f"TokenPGD attacks embeddings of shape (batch, tokens, hidden), not inputs of shape {tuple(x.shape)}: "
                "set space to Embeddings() where the batch holds token ids, or use PGD"
            )
        return super().check_inputs(x)

    def problem(
        self,
        forward: Callable[[Tensor], Any],
        x: Tensor,
        y: Any,
        noise: Noise,
        *,
        rowwise: bool = True,
        **scales: float,
    ) -> Problem:
        """Return one attack call, with the tokens that ``forward.mask`` names; arguments as in ``Attack.problem``."""
        plain = super().problem(forward, x, y, noise, rowwise=rowwise, **scales)
        mask = getattr(forward, "mask", None)
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        elif mask.shape != x.shape[:2]:
            raise UsageError(
                f"forward.mask has shape {tuple(mask.shape)}, the input {tuple(x.shape)}: give one per token"
            )
        given = {field.name: getattr(plain, field.name) for field in fields(plain) if field.init}
        return TokenProblem(**given, mask=mask.bool(), per=self.per, relative=self.relative)

    def distance(self, x_adv: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the largest perturbation of a token, or that of the sequence, in units of r, shape (batch,)."""
        dims = _dims(self.per)
        x, x_adv = self.to_pixels(x), self.to_pixels(x_adv)
        if mask is not None and self.per == "sequence":
            # padding does not count for the length of a sequence; a change there shows all the same
            x, x_adv = x.masked_fill(~mask[..., None], 0.0), x_adv - x.masked_fill(mask[..., None], 0.0)
        lengths = _length(x_adv - x, dims)
        if self.relative:
            # 0/0 where an embedding is zero and stayed so
            lengths = torch.where(lengths == 0, lengths, lengths / _length(x, dims))
        return lengths.amax((1, 2))


@dataclass(kw_only=True)
class TokenProblem(Problem):
    """A problem whose ball is made of one ball per token or per sequence.

    Attributes:
        mask: Which tokens may move, shape (batch, tokens), bool.
        per: "token" or "sequence".
        relative: Whether lengths are measured in those of the clean embeddings.
    """

    mask: Tensor
    per: Literal["token", "sequence"]
    relative: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self._dims = _dims(self.per)
        clean = self._masked(self.x)
        self._unit = _length(clean, self._dims) if self.relative else torch.ones_like(clean[:, :1, :1])

    def project(self, x_adv: Tensor) -> Tensor:
        """Return ``x_adv`` projected onto the balls; tokens outside the mask are those of ``x``, bit for bit."""
        delta = self._masked(x_adv - self.x)
        lengths = _length(delta, self._dims).clamp(min=torch.finfo(delta.dtype).tiny)
        return self.x + delta * (self.eps * self._unit / lengths).clamp(max=1.0)

    def settle(self, x_adv: Tensor) -> Tensor:
        """Return ``x_adv`` projected."""
        return self.project(x_adv)

    def start(self, *tag: int | str) -> Tensor:
        """Return a point drawn uniformly from the balls; real tokens get the same draws whatever the padding."""
        hidden = self.x.shape[2]
        if self.per == "token":
            radius = self._spread(self.noise.uniform, 1, "radius", *tag) ** (1.0 / hidden)
        else:
            numbers = self.mask.sum(1).clamp(min=1)[:, None, None] * hidden
            radius = self.noise.uniform(self.x[:, :1, :1].contiguous(), "radius", *tag) ** (1.0 / numbers)
        # the volume of a ball grows with radius ** dimension, hence the root
        direction = _unit_vectors(self._spread(self.noise.normal, hidden, "start", *tag), self._dims)
        return self.project(self.x + self.eps * self._unit * radius * direction)

    def ascent(self, grad: Tensor, x_adv: Tensor) -> Tensor:
        """Return the normalised gradient of every token or sequence, times its unit of length."""
        return self._unit * _unit_vectors(self._masked(grad), self._dims)

    def _masked(self, values: Tensor) -> Tensor:
        return values.masked_fill(~self.mask[..., None], 0.0)

    def _spread(self, draw: Callable[..., Tensor], width: int, *tag: int | str) -> Tensor:
        """Return draws of shape (batch, tokens, width), taken in the order of the real tokens and zero elsewhere."""
        counts = self.mask.sum(1)
        longest = int(counts.max()) if len(counts) else 0
        # torch fills normal draws in blocks of 16 and the last one differently: whole blocks per token keep the draws
        # of a token independent of how many follow
        blocks = -(-width // _BLOCK) * _BLOCK
        packed = draw(self.x.new_empty(len(self.x), longest, blocks), *tag)
        spread = self.x.new_zeros(*self.mask.shape, width)
        spread[self.mask] = packed[torch.arange(longest, device=counts.device) < counts[:, None]][:, :width]
        return spread


def _dims(per: Literal["token", "sequence"]) -> tuple[int, ...]:
    return (2,) if per == "token" else (1, 2)


def _length(vectors: Tensor, dims: tuple[int, ...]) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=dims, keepdim=True)
    return lengths


def _unit_vectors(vectors: Tensor, dims: tuple[int, ...]) -> Tensor:
    # divided by the largest entry first: squares of 1e-23, as confident models give, would be 0 in float32
    tiny = torch.finfo(vectors.dtype).tiny
    scaled = vectors / vectors.abs().amax(dims, keepdim=True).clamp(min=tiny)
    return scaled / _length(scaled, dims).clamp(min=tiny)
