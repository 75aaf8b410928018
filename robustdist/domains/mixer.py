"""The ratios of the domains as training goes on: losses in, ratios out, everything a resumed training needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from robustdist.core.rng import derive_seed
from robustdist.domains.dro import check_ball, excess_losses, floored, next_potential, normalised, worst_mix
from robustdist.domains.reference import predicted_loss
from robustdist.domains.sheared import multiplicative_ratios
from robustdist.errors import UsageError

__all__ = ["DomainMixer", "Method"]

Method = Literal["dro", "static_dro", "sheared", "constant"]
_METHODS = ("dro", "static_dro", "sheared", "constant")

#: Shares of training from which losses are kept, references are predicted and the potential mix moves.
_KEEP_FROM, _PREDICT_FROM, _MOVE_FROM = 0.02, 0.1, 0.2
#: Most and fewest points that a prediction rests on; of a full list one of the older half makes room.
_MOST_POINTS, _FEWEST_POINTS = 64, 11


class _Point(NamedTuple):
    """One evaluation: samples seen and loss, per domain."""

    samples: list[int]
    losses: list[float]


class DomainMixer:
    """Decides how much of each domain is sampled.

    ``dro`` takes the worst mix in a chi-square ball around a potential mix, by the loss above a reference
    (:func:`~robustdist.domains.worst_mix`). Both can move: the reference to the loss that a scaling law predicts for
    the end of training, the potential mix towards the sampled one. ``static_dro`` is ``dro`` with both fixed,
    ``sheared`` multiplicative weights against a fixed reference, ``constant`` the mix of the beginning.

    Args:
        initial: Mix of the beginning, positive, one number per domain; normalised here.
        method: One of dro, static_dro, sheared, constant.
        rho: Radius of the chi-square ball.
        min_ratio: Smallest ratio to the potential mix, before normalisation.
        reference: Loss that every domain should reach. With ``dro`` a prediction takes its place as soon as there is
            one; None means none, and with ``dynamic_reference`` no change of ratios before a tenth of training.
        dynamic_reference: Predict the reference (method dro).
        dynamic_ratio: Move the potential mix (method dro).
        step_size: Step size of ``sheared``.
        seed: Decides which points make room for new ones.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Deng et al., "DRPruning: Efficient Large Language Model Pruning through Distributionally Robust Optimization".
    """

    def __init__(
        self,
        initial: Sequence[float] | Tensor,
        method: Method = "dro",
        *,
        rho: float = 0.1,
        min_ratio: float = 0.2,
        reference: Sequence[float] | None = None,
        dynamic_reference: bool = True,
        dynamic_ratio: bool = True,
        step_size: float = 1.0,
        seed: int = 0,
    ) -> None:
        if method not in _METHODS:
            raise UsageError(f"method={method!r} must be one of {', '.join(_METHODS)}")
        check_ball(rho, min_ratio)
        if not 0 <= step_size < math.inf:
            raise UsageError(f"step_size={step_size} must be a number of at least 0")
        self.initial = normalised(initial)
        self.method = method
        self.rho, self.min_ratio, self.step_size = rho, min_ratio, step_size
        self.dynamic_reference = dynamic_reference and method == "dro"
        self.dynamic_ratio = dynamic_ratio and method == "dro"
        self.seed = seed
        #: Mix that is sampled, and the one that the ball is around, both of shape (domains,).
        self.ratios, self.potential = self.initial.clone(), self.initial.clone()
        self.has_reference = reference is not None
        #: Loss that every domain should reach; zeros if there is none.
        self.reference = torch.zeros_like(self.initial)
        if reference is not None:
            if len(reference) != len(self.initial):
                raise UsageError(
                    f"reference has {len(reference)} losses for {len(self.initial)} domains: give one each"
                )
            self.reference = torch.as_tensor(reference, dtype=torch.float64)
            if not bool(self.reference.isfinite().all()):
                raise UsageError(f"reference={list(reference)} must be finite losses")
        self._predicted = [False] * len(self.initial)
        self._points: list[_Point] = []
        self._num_dropped = 0

    def update(self, losses: Sequence[float], samples: Sequence[int], progress: float = 1.0) -> bool:
        """Take in one evaluation and set :attr:`ratios`.

        Args:
            losses: Present loss of every domain.
            samples: Training samples seen of every domain, in all.
            progress: Share of training that is done, above 0 and at most 1.

        Returns:
            False if a loss is not finite: then nothing has changed.
        """
        if len(losses) != len(self.initial):
            raise UsageError(f"{len(losses)} losses were given for {len(self.initial)} domains: give one each")
        if not all(map(math.isfinite, losses)):
            return False
        if self.dynamic_reference and progress >= _KEEP_FROM:
            self._keep(_Point(list(samples), list(losses)))
            if progress >= _PREDICT_FROM and len(self._points) >= _FEWEST_POINTS:
                self._predict(progress)
        present = torch.tensor(losses, dtype=torch.float64)
        if self.method == "sheared":
            moved = multiplicative_ratios(self.ratios, present - self.reference, step_size=self.step_size)
            self.ratios = moved
        elif self.method != "constant" and (self.has_reference or not self._waits(progress)):
            excess = excess_losses(present, self.reference)
            mix = worst_mix(excess, self.potential, rho=self.rho, min_ratio=self.min_ratio)
            self.ratios = floored(mix.ratios, float(self.potential.min()))
            if self.dynamic_ratio and progress >= _MOVE_FROM:
                self.potential = next_potential(self.potential, self.ratios, self.initial)
        return True

    def _waits(self, progress: float) -> bool:
        return self.dynamic_reference and progress < _PREDICT_FROM

    def _keep(self, point: _Point) -> None:
        if len(self._points) == _MOST_POINTS:
            self._points.pop(derive_seed(self.seed, "point", self._num_dropped) % (_MOST_POINTS // 2))
            self._num_dropped += 1
        self._points.append(point)

    def _predict(self, progress: float) -> None:
        """Replace a reference by the first prediction; later ones can only lower it."""
        for domain in range(len(self.initial)):
            # the law knows no loss before the first sample
            seen = [(p.samples[domain], p.losses[domain]) for p in self._points if p.samples[domain]]
            if len(seen) < _FEWEST_POINTS:
                continue
            samples, losses = zip(*seen, strict=True)
            loss = predicted_loss(samples, losses, samples[-1] / progress)
            if loss is None:
                continue
            if not self._predicted[domain] or loss < self.reference[domain]:
                self.reference[domain] = loss
            self._predicted[domain] = True

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes, in plain types."""
        return {
            "ratios": self.ratios.tolist(),
            "potential": self.potential.tolist(),
            "reference": self.reference.tolist(),
            "predicted": list(self._predicted),
            "points": [[list(point.samples), list(point.losses)] for point in self._points],
            "num_dropped": self._num_dropped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``.

        Raises:
            UsageError: If the state is of another number of domains.
        """
        if len(state["ratios"]) != len(self.initial):
            raise UsageError(
                f"the checkpoint has ratios of {len(state['ratios'])} domains, the data {len(self.initial)}: resume "
                "with the same domains"
            )
        self.ratios, self.potential, self.reference = (
            torch.tensor(state[key], dtype=torch.float64) for key in ("ratios", "potential", "reference")
        )
        self._predicted = list(state["predicted"])
        self._points = [_Point(list(samples), list(losses)) for samples, losses in state["points"]]
        self._num_dropped = state["num_dropped"]
