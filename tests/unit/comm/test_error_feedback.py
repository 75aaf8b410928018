"""Memories: what is kept, what is given back, and that it makes biased codecs converge."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from robustdist import UsageError
from robustdist.comm import (
    DGC,
    EF21,
    FP16,
    QSGD,
    Compressor,
    ErrorFeedback,
    Int8,
    Memory,
    Natural,
    PowerSGD,
    RandomK,
    Sign,
    TernGrad,
    TopK,
)
from robustdist.comm.verdicts import is_finite


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(memory: Memory, codec: Compressor, grad: Tensor, name: str = "w", scale: float = 1.0) -> Tensor:
    """One parameter, one rank, one step: what every receiver decodes."""
    value = memory.prepare(name, grad.clone(), scale=scale)
    data = torch.empty(codec.payload_bytes(value.numel()), dtype=torch.uint8)
    codec.encode(value, data, name=name)
    sent = torch.empty_like(value)
    codec.decode(data, sent)
    memory.update(name, value, sent.clone(), scale=scale)
    return memory.finish(name, sent, scale=scale)


MEMORIES = [
    pytest.param(lambda: (ErrorFeedback(), Sign()), id="EF-Sign"),
    pytest.param(lambda: (ErrorFeedback(), TopK(0.1)), id="EF-TopK"),
    pytest.param(lambda: (DGC(0.1).make_memory(), DGC(0.1)), id="DGC"),
    pytest.param(lambda: (EF21(TopK(0.1)).make_memory(), EF21(TopK(0.1))), id="EF21"),
]


def kept(memory: Memory) -> dict[str, Tensor]:
    return {f"{slot}/{name}": v for slot, vs in memory.state_dict().items() for name, v in vs.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# --- error feedback


@pytest.mark.parametrize("codec", [Sign(), TopK(0.02), Int8(), QSGD(2, stochastic=False), RandomK(0.1, scaled=False)])
def test_nothing_is_lost_only_delayed(codec):
    memory, sent, given = ErrorFeedback(), torch.zeros(1500), torch.zeros(1500)
    for number in range(20):
        grad = gaussian(1500, seed=number)
        given += grad
        sent += step(memory, codec, grad)
        memory.commit()
    assert torch.allclose(sent + memory.get("w"), given, atol=2e-5)
    assert memory.norm() == pytest.approx(float(memory.get("w").norm()))
    assert memory.norm() > 0.05


def test_the_residual_is_the_input_less_what_was_sent():
    memory, residual = ErrorFeedback(), torch.zeros(700)
    for number in range(5):
        grad = gaussian(700, seed=number)
        value = grad + residual
        sent = Sign().decompress(Sign().compress(value))
        assert torch.equal(step(memory, Sign(), grad), sent)
        residual = value - sent
        assert torch.allclose(memory.get("w"), residual, atol=1e-6)


def test_a_parameter_without_gradient_stays_at_zero():
    memory = ErrorFeedback()
    for _ in range(100):
        assert not step(memory, Sign(), torch.zeros(600)).any()
    assert not memory.get("w").any()


def test_residuals_are_in_units_without_loss_scale():
    plain, scaled = ErrorFeedback(), ErrorFeedback()
    for number, scale in enumerate((1024.0, 1024.0, 1.0, 65536.0, 0.5)):
        grad = gaussian(900, seed=number)
        expected = step(plain, Sign(), grad)
        assert torch.allclose(step(scaled, Sign(), grad * scale, scale=scale) / scale, expected, atol=1e-6)
    assert torch.allclose(scaled.get("w"), plain.get("w"), atol=1e-6)


def test_residuals_can_be_stored_in_half_the_space():
    memory = ErrorFeedback(dtype=torch.bfloat16)
    step(memory, Sign(), gaussian(900))
    assert memory.get("w").dtype == torch.bfloat16
    exact = ErrorFeedback()
    step(exact, Sign(), gaussian(900))
    assert torch.equal(memory.get("w"), exact.get("w").bfloat16())


# --- what all memories share


@pytest.mark.parametrize("make", MEMORIES)
def test_rollback_is_exact(make):
    memory, codec = make()
    for number in range(3):
        step(memory, codec, gaussian(800, seed=number))
        step(memory, codec, gaussian(9, seed=number), "b")
        memory.commit()
    before = kept(memory)
    for number in range(3, 6):  # several parameters, several times
        step(memory, codec, gaussian(800, seed=number))
        step(memory, codec, gaussian(30, seed=number), "new")
    assert not torch.equal(memory.get("w"), before[f"{memory.slots[0]}/w"])
    assert same(kept(memory), before), "uncommitted changes are not in the state"
    memory.rollback()
    assert same(kept(memory), before)
    assert memory.get("new") is None
    other, _ = make()
    other.load_state_dict(memory.state_dict())
    results = [step(either, codec, gaussian(800, seed=9)) for either in (memory, other)]
    assert torch.equal(*results)


@pytest.mark.parametrize("make", MEMORIES)
def test_several_steps_between_commits_follow_each_other(make):
    once, often = make()[0], make()[0]
    codec = make()[1]
    for number in range(4):
        grad = gaussian(800, seed=number)
        assert torch.equal(step(once, codec, grad), step(often, codec, grad))
        often.commit()
    once.commit()
    assert same(kept(once), kept(often))


@pytest.mark.parametrize("make", MEMORIES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("committed", [True, False])
def test_a_non_finite_gradient_is_passed_on_and_never_kept(make, bad, committed):
    memory, codec = make()
    if committed:
        step(memory, codec, gaussian(800))
        memory.commit()
    before = kept(memory)
    grad = gaussian(800, seed=1)
    grad[77] = bad
    assert not step(memory, codec, grad).isfinite().all()
    memory.commit()
    assert same(kept(memory), before)
    assert step(memory, codec, gaussian(800, seed=2)).isfinite().all()


@pytest.mark.parametrize("make", MEMORIES)
def test_a_non_finite_mean_undoes_the_step_of_the_good_ranks_too(make):
    memory, codec = make()
    step(memory, codec, gaussian(800))
    memory.commit()
    before = kept(memory)
    value = memory.prepare("w", gaussian(800, seed=1))
    memory.update("w", value, through(codec, value))
    memory.finish("w", torch.full((800,), math.nan))
    memory.commit()
    assert same(kept(memory), before)


def through(codec: Compressor, value: Tensor, **key: int) -> Tensor:
    """Encode and decode, without the memory that a codec may have."""
    data = torch.empty(codec.payload_bytes(value.numel()), dtype=torch.uint8)
    codec.encode(value, data, **key)
    sent = torch.empty_like(value)
    codec.decode(data, sent)
    return sent


def test_an_overflow_of_the_codec_is_not_kept():
    memory = ErrorFeedback()
    step(memory, FP16(), torch.tensor([1.0, 0.1]))
    memory.commit()
    before = kept(memory)
    assert step(memory, FP16(), torch.tensor([1e6, 0.1])).isinf().any()
    memory.commit()
    assert same(kept(memory), before)


@pytest.mark.parametrize("make", MEMORIES)
def test_states_are_copies_and_of_one_kind(make):
    memory, codec = make()
    step(memory, codec, gaussian(800))
    memory.commit()
    state = memory.state_dict()
    before = kept(memory)
    for vectors in state.values():
        for vector in vectors.values():
            vector.fill_(7)
    assert same(kept(memory), before)
    with pytest.raises(UsageError, match="reset the memory"):
        memory.load_state_dict({"something": {}})
    memory.reset()
    assert kept(memory) == {}


def test_a_changed_size_is_told_and_dropping_helps():
    memory = ErrorFeedback()
    step(memory, Sign(), gaussian(40))
    with pytest.raises(UsageError, match="'w' has 40 elements and its gradient 30"):
        step(memory, Sign(), gaussian(30))
    memory.drop("w")
    step(memory, Sign(), gaussian(30))


def test_committed_buffers_are_used_in_turn():
    memory = ErrorFeedback()
    places = set()
    for number in range(8):
        step(memory, Sign(), gaussian(600, seed=number))
        memory.commit()
        places.add(memory.get("w").data_ptr())
    assert len(places) == 2


def test_is_finite_tells_overflow_of_a_sum_from_infinity():
    huge = torch.full((100,), 3e38)
    assert is_finite(huge)
    assert not is_finite(torch.cat([huge, torch.tensor([math.inf])]))
    assert not is_finite(torch.tensor([math.inf, -math.inf]))
    assert not is_finite(torch.tensor([math.nan, 1.0]))
    assert is_finite(torch.empty(0))


# --- EF21


def test_ef21_keeps_the_mean_of_the_estimates():
    ranks = [EF21(TopK(0.1)).make_memory() for _ in range(3)]
    codec = EF21(TopK(0.1))
    for number in range(6):
        mean = torch.zeros(400)
        for rank, memory in enumerate(ranks):
            value = memory.prepare("w", gaussian(400, seed=10 * number + rank))
            sent = through(codec, value)
            mean.add_(sent, alpha=1 / 3)
            memory.update("w", value, sent)
        results = [memory.finish("w", mean.clone()) for memory in ranks]
        for memory in ranks:
            memory.commit()
        assert torch.equal(results[0], results[2])
        estimates = sum(memory.get("w") for memory in ranks) / 3
        assert torch.allclose(results[0], estimates, atol=1e-6)


def test_ef21_reaches_a_tensor_that_stands_still():
    codec, x = EF21(TopK(0.2)), gaussian(50, 10)
    errors = [float((codec.decompress(codec.compress(x)) - x).norm()) for _ in range(6)]
    assert errors[0] > 1
    assert errors[4] == 0
    assert errors == sorted(errors, reverse=True)


# --- convergence


def descend(codec: Compressor, make_memory: Callable[[], Memory], steps: int = 400) -> float:
    """Distance to the minimum of two ranks' sum of quadratics, whose gradients cancel there but are not zero."""
    curvature = torch.logspace(-1, 0, 200)
    minima = [gaussian(200, seed=1), gaussian(200, seed=2)]
    best = (minima[0] + minima[1]) / 2
    memories = [make_memory() for _ in minima]
    x = torch.zeros(200)
    for number in range(steps):
        mean = torch.zeros(200)
        for rank, (minimum, own) in enumerate(zip(minima, memories, strict=True)):
            value = own.prepare("x", curvature * (x - minimum))
            sent = through(codec, value, rank=rank, step=number)
            mean.add_(sent, alpha=0.5)
            own.update("x", value, sent)
        results = [own.finish("x", mean.clone()) for own in memories]
        x = x - 0.2 * 0.5 ** (6 * number // steps) * results[0]
    return float((x - best).norm() / best.norm())


class Nothing(Memory):
    """Keeps nothing: what the codec leaves out is lost."""

    slots = ("nothing",)

    def prepare(self, name: str, grad: Tensor, *, scale: float = 1.0) -> Tensor:
        return grad

    def update(self, name: str, value: Tensor, sent: Tensor, *, scale: float = 1.0) -> None:
        pass


@pytest.mark.parametrize(
    "codec",
    [
        Int8(),
        QSGD(2).contractive(),
        TernGrad().contractive(),
        Sign(),
        Natural(),
        TopK(0.05),
        RandomK(0.2).contractive(),
        PowerSGD(2),
        EF21(TopK(0.05)),
    ],
    ids=repr,
)
def test_biased_codecs_converge_with_a_memory(codec):
    assert descend(codec, codec.make_memory) < 0.05


@pytest.mark.parametrize("codec", [Sign(), TopK(0.05), QSGD(2, stochastic=False)], ids=repr)
def test_and_do_not_without(codec):
    assert descend(codec, Nothing) > max(0.05, 3 * descend(codec, codec.make_memory))
