"""The benchmark of communication: links, ranks, figures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from robustdist.bench import bench_comm, comm
from robustdist.bench.comm_reduce import make_buckets, make_reducer
from robustdist.bench.comm_rows import ROWS
from robustdist.bench.links import Links, open_links
from robustdist.bench.ranks import RanksError, run_task
from robustdist.cli import main
from robustdist.core.testing import run_ranks
from robustdist.errors import UsageError

# --- arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 1}, "world_size=1"),
        ({"numel": 0}, "numel"),
        ({"rounds": 0}, "rounds"),
        ({"repeats": 0}, "repeats"),
        ({"link": "56k"}, "link='56k' must be one of 100mbit, 1gbit, none"),
        ({"rows": ["int9"]}, "rows=['int9'] are unknown: choose some of fp32"),
        ({"out": "/nowhere/at/all.json"}, "does not exist"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(options, words, monkeypatch):
    monkeypatch.setattr(comm, "run_task", lambda *args, **kwargs: pytest.fail("measured"))
    monkeypatch.setattr(comm, "codec_speed", lambda *args, **kwargs: pytest.fail("measured"))
    with pytest.raises(UsageError) as caught:
        bench_comm(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# --- links


def test_the_links_are_limited_or_say_why_not_and_vanish():
    with open_links(2, "100mbit") as links:
        if links.holder is not None:
            inside = "cat /sys/class/net/e0/statistics/tx_bytes; tc qdisc show dev e0"
            shown = [
                subprocess.run([*links.command(rank), "sh", "-c", inside], capture_output=True, text=True, check=True)
                for rank in (0, 1)
            ]
            assert all("tbf" in one.stdout and "100Mbit" in one.stdout for one in shown)
            assert all(int(one.stdout.split()[0]) >= 0 for one in shown)
            assert links.environment()["GLOO_SOCKET_IFNAME"] == "e0"
        else:
            assert links.limit == "none"
            assert "no limit on the link" in links.note
    assert links.holder is None or not Path(f"/proc/{links.holder[0]}").exists()


def test_an_exception_inside_ends_them_too():
    holders = []

    def fail():
        with open_links(2, "100mbit") as links:
            holders.append(links.holder)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert holders[0] is None or not Path(f"/proc/{holders[0][0]}").exists()


def test_a_system_that_refuses_is_told_in_one_sentence(tmp_path, monkeypatch):
    tool = tmp_path / "unshare"
    tool.write_text("#!/bin/sh\necho unshare failed: Operation not permitted\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with open_links(2, "100mbit") as links:
        assert links.command(0) == []
        assert links.limit == "none"
        assert links.note.startswith("no limit on the link: ")
        assert links.note.count("not permitted") == 1
        assert "\n" not in links.note


def test_missing_tools_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("robustdist.bench.links._search_path", lambda: str(tmp_path))
    with open_links(2, "1gbit") as links:
        assert "install unshare, nsenter, mount, ip, tc" in links.note


# --- ranks


@pytest.mark.slow
def test_a_failing_rank_is_named_with_its_error():
    task = {"numel": 10, "rows": ["nothing"], "rounds": 1, "repeats": 1}
    with pytest.raises(RanksError, match=r"rank \d ended with status 1: KeyError: 'nothing'"):
        run_task("reduce", task, links=Links("none"), world_size=2, timeout=60)


@pytest.mark.slow
def test_ranks_that_hang_are_ended():
    task = {"numel": 10**9, "rows": ["fp32"], "rounds": 1, "repeats": 1}
    begin = time.monotonic()
    with pytest.raises(RanksError, match=r"ranks \[0, 1\] did not end within 0 s"):
        run_task("reduce", task, links=Links("none"), world_size=2, timeout=0.1)
    assert time.monotonic() - begin < 30


@pytest.mark.slow
def test_ranks_and_links_end_with_a_benchmark_that_is_killed():
    task = {"numel": 10**8, "rows": ["fp32"], "rounds": 1000, "repeats": 1}
    code = (
        "from robustdist.bench.links import open_links\n"
        "from robustdist.bench.ranks import run_task\n"
        "with open_links(2, '100mbit') as links:\n"
        f"    run_task('reduce', {task!r}, links=links, world_size=2, timeout=600)\n"
    )
    bench = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while len(children := _children(bench.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    bench.kill()
    bench.wait()
    assert len(children) >= 2
    while any(_alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [child for child in children if _alive(child)] == []


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


# --- figures


def test_buckets_are_cut_as_ddp_cuts_them():
    buckets = make_buckets(25_000_400, one_bucket=False)
    sizes = [bucket.buffer().numel() for bucket in buckets]
    assert sum(sizes) == 25_000_400
    assert sizes[:3] == [1_000_000, 7_000_000, 7_000_000]  # closed once 1 and 25 MiB are reached
    assert [bucket.is_last() for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    assert [tuple(grad.shape) for grad in buckets[-1].gradients()][-1] == (400,)
    assert len(make_buckets(3_000_000, one_bucket=True)) == 1


def test_a_ratio_is_to_the_reference_of_its_round():
    visits = [
        {"row": "fp32", "round": 0, "seconds": 8.0},
        {"row": "int8", "round": 0, "seconds": 2.0},
        {"row": "fp32", "round": 1, "seconds": 24.0},
        {"row": "int8", "round": 1, "seconds": 3.0},
    ]
    assert comm._speedups([visit for visit in visits if visit["row"] == "int8"], visits) == [4.0, 8.0]


@pytest.mark.parametrize("key", ["powersgd", "torch_powersgd_one_bucket"])
def test_low_rank_rows_count_the_bytes_of_the_factors(key):
    # two matrices of rank 4 and a short vector
    numel, world_size = 1_150_500, 2
    settled = {"powersgd": 2, "torch_powersgd_one_bucket": 3}[key]
    numbers = 4 * (1000 + 1000) + 4 * (150 + 1000) + 500

    def sent(rank):
        buckets = make_buckets(numel, one_bucket=True)
        for bucket in buckets:
            bucket.noise.normal_()
        with make_reducer(ROWS[key]) as reducer:
            counts = []
            for step in range(settled + 2):
                for bucket in buckets:
                    bucket.refill()
                reducer.reduce(buckets, step)
                counts.append(reducer.bytes_sent())
        return [later - sooner for sooner, later in zip(counts[settled - 1 :], counts[settled:], strict=False)]

    formula = comm._formula(ROWS[key], numel, world_size)
    assert formula == 4 * numbers
    # the engine counts failed ranks in one number more per bucket
    for counts in run_ranks(sent, world_size):
        assert counts == pytest.approx([formula] * 2, abs=8)


@pytest.mark.slow
def test_figures_of_a_small_run(tmp_path, capfd):
    path = tmp_path / "comm.json"
    numel = 100_000
    arguments = ["bench", "comm", "--numel", str(numel), "--rows", "[identity,int8,sign]", "--rounds", "2"]
    assert main([*arguments, "--out", str(path)]) == 0
    printed = capfd.readouterr().out
    found = json.loads(path.read_text())
    rows = {row["row"]: row for row in found["rows"]}
    assert list(rows) == ["fp32", "identity", "int8", "sign"]
    assert all(row["name"] in printed for row in found["rows"])
    assert all(row["identical"] for row in rows.values())
    assert [rows[key]["error"] for key in ("fp32", "identity")] == pytest.approx([0, 0], abs=1e-6)
    assert rows["int8"]["error"] == pytest.approx(0.0074, rel=0.1)  # the largest of 512 normal draws over 127
    assert rows["sign"]["error"] == pytest.approx((1 - 2 / 3.14159) ** 0.5, rel=0.05)
    # a byte per element, four per block of 512; then one number of the small parameters, of which there are none
    blocks = -(-numel // 512)
    assert rows["int8"]["payload_bytes"] == pytest.approx(numel + 4 * blocks, rel=0.01)
    assert rows["int8"]["formula_bytes"] == numel + 4 * blocks
    assert rows["fp32"]["formula_bytes"] == 4 * numel
    assert rows["int8"]["ratio"] == pytest.approx(4 / (1 + 4 / 512), rel=0.01)
    assert len(found["visits"]) == 8
    if found["link"]["limit"] == "100mbit":
        assert found["link"]["bits_per_second"] == pytest.approx(96e6, rel=0.05)
        for row in rows.values():
            # headers, and messages of the barrier, which count at this size
            assert row["formula_bytes"] < row["nic_bytes"] < 1.1 * row["formula_bytes"] + 6000
    else:
        assert found["link"]["note"] in printed


def test_the_rendezvous_on_loopback_is_a_free_port():
    environment = Links("none").environment()
    with socket.create_server((environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))):
        pass
