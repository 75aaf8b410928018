"""OneBitAdam with MomentumReducer between real processes, without DDP and without Lightning."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from robustdist.comm import MomentumReducer
from robustdist.core.testing import run_ranks
from robustdist.errors import UsageError
from robustdist.optim import OneBitAdam

pytestmark = pytest.mark.slow


SHAPES = {"weight": (3, 700), "bias": (5,)}
LR, BETAS, EPS, FREEZE = 0.02, (0.8, 0.95), 1e-6, 6


@pytest.fixture(scope="module", autouse=True)
def optimisers_imported() -> None:
    """Import once what torch imports when an optimiser is made, and not in every process."""
    importlib.import_module("torch._dynamo")


def gradient(rank: int, step: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + 10 * step + len(name))
    return torch.randn(SHAPES[name], generator=generator)


class Run:
    """One rank: parameters, optimiser and reducer, advanced by given gradients."""

    def __init__(self, rank: int, **options) -> None:
        self.rank, self.world_size = rank, dist.get_world_size()
        self.weights = {name: nn.Parameter(gradient(99, 0, name)) for name in SHAPES}
        self.reducer = MomentumReducer()
        settings = {"lr": LR, "betas": BETAS, "eps": EPS, "freeze_step": FREEZE, **options}
        self.optimizer = OneBitAdam(list(self.weights.items()), reduce=self.reducer, **settings)

    def step(self, step: int, bad: float | None = None) -> None:
        """Local gradients, averaged only if the optimiser wants it; ``bad`` goes into one of the bias, on rank 1."""
        for name, weight in self.weights.items():
            weight.grad = gradient(self.rank, step, name)
        if bad is not None and self.rank == 1:
            self.weights["bias"].grad[2] = bad
        if self.optimizer.wants_gradient_sync():
            for weight in self.weights.values():
                dist.all_reduce(weight.grad)
                weight.grad /= self.world_size
        self.optimizer.step()

    def values(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}


def same(ones: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(ones[name], others[name]) for name in SHAPES)


# --- against a derivation


def one_bit(x: Tensor) -> Tensor:
    """The sign times the mean magnitude of each 512 entries."""
    return torch.cat([torch.where(part < 0, -part.abs().mean(), part.abs().mean()) for part in x.split(512)])


def whole_blocks(x: Tensor) -> Tensor:
    """Fill up the last block with its mean magnitude, so that it has the scale of its entries."""
    rest = x[len(x) // 512 * 512 :]
    return torch.cat([x, rest.abs().mean().expand(512 - len(rest))])


def naive(name: str, steps: int) -> list[Tensor]:
    """Two ranks on one process: everybody decodes both payloads, so there is one rounding, at the sender."""
    theta = gradient(99, 0, name)
    m, v, residuals = torch.zeros_like(theta), torch.zeros_like(theta), [0.0, 0.0]
    path = []
    for t in range(steps):
        grads = [gradient(rank, t, name) for rank in range(2)]
        if t < FREEZE:
            mean = (grads[0] + grads[1]) / 2
            m, v = m + (1 - BETAS[0]) * (mean - m), BETAS[1] * v + (1 - BETAS[1]) * mean**2
        else:
            local = [m + (1 - BETAS[0]) * (grad - m) for grad in grads]
            if name == "weight":
                wanted = [whole_blocks(x.flatten()) + residual for x, residual in zip(local, residuals, strict=True)]
                residuals = [x - one_bit(x) for x in wanted]
                local = [one_bit(x)[: theta.numel()].view(theta.shape) for x in wanted]
            m = (local[0] + local[1]) / 2
        v_hat = v / (1 - BETAS[1] ** min(t + 1, FREEZE))
        theta = theta - LR / (1 - BETAS[0] ** (t + 1)) * m / (v_hat.sqrt() + EPS)
        path.append(theta)
    return path


def test_two_ranks_follow_adam_and_then_the_derivation():
    def run(rank: int) -> list[dict[str, Tensor]]:
        one = Run(rank)
        path = []
        for step in range(30):
            one.step(step)
            path.append(one.values())
        one.reducer.close()
        return path

    first, second = run_ranks(run)
    assert all(same(one, other) for one, other in zip(first, second, strict=True))
    weight = nn.Parameter(gradient(99, 0, "weight"))
    adam = torch.optim.Adam([weight], lr=LR, betas=BETAS, eps=EPS)
    for step in range(FREEZE):
        weight.grad = (gradient(0, step, "weight") + gradient(1, step, "weight")) / 2
        adam.step()
        assert torch.equal(first[step]["weight"], weight)
    for name in SHAPES:
        for step, expected in enumerate(naive(name, 30)):
            torch.testing.assert_close(first[step][name], expected, rtol=1e-4, atol=2e-5)


def test_three_ranks_stay_alike_resume_and_leave_no_trace_of_skipped_steps():
    """Three ranks encode twice, so there are residuals of owners too."""

    def run(rank: int) -> list[dict[str, Tensor]]:
        options = {"variance": "zero_one", "kappa": 4, "freeze_step": 20}
        whole, skipping, saved, resumed = (Run(rank, **options) for _ in range(4))
        path = []
        for step in range(50):
            whole.step(step)
            path.append(whole.values())
            if step in (3, 9, 30):  # the first of them averages gradients
                skipping.step(77, bad=[math.nan, math.inf][step % 2])
            skipping.step(step)
        assert same(whole.values(), skipping.values())
        assert whole.reducer.engine.owned.state_dict()["residual"], "owners keep residuals"

        for step in range(25):
            saved.step(step)
        for name, weight in resumed.weights.items():
            weight.data.copy_(saved.weights[name].data)
        resumed.optimizer.load_state_dict(saved.optimizer.state_dict())
        resumed.reducer.load_state_dict(saved.reducer.state_dict())
        for step in range(25, 50):
            resumed.step(step)
        assert same(whole.values(), resumed.values())

        with pytest.raises(UsageError, match=f"rank {(rank + 1) % 3} of 3 and this is rank {rank} of 3"):
            resumed.reducer.load_state_dict({**saved.reducer.state_dict(), "rank": (rank + 1) % 3})
        stats = whole.reducer.engine.comm_stats()
        assert stats["steps"] == sum(not whole.optimizer.wants_gradient_sync(step) for step in range(50))
        assert stats["ratio"] > 15
        for one in (whole, skipping, saved, resumed):
            one.reducer.close()
        return path

    first, *others = run_ranks(run, 3)
    for path in others:
        assert all(same(one, other) for one, other in zip(first, path, strict=True))


# --- faults of one rank


def test_a_fault_on_one_rank_ends_all_of_them():
    def run(rank: int) -> tuple[str, str]:
        one = Run(rank, max_skipped=3)
        late = nn.Parameter(torch.ones(3))
        one.optimizer.add_param_group({"params": [("late", late)]})
        for step in range(FREEZE + 1):
            one.step(step)
        texts = []
        for bad, value in ((math.nan, 0.0), (math.nan, 0.0), (math.nan, 0.0), (None, float(rank))):
            late.grad = torch.full_like(late, value)
            try:
                one.step(0, bad)
            except UsageError as error:
                texts.append(str(error))
        one.reducer.close()
        return tuple(texts)

    (skipped, late), (own_skipped, own_late) = run_ranks(run)
    assert "a gradient of another rank is not finite" in skipped
    assert "the gradient of bias is not finite" in own_skipped
    assert "a parameter on another rank had no gradient until step 6" in late
    assert "late had no gradient until step 6" in own_late


# --- what it is for


def test_a_net_is_trained_about_as_well_as_by_adam():
    def batch(rank: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        return x, x[:, :1] * x[:, 1:2] + x[:, 2:4].sum(1, keepdim=True).sin()

    def train(rank: int, one_bit: bool, steps: int = 250) -> float:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(), nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 1))
        reducer = MomentumReducer(small=64)
        optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
        if one_bit:
            optimizer = OneBitAdam(net.named_parameters(), lr=5e-3, freeze_step=60, reduce=reducer)
        rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
        for step in range(steps):
            x, y = batch(rank, step, 32)
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            if not one_bit or optimizer.wants_gradient_sync():
                for parameter in net.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= 2
            optimizer.step()
            rates.step()
        reducer.close()
        x, y = batch(9, 99, 2000)
        return float((net(x) - y).square().mean())

    losses = run_ranks(lambda rank: (train(rank, False), train(rank, True)))
    assert losses[0] == losses[1]
    adam, ours = losses[0]
    assert ours < 1.25 * adam
    assert adam < 0.3
