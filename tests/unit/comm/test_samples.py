"""Batches as codes: levels, bytes, draws, and which samples are sent."""

from __future__ import annotations

import math

import pytest
import torch

from robustdist import UsageError
from robustdist.comm import SampleQuantizer
from robustdist.comm.importance import importance, inclusion_probabilities, repeats, systematic_draw, top_rows
from robustdist.comm.sample_exchange import HEADER_BYTES, SampleExchange
from robustdist.comm.samples import Entry
from robustdist.core.testing import run_ranks

BITS = range(1, 9)


def through(quantizer: SampleQuantizer, x: torch.Tensor, **key: int) -> torch.Tensor:
    return quantizer.decompress(quantizer.compress(x, torch.zeros(len(x), dtype=torch.int64), **key))[0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-2.0, 3.0)])
def test_levels_and_expectation_are_those_of_the_formula(bits, bounds):
    low, high = bounds
    step = (high - low) / (2**bits - 1)
    values = torch.rand(3, 41, dtype=torch.float64).mul(high - low).add(low)
    values[0, :2] = torch.tensor(bounds)
    nearest = torch.tensor([[low + step * round((v - low) / step) for v in row] for row in values.tolist()])
    plain = through(SampleQuantizer(bits, bounds, dither=False), values.float())
    torch.testing.assert_close(plain, nearest, atol=1e-6, rtol=0)
    # each row drawn many times: one of the two neighbours, and the value itself on average
    draws = 4000
    drawn = through(SampleQuantizer(bits, bounds), values.float().repeat(draws, 1)).double().view(draws, 3, 41)
    assert float((drawn - values).abs().max()) < step * (1 + 1e-5)
    place = (values - low) / step
    share = place - place.floor()
    error = step * (share * (1 - share) / draws).sqrt()
    # four standard errors and what 15 bits of a draw leave out
    assert bool(((drawn.mean(0) - values).abs() <= 4.5 * error + step * 2.0**-15).all())
    assert float(((drawn.mean(0) - values) / error.clamp_min(step * 1e-3)).pow(2).mean()) < 1.5


@pytest.mark.parametrize("dither", [False, True])
def test_whole_pixels_survive_eight_bits_exactly(dither):
    pixels = torch.arange(256).repeat(200).view(-1, 256)
    quantizer = SampleQuantizer(8, dither=dither)
    for dtype in (torch.float32, torch.float64):
        x = pixels.to(dtype) / 255
        assert torch.equal(through(quantizer, x), x)
    x = pixels.to(torch.uint8)
    assert torch.equal(through(quantizer, x), x)


@pytest.mark.parametrize("bits", BITS)
def test_integer_pixels_stay_integers_and_unbiased(bits):
    pixels = torch.arange(256).to(torch.uint8).repeat(4000, 1)
    drawn = through(SampleQuantizer(bits), pixels)
    assert drawn.dtype == torch.uint8
    levels = [math.floor(level * 255 / (2**bits - 1) + 0.5) for level in range(2**bits)]
    assert set(drawn.unique().tolist()) == set(levels)
    error = drawn.double().std(0) / math.sqrt(len(drawn))
    assert bool(((drawn.double().mean(0) - pixels[0]).abs() <= 4.5 * error + 0.01).all())


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize(("classes", "label_bits"), [(2, 1), (10, 4), (256, 8), (257, 9), (1000, 10), (None, 64)])
def test_bytes_are_those_of_the_formula_and_labels_come_back(bits, classes, label_bits):
    quantizer = SampleQuantizer(bits, num_classes=classes)
    x, y = torch.rand(7, 3, 5), torch.randint(0, classes or 10**12, (7,))
    y[:2] = torch.tensor([0, (classes or 10**12) - 1])
    others = torch.randn(7, 2, dtype=torch.bfloat16), torch.rand(7) > 0.5
    payload = quantizer.compress(x, y, *others)
    whole = math.ceil(7 * 15 * bits / 8) + math.ceil(7 * label_bits / 8) + 7 * 2 * 2 + 7
    # a field of each code is packed apart, and each ends at a whole byte: at most two bytes more
    assert whole <= payload.num_bytes <= whole + 2
    assert payload.num_bytes == quantizer.payload_bytes([Entry.of(tensor) for tensor in (x, y, *others)])
    _, *rest = quantizer.decompress(payload)
    assert all(torch.equal(one, other) for one, other in zip(rest, (y, *others), strict=True))


def test_draws_follow_seed_rank_and_step_and_nothing_else():
    x = torch.rand(4, 50)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = through(SampleQuantizer(2), x, rank=1, step=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, through(SampleQuantizer(2), x, rank=1, step=3))
    for other in (
        through(SampleQuantizer(2, seed=1), x, rank=1, step=3),
        through(SampleQuantizer(2), x, rank=0, step=3),
        through(SampleQuantizer(2), x, rank=1, step=2),
    ):
        assert not torch.equal(first, other)


def test_probabilities_are_proportional_up_to_one():
    scores = torch.rand(40).pow(6)
    for count in (1, 7, 39, 40):
        found = inclusion_probabilities(scores, count)
        mixed = (scores + scores.mean()).double()
        low, high = 0.0, 1e9  # c by bisection
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if (middle * mixed).clamp(max=1).sum() < count else (low, middle)
        torch.testing.assert_close(found, (low * mixed).clamp(max=1), atol=1e-6, rtol=1e-6)
    for scores in (torch.zeros(4), torch.tensor([1.0, float("nan"), 2.0, 3.0])):
        torch.testing.assert_close(inclusion_probabilities(scores, 2), torch.full((4,), 0.5, dtype=torch.float64))


def test_drawing_and_repeating_counts_every_sample_once_on_average():
    scores = torch.tensor([0.0, 0.1, 1.0, 5.0, 0.3, 2.0])
    probabilities = inclusion_probabilities(scores, 3)
    draws = 6000
    counts = torch.zeros(draws, 6)
    for step in range(draws):
        rows = systematic_draw(probabilities, 3, "draw", step)
        assert len(set(rows.tolist())) == 3
        counts[step, rows] = repeats(probabilities[rows], "repeat", step).float()
    assert bool((counts[:, probabilities >= 1] == 1).all())
    error = counts.std(0) / math.sqrt(draws)
    assert bool(((counts.mean(0) - 1).abs() <= 4 * error).all())
    assert float(error.max()) < 0.05


def test_scores_are_those_of_the_formula():
    logits, y = torch.randn(5, 3), torch.tensor([0, 1, 2, 2, 0])
    softmax = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    wanted = torch.stack([(row - torch.eye(3)[label]).norm() for row, label in zip(softmax, y, strict=True)])
    torch.testing.assert_close(importance(logits, y, "gradient"), wanted)
    wanted = torch.stack([-torch.log(row[label]) for row, label in zip(softmax, y, strict=True)])
    torch.testing.assert_close(importance(logits, y, "loss"), wanted)
    assert top_rows(wanted, 2).tolist() == sorted(wanted.argsort(descending=True)[:2].tolist())


def own_batch(rank: int) -> tuple[torch.Tensor, ...]:
    x = torch.rand(3, 2, 4, generator=torch.Generator().manual_seed(rank))
    return x, torch.tensor([rank, 1, 2]), torch.full((3,), float(rank))


def test_all_ranks_meet_the_same_union_of_codes():
    quantizer = SampleQuantizer(3, num_classes=10)

    def meet(rank: int):
        exchange = SampleExchange(quantizer)
        joined = exchange.gather(lambda: own_batch(rank), step=5, digest=-rank)
        return joined.tensors, joined.digests, exchange.bytes_sent, exchange.calls

    ranks = run_ranks(meet, 3)
    payloads = [quantizer.compress(*own_batch(rank), rank=rank, step=5) for rank in range(3)]
    wanted = [torch.cat(parts) for parts in zip(*map(quantizer.decompress, payloads), strict=True)]
    for tensors, digests, sent, calls in ranks:
        assert all(torch.equal(one, other) for one, other in zip(tensors, wanted, strict=True))
        assert digests == (0, -1, -2)
        assert sent == 2 * (HEADER_BYTES + payloads[0].num_bytes)
        assert calls == 1


@pytest.mark.parametrize("fault", ["bounds", "size", "settings", "error"])
def test_the_fault_of_one_rank_ends_all_with_its_text(fault):
    def meet(rank: int) -> str:
        quantizer = SampleQuantizer(4 if fault == "settings" and rank else 3, num_classes=10)

        def prepare():
            x, y, weight = own_batch(rank)
            if rank == 1 and fault == "error":
                raise KeyError("disk")
            if rank == 1 and fault == "size":
                return x[:2], y[:2], weight[:2]
            return (x + 1 if rank == 1 and fault == "bounds" else x), y, weight

        with pytest.raises((UsageError, RuntimeError)) as caught:
            SampleExchange(quantizer).gather(prepare, step=0)
        return f"{type(caught.value).__name__}: {caught.value}"

    texts = run_ranks(meet, 2, timeout=20)
    assert texts[0] == texts[1]
    assert {
        "bounds": "UsageError: bounds=(0.0, 1.0) do not hold for this batch",
        "size": "UsageError: the processes have unlike batches or settings",
        "settings": "UsageError: the processes have unlike batches or settings",
        "error": "RankError: process 1 failed",
    }[fault] in texts[0]
    assert {
        "bounds": "(process 1)",
        "size": "process 0: float32[3, 2, 4]",
        "settings": "process 1: float32[3, 2, 4], int64[3], float32[3] by SampleQuantizer(bits=4",
        "error": "disk",
    }[fault] in texts[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *[(lambda bits=bits: SampleQuantizer(bits), f"bits={bits!r} must be a whole number from 1 to 8") for bits in
          (0, 9, -1, 4.0, True, "4", None)],
        *[(lambda bounds=bounds: SampleQuantizer(bounds=bounds), f"bounds={bounds} must be the smallest")
          for bounds in ((1, 0), (0, 0), (0, float("inf")), (float("nan"), 1), (0, 1, 2))],
        (lambda: SampleQuantizer(num_classes=1), "num_classes=1 must be at least 2"),
        (lambda: through(SampleQuantizer(), torch.full((1, 2), -0.1)), "bounds=(0.0, 1.0) do not hold"),
        (lambda: through(SampleQuantizer(), torch.full((1, 2), float("nan"))), "bounds=(0.0, 1.0) do not hold"),
        (lambda: through(SampleQuantizer(), torch.ones(1, 2).long()), "the input is of type torch.int64"),
        (lambda: SampleQuantizer(num_classes=3).compress(torch.ones(2, 2), torch.tensor([0, 3])),
         "num_classes=3 does not hold for this batch, whose labels lie between 0 and 3"),
        (lambda: SampleQuantizer(num_classes=3).compress(torch.ones(2, 2), torch.tensor([0, -1])), "between -1 and 0"),
        (lambda: SampleQuantizer(num_classes=3).compress(torch.ones(2, 2), torch.ones(2)), "needs class indices"),
        (lambda: importance(torch.ones(2, 3), torch.ones(2, 3), "loss"), "score='loss' needs one class index"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_by_name(make, message):
    with pytest.raises(UsageError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
