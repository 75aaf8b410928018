"""The helpers that other tests, also those of other people, rest on."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from robustdist.core.testing import TinyNet, run_ranks, toy_images


def no_children() -> bool:
    return multiprocessing.active_children() == []


def test_every_rank_runs_once_and_results_come_in_order():
    local = torch.tensor(10.0)  # closures work

    def work(rank: int, factor: int) -> tuple:
        value = torch.tensor(float(rank))
        dist.all_reduce(value)
        return rank, dist.get_world_size(), value.item(), factor * local.item(), torch.get_num_threads()

    assert run_ranks(work, 3, 2) == [(rank, 3, 3.0, 20.0, 1) for rank in range(3)]
    assert no_children()
    assert not dist.is_initialized()


def test_the_rank_that_failed_first_is_the_one_reported():
    def work(rank: int) -> None:
        if rank == 1:
            raise ArithmeticError("the real reason")
        dist.barrier()  # fails too, once its peer is gone

    with pytest.raises(RuntimeError, match=r"rank 1 failed:\n(.|\n)*ArithmeticError: the real reason"):
        run_ranks(work)
    assert no_children()


def test_a_result_that_cannot_be_sent_back_is_a_failure_with_its_reason():
    with pytest.raises(RuntimeError, match=r"rank 0 failed(.|\n)*pickle"):
        run_ranks(lambda rank: lambda: rank, 1)


@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_dies_is_named(status):
    def work(rank: int) -> None:
        if rank == 1:
            os._exit(status)

    with pytest.raises(RuntimeError, match=f"rank 1 failed:\nthe process died with exit status {status}"):
        run_ranks(work)
    assert no_children()


def test_hanging_ranks_are_ended_in_time():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"3 of 3 processes did not finish in 1.0 s"):
        run_ranks(lambda rank: time.sleep(60), 3, timeout=1.0)
    assert time.monotonic() - start < 10
    assert no_children()


def test_toy_images_are_pixels_with_a_class_that_shows():
    rng = torch.get_rng_state()
    x, y = toy_images(40, num_classes=4, size=6, seed=3)
    assert torch.equal(torch.get_rng_state(), rng)
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((40, 1, 6, 6), (40,), torch.float32, torch.int64)
    assert float(x.min()) >= 0
    assert float(x.max()) <= 1
    assert set(y.tolist()) == {0, 1, 2, 3}
    corners = torch.stack([x[:, 0, :3, :3], x[:, 0, :3, 3:], x[:, 0, 3:, :3], x[:, 0, 3:, 3:]], 1).mean((2, 3))
    assert torch.equal(corners.argmax(1), y)
    again, labels = toy_images(40, num_classes=4, size=6, seed=3)
    assert torch.equal(again, x)
    assert torch.equal(labels, y)
    assert not torch.equal(toy_images(40, seed=4)[0], x)


@pytest.mark.parametrize(("batch_norm", "dropout"), [(False, 0.0), (True, 0.5)])
def test_tiny_net_maps_images_to_logits(batch_norm, dropout):
    net = TinyNet(num_classes=3, size=5, channels=2, batch_norm=batch_norm, dropout=dropout)
    x = torch.rand(4, 2, 5, 5)
    assert net(x).shape == (4, 3)
    assert sum(parameter.numel() for parameter in net.parameters()) < 1000
    assert (len(list(net.buffers())) > 0) == batch_norm
    net.train()
    assert torch.equal(net(x), net(x)) == (dropout == 0)
