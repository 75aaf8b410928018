"""Groups leave complete, in one piece and in order; every bucket gets its future, good or bad."""

from __future__ import annotations

import pytest
import torch

from robustdist.strategies.bucket_router import BucketRouter


class Engine:
    """Keeps what is submitted; futures are done by hand."""

    def __init__(self):
        self.jobs = []

    def submit(self, grads, buffer):
        self.jobs.append((tuple(grads), buffer, torch.futures.Future()))
        return self.jobs[-1][2]

    @property
    def names(self):
        return ["".join(names) for names, _, _ in self.jobs]


def route(router, engine, buckets):
    buffers = [torch.zeros(len(names)) for names in buckets]
    futures = [
        router.route(
            dict(zip(names, buffer.split(1), strict=True)), buffer, engine.submit, is_first=place == 0,
            is_last=place == len(buckets) - 1,
        )
        for place, (names, buffer) in enumerate(zip(buckets, buffers, strict=True))
    ]  # fmt: skip
    return buffers, futures


@pytest.mark.parametrize(
    ("groups", "join", "buckets", "expected"),
    [
        ([], False, ["ab", "c"], ["ab", "c"]),
        (["ab", "c"], False, ["abc"], ["ab", "c"]),  # the first step of a resumed run
        (["ab", "c"], False, ["ab", "c"], ["ab", "c"]),
        (["ab", "c"], False, ["a", "bc"], ["a", "bc"]),  # another cut than planned: as it comes
        (["abc"], True, ["a", "b", "c"], ["abc"]),
        (["ab", "cd"], True, ["a", "bc", "d"], ["ab", "cd"]),
        (["a", "b", "c"], True, ["abc"], ["a", "b", "c"]),
        (["ab"], True, ["a", "bc", "d"], ["ab", "cd"]),  # not in the plan: together at the end
        (["ax", "b"], True, ["a", "b"], ["b", "a"]),  # a parameter of the plan is gone
    ],
)
def test_groups(groups, join, buckets, expected):
    for _ in range(2):  # one step like the other
        router, engine = BucketRouter([tuple(names) for names in groups], join=join), Engine()
        buffers, futures = route(router, engine, buckets)
        assert engine.names == expected
        assert router.sent == [tuple(names) for names in expected]
        done = set()
        for names, buffer, future in engine.jobs:
            # never before all of its gradients are there
            assert all(set(bucket) <= done for bucket, other in zip(buckets, futures, strict=True) if other.done())
            future.set_result(buffer)
            done |= set(names)
        for future, buffer in zip(futures, buffers, strict=True):
            assert future.done()
            assert future.value().data_ptr() == buffer.data_ptr()


def test_a_failure_reaches_every_bucket_of_the_group():
    router, engine = BucketRouter([tuple("abc")], join=True), Engine()
    _, futures = route(router, engine, ["a", "b", "c"])
    engine.jobs[0][2].set_exception(RuntimeError("no network"))
    for future in futures:
        with pytest.raises(RuntimeError, match="no network"):
            future.wait()


def test_an_abandoned_step_leaves_nothing_behind():
    router, engine = BucketRouter([tuple("ab")], join=True), Engine()
    buffer = torch.zeros(1)
    router.route({"a": buffer}, buffer, engine.submit, is_first=True, is_last=False)
    _, futures = route(router, engine, ["a", "b"])
    assert engine.names == ["ab"]
    engine.jobs[0][2].set_result(buffer)
    assert all(future.done() for future in futures)
