"""Bits chosen by reinforcement learning from the training loss and the time of a step."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from robustdist.comm.controller import BitController, check_bits
from robustdist.core.rng import derive_seed
from robustdist.errors import UsageError
from robustdist.types import Number, check_count, parse_number

__all__ = ["MQGrad"]


class MQGrad(BitController):
    r"""SARSA over the number of bits: more of them where the loss then falls faster per second.

    Every ``interval`` = T steps the last T smoothed losses are the state,

    .. math:: s_i = r \, s_{i-1} + (1 - r) L_i,

    the action is the number of bits for the next T steps, at most one more or less than now, and the value of both is
    learnt on policy, by a small net with T inputs, ``hidden`` tanh units and one linear output per number of bits:

    .. math:: \theta \leftarrow \theta + \alpha (R + \gamma Q(s', b') - Q(s, b)) \nabla Q(s, b).

    Where :math:`\alpha \|\nabla Q\|^2 > 1`, which would carry the value beyond its target and in the end to infinity,
    :math:`1 / \|\nabla Q\|^2` takes the place of :math:`\alpha`; the authors' program has no such bound.

    The reward is the slope m of a least-squares line through the T smoothed losses, over the time of a step,

    .. math:: R = -300 \, m / t(b), \qquad t(b) = 10 \, (t_c + b \, t_b) / (t_c + t_b)

    where :math:`t_c` is the time of computation and :math:`t_b` that of communication per bit, both smoothed like the
    losses. The authors give the time without unit, as 5 + 5 b; this is the same for :math:`t_c = t_b` and does not
    depend on the speed of the machine. Losses are not scaled.

    Steps in which a value is not finite are not counted, and an update that would not be finite is not made.

    Args:
        min_bits: Fewest bits, and the first ones.
        max_bits: Most bits.
        interval: Steps between two decisions, T, at least 2.
        smoothing: Factor r.
        gamma: Discount of later rewards.
        learning_rate: Step size :math:`\alpha`.
        exploration: Share of decisions that are drawn at random from those that are allowed.
        monotone: Never take bits away, as the authors' released program does; an explored decision then adds one.
        hidden: Number of tanh units.
        reward: "modelled" divides by t(b); "measured" by the mean time of the steps themselves, in the same unit.
        seed: Seed of the first weights and of the explored decisions.

    Raises:
        UsageError: If an argument is out of range.

    References:
        Cui et al., "MQGrad: Reinforcement Learning of Gradient Quantization in Parameter Server".
    """

    def __init__(
        self,
        min_bits: int = 2,
        max_bits: int = 8,
        *,
        interval: int = 5,
        smoothing: Number = 0.9,
        gamma: Number = 0.9,
        learning_rate: Number = 0.05,
        exploration: Number = 0.1,
        monotone: bool = False,
        hidden: int = 30,
        reward: Literal["modelled", "measured"] = "modelled",
        seed: int = 0,
    ) -> None:
        self.min_bits, self.max_bits = check_bits(min_bits, "min_bits"), check_bits(max_bits, "max_bits")
        if min_bits > max_bits:
            raise UsageError(f"min_bits={min_bits} must not be above max_bits={max_bits}")
        if check_count(interval, "interval") < 2:
            raise UsageError(f"interval={interval} must be at least 2: the slope of the loss takes two steps")
        self.interval, self.hidden = interval, check_count(hidden, "hidden")
        self.smoothing, self.gamma = _share(smoothing, "smoothing"), _share(gamma, "gamma")
        self.exploration = parse_number(exploration, "exploration")
        if not 0 <= self.exploration <= 1:
            raise UsageError(f"exploration={exploration!r} must be a share from 0 to 1")
        self.learning_rate = parse_number(learning_rate, "learning_rate")
        if not 0 < self.learning_rate < math.inf:
            raise UsageError(f"learning_rate={learning_rate!r} must be positive")
        if reward not in ("modelled", "measured"):
            raise UsageError(f"reward={reward!r} must be 'modelled' or 'measured'")
        self.monotone, self.reward, self.seed = monotone, reward, seed
        self.bits = self.min_bits
        self._q = _QNet(interval, hidden, max_bits - min_bits + 1, seed)
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._smoothed: list[float] = []  # loss, seconds of computation, seconds per bit
        self._state: list[float] = []
        self._decisions = 0

    def observe(self, loss: float, *, compute_seconds: float, comm_seconds: float) -> int:
        """See one step; learn and decide at the end of an interval."""
        values = [float(loss), float(compute_seconds), float(comm_seconds) / self.bits]
        if not all(math.isfinite(value) for value in values):
            return self.bits
        if not self._smoothed:
            self._smoothed = values
            self._state = values[:1] * self.interval
        r = self.smoothing
        self._smoothed = [r * old + (1 - r) * new for old, new in zip(self._smoothed, values, strict=True)]
        self._losses.append(self._smoothed[0])
        self._seconds.append(float(compute_seconds) + float(comm_seconds))
        if len(self._losses) == self.interval:
            self._decide()
        return self.bits

    def _decide(self) -> None:
        """Choose the next bits, then learn from the interval that ends."""
        state, place = self._losses, self.bits - self.min_bits
        after = self._q.values(state)
        chosen = self._choose(after)
        delta = self._reward() + self.gamma * after[chosen - self.min_bits] - self._q.values(self._state)[place]
        self._q.move(self._state, place, self.learning_rate, delta)
        self.bits, self._state = chosen, state
        self._losses, self._seconds = [], []
        self._decisions += 1

    def _choose(self, values: Sequence[float]) -> int:
        low = self.bits if self.monotone else self.bits - 1
        allowed = range(max(low, self.min_bits), min(self.bits + 1, self.max_bits) + 1)
        draws = random.Random(derive_seed(self.seed, "mqgrad", self._decisions))
        if draws.random() < self.exploration:
            return allowed[-1] if self.monotone else draws.choice(allowed)
        return max(allowed, key=lambda bits: (values[bits - self.min_bits], bits == self.bits))

    def _reward(self) -> float:
        middle = (self.interval - 1) / 2
        deviations = [place - middle for place in range(self.interval)]
        slope = sum(x * y for x, y in zip(deviations, self._losses, strict=True)) / sum(x * x for x in deviations)
        _, compute, per_bit = self._smoothed
        time = compute + self.bits * per_bit if self.reward == "modelled" else sum(self._seconds) / self.interval
        unit = (compute + per_bit) / 10
        # without a clock, or with one too coarse, all numbers of bits cost the same
        return -300 * slope / (time / unit if time > 0 and unit > 0 else 10.0)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, running means, the interval that is under way, and the number of decisions."""
        return {
            **super().state_dict(),
            "net": self._net(),
            "weights": [weight.clone() for weight in self._q.weights],
            "losses": list(self._losses),
            "seconds": list(self._seconds),
            "smoothed": list(self._smoothed),
            "state": list(self._state),
            "decisions": self._decisions,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was saved.

        Raises:
            UsageError: If it is that of other bits, another interval or another net.
        """
        super().load_state_dict(state)
        if list(state["net"]) != self._net():
            raise UsageError(
                f"bits: the state was saved with (min_bits, max_bits, interval, hidden) = {tuple(state['net'])} "
                f"and this controller has {tuple(self._net())}: resume with the same"
            )
        for weight, saved in zip(self._q.weights, state["weights"], strict=True):
            weight.copy_(saved)
        self.bits = int(state["bits"])
        self._losses, self._seconds = list(state["losses"]), list(state["seconds"])
        self._smoothed, self._state = list(state["smoothed"]), list(state["state"])
        self._decisions = int(state["decisions"])

    def _net(self) -> list[int]:
        return [self.min_bits, self.max_bits, self.interval, self.hidden]


class _QNet:
    """Linear, tanh, linear, in double precision; initial standard deviations as in the authors' program."""

    def __init__(self, inputs: int, hidden: int, outputs: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(derive_seed(seed, "mqgrad weights"))

        def draw(rows: int, columns: int, std: float) -> Tensor:
            return std * torch.randn(rows, columns, dtype=torch.float64, generator=generator)

        self.weights = [
            draw(hidden, inputs, 0.05),
            torch.zeros(hidden, dtype=torch.float64),
            draw(outputs, hidden, 5e-5),
            torch.zeros(outputs, dtype=torch.float64),
        ]

    def values(self, state: Sequence[float]) -> list[float]:
        """Return the value of every number of bits."""
        _, _, weight, bias = self.weights
        values: list[float] = (weight @ self._hidden(state) + bias).tolist()
        return values

    def move(self, state: Sequence[float], place: int, learning_rate: float, delta: float) -> None:
        """Move one value towards ``delta`` more along its gradient, but not beyond, and never to infinity."""
        hidden = self._hidden(state)
        inner = self.weights[2][place] * (1 - hidden.square())
        outer = torch.outer(inner, torch.tensor(state, dtype=torch.float64))
        square = float(outer.square().sum() + inner.square().sum() + hidden.square().sum()) + 1
        step = min(learning_rate, 1 / square) * delta
        new = [weight.clone() for weight in self.weights]
        new[0].add_(outer, alpha=step)
        new[1].add_(inner, alpha=step)
        new[2][place].add_(hidden, alpha=step)
        new[3][place] += step
        if all(bool(torch.isfinite(weight).all()) for weight in new):
            self.weights = new

    def _hidden(self, state: Sequence[float]) -> Tensor:
        weight, bias = self.weights[:2]
        return torch.tanh(weight @ torch.tensor(state, dtype=torch.float64) + bias)


def _share(value: Number, option: str) -> float:
    number = parse_number(value, option)
    if not 0 <= number < 1:
        raise UsageError(f"{option}={value!r} must be at least 0 and below 1")
    return number
