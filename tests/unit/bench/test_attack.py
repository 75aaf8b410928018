from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from robustdist.bench import attack as bench
from robustdist.bench import bench_attack
from robustdist.bench.measure import Timing
from robustdist.errors import UsageError

pytestmark = pytest.mark.slow

STEPS = 2
TINY = {"rounds": 1, "batch_size": 4, "width": 4, "steps": STEPS, "device": "cpu"}
FEW = {**TINY, "rows": ["pgd", "torchattacks_pgd"]}
RESNET = ["resnet_standard", "resnet_pgd", "resnet_pgd_folded", "resnet_pgd_channels_last_folded", "resnet_pgd_fast"]
OURS = [
    "standard",
    "standard_channels_last",
    "pgd",
    "pgd_channels_last",
    "pgd_bf16",
    "pgd_channels_last_bf16",
    "pgd_folded",
    "pgd_channels_last_folded",
    "pgd_fast",
    *RESNET,
    "fgsm",
    "free",
    "fgsm_rs",
    "n_fgsm",
    "pgd2",
    "grad_align",
    "fast_bat",
    "friendly",
    "dat_pgd",
    "trades",
    "mart",
    "awp",
]
THEIRS = ["torchattacks_pgd", "torchattacks_pgd_bf16"]


@dataclass
class Run:
    result: dict[str, Any]
    written: dict[str, Any]
    printed: str

    def row(self, key: str) -> dict[str, Any]:
        return next(row for row in self.result["rows"] if row["key"] == key)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Run:
    out = tmp_path_factory.mktemp("bench") / "attack.json"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = bench_attack(out=str(out), **TINY)
    assert [path.name for path in out.parent.iterdir()] == ["attack.json"]
    return Run(result, json.loads(out.read_text(encoding="utf-8")), printed.getvalue())


@pytest.fixture
def no_measuring(monkeypatch) -> None:
    def measure(*args):
        pytest.fail("measured before the arguments were checked")

    monkeypatch.setattr(bench, "_measure", measure)


def test_returned_written_and_printed_figures_are_the_same(tiny):
    assert tiny.written == tiny.result
    for row in tiny.result["rows"]:
        line = next(line for line in tiny.printed.splitlines() if line.startswith(row["name"] + " "))
        if row["note"] is None:
            assert f"{row['ratio']['median']:.2f}" in line
            assert f"{row['forwards']}/{row['backwards']}" in line


def test_one_row_per_variant(tiny):
    assert [row["key"] for row in tiny.result["rows"]] == OURS + THEIRS
    assert tiny.row("pgd_channels_last_bf16")["name"] == f"PGD-{STEPS}, channels_last, bf16 attack"


def test_print_names_the_machine_and_the_settings(tiny):
    machine = tiny.result["machine"]
    assert machine["processor"] in tiny.printed
    assert "bf16 units:" in tiny.printed
    assert f"torch {torch.__version__}" in tiny.printed
    assert "threads 1, rounds 1, batch 4, width 4, clock: process CPU time" in tiny.printed


@pytest.mark.parametrize(
    ("keys", "forwards", "weight_backwards", "floor"),
    [
        (["standard", "standard_channels_last", "resnet_standard"], 1, 1, 1.0),
        (["fgsm"], 2, 1, 5 / 3),
        (["pgd", "pgd_channels_last", "pgd_bf16", "pgd_channels_last_bf16"], STEPS + 1, 1, 1 + 2 * STEPS / 3),
        (["pgd_folded", "pgd_channels_last_folded", "pgd_fast", *RESNET[1:]], STEPS + 1, 1, 1 + 2 * STEPS / 3),
        (THEIRS, STEPS + 1, 1, 1 + 2 * STEPS / 3),
        (["free"], 1, 1, 1.0),
        (["fgsm_rs", "n_fgsm"], 2, 1, 5 / 3),
        (["pgd2"], 3, 1, 7 / 3),
        # two forward passes and one backward pass through both
        (["dat_pgd", "awp", "mart"], STEPS + 2, 2, 2 + 2 * STEPS / 3),
    ],
)
def test_passes_equal_the_theory(tiny, require, keys, forwards, weight_backwards, floor):
    if keys == THEIRS:
        require("torchattacks")
    for row in map(tiny.row, keys):
        assert row["note"] is None, row["key"]
        assert (row["forwards"], row["backwards"]) == (forwards, forwards), row["key"]
        assert row["weight_backwards"] == weight_backwards, row["key"]
        assert row["floor"] == pytest.approx(floor), row["key"]


@pytest.mark.parametrize(
    ("key", "forwards", "backwards", "weight_backwards"),
    [
        # the clean logits once for all steps of the attack, and once with a graph
        ("trades", STEPS + 3, STEPS + 2, 2),
        # FGSM, two gradients, the update; the second gradient is differentiated again
        ("grad_align", 4, 5, 2),
        # start, z (differentiated again), delta* with its sensitivity
        ("fast_bat", 3, 4, 2),
    ],
)
def test_passes_of_objectives_equal_the_theory(tiny, key, forwards, backwards, weight_backwards):
    row = tiny.row(key)
    assert (row["forwards"], row["backwards"], row["weight_backwards"]) == (forwards, backwards, weight_backwards)


def test_ratios_are_consistent(tiny):
    for row in tiny.result["rows"]:
        if row["note"] is not None:
            continue
        assert row["ratio"] == row["cpu_ratio"]
        for name in ("cpu_ratio", "wall_ratio", "cpu_ms", "wall_ms"):
            assert 0 <= row[name]["min"] <= row[name]["median"] <= row[name]["max"], (row["key"], name)
    assert tiny.row("standard")["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    # the other network is measured in steps of its own
    assert tiny.row("resnet_standard")["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    own, steps = tiny.row("resnet_pgd")["cpu_ms"]["median"], tiny.row("resnet_standard")["cpu_ms"]["median"]
    assert tiny.row("resnet_pgd")["ratio"]["median"] == pytest.approx(own / steps)  # one round
    # short steps are repeated until they cost as many passes as the longest
    assert tiny.row("grad_align")["repeats"] == 1
    longest = max(row["floor"] for row in tiny.result["rows"] if row["note"] is None)
    assert tiny.row("standard")["repeats"] == round(longest) > 1


def test_ratio_to_torchattacks(tiny):
    pytest.importorskip("torchattacks")
    assert tiny.row("torchattacks_pgd")["ratio_to_torchattacks"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    for key in OURS:
        ratio = tiny.row(key)["ratio_to_torchattacks"]
        assert ratio is None if key in RESNET else ratio["median"] > 0


def test_memory(tiny):
    standard, pgd, bf16 = (tiny.row(key) for key in ("standard", "pgd", "pgd_bf16"))
    assert standard["attack_saved_mib"] is None
    assert pgd["step_saved_mib"] == pytest.approx(standard["step_saved_mib"], rel=0.05)
    assert pgd["attack_saved_mib"] == pytest.approx(standard["step_saved_mib"], rel=0.05)
    # half the bytes per number, a few numbers stay float32; the weights are cast, so they count here
    assert bf16["attack_saved_mib"] < 0.75 * pgd["attack_saved_mib"]
    assert pgd["cuda_peak_mib"] is None
    # neither norms nor what follows them keep the outputs of convolutions; folded copies of weights count here
    assert tiny.row("pgd_folded")["attack_saved_mib"] < 0.6 * pgd["attack_saved_mib"]
    assert tiny.row("pgd_fast")["attack_saved_mib"] < 0.6 * bf16["attack_saved_mib"]
    assert tiny.row("resnet_pgd_folded")["attack_saved_mib"] < 0.7 * tiny.row("resnet_pgd")["attack_saved_mib"]


def test_chosen_rows_bring_what_their_ratios_are_to():
    result = bench_attack(**TINY, rows=["resnet_pgd_fast"])
    assert [row["key"] for row in result["rows"]] == ["standard", "resnet_standard", "resnet_pgd_fast"]
    assert bench_attack(**TINY, rows=[])["rows"][0]["key"] == "standard"


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("fails", [False, True])
def test_global_state_is_restored(monkeypatch, fails):
    if fails:
        monkeypatch.setattr(bench, "interleave", lambda *args: 1 / 0)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        bench_attack(**FEW, threads=1)
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(("threads", "clock"), [(1, "cpu"), (2, "wall")])
def test_clock_follows_the_number_of_threads(monkeypatch, capsys, threads, clock):
    def measured(variants, repeats, rounds, device):
        assert torch.get_num_threads() == threads
        return {key: [Timing(1.0, 2.0) if key == "standard" else Timing(3.0, 4.0)] for key in variants}

    monkeypatch.setattr(bench, "interleave", measured)
    result = bench_attack(**FEW, threads=threads)
    assert result["settings"]["clock"] == clock
    pgd = next(row for row in result["rows"] if row["key"] == "pgd")
    assert (pgd["cpu_ratio"]["median"], pgd["wall_ratio"]["median"]) == (3.0, 2.0)
    assert pgd["ratio"] == pgd[f"{clock}_ratio"]
    printed = capsys.readouterr().out
    line = next(line.split() for line in printed.splitlines() if line.startswith(f"PGD-{STEPS} "))
    assert line[1] == f"{pgd['ratio']['median']:.2f}"
    assert line[5] == f"{pgd[f'{clock}_ms']['median']:.0f}"
    assert f"threads {threads}" in printed


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_runs_where_gradients_are_off(context):
    with context():
        result = bench_attack(**FEW)
    assert result["rows"][1]["backwards"] == STEPS + 1


def test_missing_torchattacks_skips_its_rows(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torchattacks", None)
    # which rows there are does not depend on what they take
    monkeypatch.setattr(bench, "interleave", lambda variants, *rest: {key: [Timing(1.0, 2.0)] for key in variants})
    out = tmp_path / "attack.json"
    result = bench_attack(out=str(out), **TINY)
    for row in result["rows"]:
        assert (row["note"] is None) == (row["key"] in OURS)
        assert (row["ratio"] is None) == (row["key"] in THEIRS)
        assert row["ratio_to_torchattacks"] is None
    assert result["machine"]["torchattacks"] is None
    assert json.loads(out.read_text()) == result
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("skipped") == len(THEIRS)
    assert printed.count("torchattacks is not installed") == 1
    assert "pip install 'robustdist[attacks]'" in printed


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize("option", ["rounds", "batch_size", "width", "steps", "threads"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "5", None])
def test_counts_must_be_whole_and_positive(option, value):
    with pytest.raises(UsageError, match=f"^{option}="):
        bench_attack(**{option: value})


@pytest.mark.usefixtures("no_measuring")
def test_out_is_checked_before_the_run(tmp_path):
    with pytest.raises(UsageError, match=r"^out=.*does not exist"):
        bench_attack(out=str(tmp_path / "missing" / "attack.json"))
    with pytest.raises(UsageError, match=r"^out=.*is a folder"):
        bench_attack(out=str(tmp_path))
    with pytest.raises(UsageError, match=r"^out='' is a folder"):
        bench_attack(out="")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"^out=.*does not exist"):
        bench_attack(out=str(tmp_path / "file" / "attack.json"))


@pytest.mark.usefixtures("no_measuring")
def test_unknown_rows_are_named():
    with pytest.raises(UsageError, match=r"^rows has no 'pdg': choose among standard, .*trades"):
        bench_attack(rows=["pgd", "pdg"])


@pytest.mark.usefixtures("no_measuring")
def test_device_is_checked_before_the_run(monkeypatch):
    with pytest.raises(UsageError, match=r"^device='tpu'"):
        bench_attack(device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"^device='cuda'.*device=cpu"):
        bench_attack(device="cuda")


def test_a_failing_run_keeps_the_old_file(monkeypatch, tmp_path):
    out = tmp_path / "attack.json"
    out.write_text("old")
    monkeypatch.setattr(bench, "interleave", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench_attack(out=str(out), **FEW)
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_cuda_table_has_a_memory_column(tiny):
    rows = [bench._Row(**{**row, "cuda_peak_mib": 123.4}) for row in tiny.result["rows"] if row["note"] is None]
    printed = io.StringIO()
    machine = {**tiny.result["machine"], "device": "cuda", "bf16_units": []}
    bench._print(Console(file=printed, width=120), rows, tiny.result["settings"], machine)
    assert printed.getvalue().count("123.4") == len(rows)
    assert "bf16 units: none, the bf16 rows are emulated" in printed.getvalue()
