"""PowerSGD against the textbook, and its corners."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from robustdist.comm import PowerSGD
from robustdist.comm.low_rank import orthonormalise


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_one_step_is_a_projection_on_the_image_of_the_start():
    matrix, codec = gaussian(40, 30), PowerSGD(3)
    start = codec.start("w", 3, 30, matrix.device).double()
    basis, _ = torch.linalg.qr(matrix.double() @ start.T)
    expected = basis @ basis.T @ matrix.double()
    assert torch.allclose(codec.decompress(codec.compress(matrix, name="w")).double(), expected, atol=1e-4)


def test_warm_starts_reach_the_best_approximation():
    matrix = gaussian(40, 30) @ torch.diag(0.7 ** torch.arange(30.0))
    u, s, v = torch.linalg.svd(matrix)
    best = u[:, :3] @ torch.diag(s[:3]) @ v[:3]
    codec = PowerSGD(3)
    errors = [float((codec.decompress(codec.compress(matrix, name="w")) - best).norm()) for _ in range(60)]
    assert errors[-1] < 1e-3 < 0.1 < errors[0]


def test_tensors_are_matrices_of_first_dimension_and_rest():
    x = gaussian(8, 3, 5, 5)
    image, matrix = PowerSGD(2), PowerSGD(2)
    payload = image.compress(x)
    assert payload.num_bytes == image.payload_bytes((8, 3, 5, 5)) == 4 * 2 * (8 + 75)
    assert torch.equal(image.decompress(payload).view(8, 75), matrix.decompress(matrix.compress(x.view(8, 75))))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (5, 1), (4, 4)])
def test_what_would_not_be_smaller_is_sent_whole(shape):
    x = gaussian(*shape)
    codec = PowerSGD(4)
    assert codec.compress(x).num_bytes == 4 * x.numel()
    assert torch.equal(codec.decompress(codec.compress(x)), x)


def test_a_matrix_of_low_rank_is_exact():
    x = gaussian(50, 2) @ gaussian(2, 70, seed=1)
    for rank in (2, 4):
        codec = PowerSGD(rank)
        assert torch.allclose(codec.decompress(codec.compress(x)), x, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_zeros_stay_zeros_and_do_not_end_the_iteration(rank):
    codec, x = PowerSGD(rank), gaussian(30, 20)
    codec.compress(x, name="w")
    kept = codec.state_dict()["start"]["w"]
    for _ in range(3):
        assert not codec.decompress(codec.compress(torch.zeros(30, 20), name="w")).any()
    assert torch.equal(codec.state_dict()["start"]["w"], kept)
    assert codec.decompress(codec.compress(x, name="w")).norm() > 0.2 * x.norm()


def test_a_non_finite_entry_leaves_the_start_alone():
    codec, x = PowerSGD(2), gaussian(30, 20)
    codec.compress(x, name="w")
    kept = codec.state_dict()["start"]["w"]
    for bad in (math.nan, math.inf, -math.inf):
        spoilt = x.clone()
        spoilt[3, 4] = bad
        assert not codec.decompress(codec.compress(spoilt, name="w")).isfinite().all()
        assert torch.equal(codec.state_dict()["start"]["w"], kept)


def test_ranks_start_alike_and_names_and_seeds_do_not():
    starts = [
        PowerSGD(2, seed=seed).start(name, 2, 20, torch.device("cpu"))
        for seed, name in ((0, "a"), (0, "a"), (0, "b"), (1, "a"))
    ]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[0], starts[3])


def test_products_do_not_depend_on_where_the_buffers_are():
    x = gaussian(260_000)
    size = PowerSGD(4).payload_bytes(260_000)
    results = []
    for offset in (0, 4, 8, 20, 36):
        data = torch.empty(size + 64, dtype=torch.uint8)[offset : offset + size]
        codec, out = PowerSGD(4), torch.empty(260_064)[offset // 4 : offset // 4 + 260_000]
        codec.encode(x, data)
        codec.decode(data, out)
        results.append((data.clone(), out.clone()))
    assert all(torch.equal(data, results[0][0]) and torch.equal(out, results[0][1]) for data, out in results)


def test_orthonormal_rows():
    rows = gaussian(6, 300)
    span = rows.clone().double()
    orthonormalise(rows)
    assert torch.allclose(rows @ rows.T, torch.eye(6), atol=1e-6)
    basis = rows.double()
    assert torch.allclose(span @ basis.T @ basis, span, atol=1e-4)


def test_nearly_parallel_rows_become_orthogonal_and_dependent_ones_zero():
    base = gaussian(300)
    rows = torch.stack([base, base + 1e-3 * gaussian(300, seed=1), 2 * base, torch.zeros(300), gaussian(300, seed=2)])
    orthonormalise(rows)
    assert torch.allclose(rows @ rows.T, torch.diag(torch.tensor([1.0, 1, 0, 0, 1])), atol=1e-4)
    tiny = 1e-18 * gaussian(2, 300)
    orthonormalise(tiny)
    assert torch.allclose(tiny @ tiny.T, torch.eye(2), atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 16), (64, 16)])
def test_the_contraction_constant_holds_on_average(shape):
    x = gaussian(*shape)
    errors = []
    for seed in range(200):
        codec = PowerSGD(2, seed=seed)
        errors.append(float((codec.decompress(codec.compress(x)) - x).square().sum() / x.square().sum()))
    assert sum(errors) / len(errors) <= 1 - 2 / 16
    assert PowerSGD(2).delta(256) == 2 / 16
