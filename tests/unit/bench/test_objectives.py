"""The benchmark of objectives on scikit-learn's digits: figures, file, continuing."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
import torch.nn.functional as F

from robustdist.attacks import PGD
from robustdist.bench import bench_objectives, small_training
from robustdist.bench.models import small_conv_net
from robustdist.callbacks import AdversarialTraining, CatastrophicOverfittingGuard
from robustdist.cli import main
from robustdist.core.guard import forked_rng
from robustdist.data import DigitsDataModule
from robustdist.errors import UsageError

FEW = {"data": "digits", "epochs": 1, "num_test": 60, "seeds": [3]}
ACCURACIES = ("clean_acc", "pgd20_acc", "margin_acc", "robust_acc")


@pytest.fixture(autouse=True)
def needs_digits(require):
    require("sklearn")


def figures(run):
    return {name: value for name, value in run.items() if name != "cpu_seconds"}


# --- arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": "cifar"}, "data='cifar' is unknown: choose one of mnist5k"),
        ({"objectives": ["pgd_at", "nat"]}, "objectives=['nat'] are unknown"),
        ({"objectives": []}, "choose some of standard"),
        ({"seeds": []}, "seeds is empty"),
        ({"epochs": 0}, "epochs"),
        ({"lr": 0.0}, "lr=0.0 must be positive"),
        ({"ramp": 1.5}, "share=1.5"),
        ({"num_test": 0}, "num_test"),
        ({"threads": 0}, "threads"),
        ({"out": "/nowhere/at/all.json"}, "does not exist"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_trained(options, words, monkeypatch):
    monkeypatch.setattr(small_training, "run", lambda *args: pytest.fail("trained"))
    with pytest.raises(UsageError) as caught:
        bench_objectives(**{**FEW, **options})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_row_can_be_trained():
    for setting in small_training.SETTINGS.values():
        for key, method in small_training.METHODS.items():
            if method.make is None:
                assert key == "standard"
                continue
            attack = method.attack(setting, 7)
            assert (attack.eps, attack.seed) == (setting.eps, 7)
            AdversarialTraining(method.make(), attack)
    pgd2 = small_training.METHODS["pgd2"].attack(small_training.SETTINGS["mnist5k"], 0)
    assert (pgd2.steps, pgd2.step_size) == (2, 0.15)
    assert small_training.METHODS["trades"].attack(small_training.SETTINGS["mnist5k"], 0).steps == 7


def test_the_docstring_names_every_row():
    text = " ".join(bench_objectives.__doc__.split())
    assert f"default all: {', '.join(small_training.METHODS)}." in text


# --- figures


@pytest.mark.slow
def test_ordinary_training_is_the_loop_that_one_would_write():
    data = DigitsDataModule(100)
    with forked_rng(torch.device("cpu"), 3):
        net = small_conv_net(8, 10)
        optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
        loader = data.train_dataloader()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=2 * len(loader))
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                schedule.step()
    x, y = (part[:60] for part in data.parts.test.tensors)
    clean = net(x).argmax(1) == y
    attack = PGD(eps=0.1, steps=20, step_size=0.1 / 8)
    robust = clean & (net(attack(net, x, y, sample_ids=range(60))).argmax(1) == y)

    (run,) = bench_objectives(**{**FEW, "epochs": 2}, objectives=["standard"])["runs"]
    assert run["clean_acc"] == pytest.approx(clean.float().mean().item())
    assert run["pgd20_acc"] == pytest.approx(robust.float().mean().item())
    assert run["guard"] is None
    assert 0 < run["robust_acc"] <= min(run["pgd20_acc"], run["margin_acc"]) < run["clean_acc"]


@pytest.mark.slow
def test_length_rate_and_ramp_reach_the_training(monkeypatch):
    seen = []

    class Spy(AdversarialTraining):
        def on_train_batch_end(self, trainer, *args):
            super().on_train_batch_end(trainer, *args)
            rate = trainer.optimizers[0].param_groups[0]["max_lr"]
            seen.append((float(trainer.callback_metrics["robust/eps"]), rate))

    monkeypatch.setattr(small_training, "AdversarialTraining", Spy)
    for ramp, lr in ((0.5, 0.01), (0, 5e-3)):
        bench_objectives(**FEW, objectives=["pgd2"], lr=lr, ramp=ramp)
    assert [eps for eps, _ in seen] == pytest.approx([0.1 * min(1, step / 7) for step in range(1, 15)] + [0.1] * 14)
    assert [rate for _, rate in seen] == [0.01] * 14 + [5e-3] * 14
    seen.clear()
    bench_objectives(**FEW, objectives=["free_at"])
    assert len(seen) == 56  # every batch four times


@pytest.mark.slow
def test_a_seed_says_it_all_and_global_state_is_left_alone():
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    runs = [bench_objectives(**{**FEW, "seeds": seeds}, objectives=["pgd_at"])["runs"] for seeds in ([3], [3], [4, 3])]
    assert figures(runs[0][0]) == figures(runs[1][0]) == figures(runs[2][1])
    assert figures(runs[0][0])["guard"]["history"] != figures(runs[2][0])["guard"]["history"]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.get_num_threads())


@pytest.mark.slow
def test_rows_are_means_and_extremes_over_seeds(tmp_path, capsys):
    out = tmp_path / "bench.json"
    result = bench_objectives(**{**FEW, "seeds": [0, 1]}, objectives=["fgsm_rs", "standard"], out=str(out))
    assert json.loads(out.read_text()) == result
    assert [row["objective"] for row in result["rows"]] == ["standard", "fgsm_rs"]
    for row in result["rows"]:
        own = [run for run in result["runs"] if run["objective"] == row["objective"]]
        assert row["seeds"] == [0, 1]
        for name in (*ACCURACIES, "cpu_seconds"):
            values = [run[name] for run in own]
            assert row[name] == {"mean": pytest.approx(sum(values) / 2), "min": min(values), "max": max(values)}
    history = next(run for run in result["runs"] if run["objective"] == "fgsm_rs")["guard"]["history"]
    assert [entry["step"] for entry in history] == list(range(3, 15))  # 256 images are 3 batches
    printed = capsys.readouterr().out
    assert "FGSM-RS, seed 1: clean" in printed
    low, high = (result["rows"][1]["pgd20_acc"][name] for name in ("min", "max"))
    assert f"({low:.3f}-{high:.3f})" in printed


def test_the_first_collapse_is_reported():
    guard = CatastrophicOverfittingGuard()
    guard.history = [{"epoch": epoch, "collapsed": epoch in (4, 5)} for epoch in range(1, 7)]
    assert small_training._report(guard)["collapsed_in_epoch"] == 4
    guard.history = guard.history[:3]
    assert small_training._report(guard)["collapsed_in_epoch"] is None


# --- the file


@pytest.mark.slow
def test_a_killed_benchmark_goes_on(tmp_path, monkeypatch):
    out = str(tmp_path / "bench.json")
    run = small_training.run

    def killed(method, setting, data, seed, num_test):
        if seed == 1:
            raise KeyboardInterrupt
        return run(method, setting, data, seed, num_test)

    monkeypatch.setattr(small_training, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        bench_objectives(**{**FEW, "seeds": [0, 1]}, objectives=["standard"], out=out)
    (first,) = json.loads((tmp_path / "bench.json").read_text())["runs"]

    measured = []
    monkeypatch.setattr(small_training, "run", lambda *args: measured.append(args[3]) or run(*args))
    result = bench_objectives(**{**FEW, "seeds": [0, 1]}, objectives=["standard"], out=out)
    assert measured == [1]
    assert result["runs"][0] == first
    # another row is added to those that are there; the seeds of a row are all that were ever measured
    result = bench_objectives(**{**FEW, "seeds": [1]}, objectives=["n_fgsm"], out=out)
    assert measured == [1, 1]
    assert [(row["objective"], row["seeds"]) for row in result["rows"]] == [("standard", [0, 1]), ("n_fgsm", [1])]


@pytest.mark.slow
def test_a_row_that_is_trained_otherwise_now_is_measured_again(tmp_path, monkeypatch):
    out = str(tmp_path / "bench.json")
    before = bench_objectives(**FEW, objectives=["fgsm_rs"], out=out)["runs"]
    changed = small_training.Method("FGSM-RS", lambda: small_training.FGSMRS(step_factor=0.5))
    monkeypatch.setitem(small_training.METHODS, "fgsm_rs", changed)
    after = bench_objectives(**FEW, objectives=["fgsm_rs"], out=out)["runs"]
    assert len(before) == len(after) == 1
    assert before[0]["training"] != after[0]["training"]
    assert before[0]["guard"] != after[0]["guard"]


@pytest.mark.parametrize("content", ["[]", "{}", "no json", '{"benchmark": "attack", "settings": {}, "runs": []}'])
def test_a_file_of_something_else_is_not_overwritten(tmp_path, content):
    out = tmp_path / "other.json"
    out.write_text(content)
    with pytest.raises(UsageError, match="holds something else"):
        bench_objectives(**FEW, out=str(out))
    assert out.read_text() == content


@pytest.mark.slow
def test_other_settings_need_another_file(tmp_path):
    out = str(tmp_path / "bench.json")
    bench_objectives(**FEW, objectives=["standard"], out=out)
    with pytest.raises(UsageError, match="choose another file"):
        bench_objectives(**{**FEW, "num_test": 61}, objectives=["standard"], out=out)


# --- the command


@pytest.mark.slow
def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["robustdist"])
    out = tmp_path / "bench.json"
    arguments = ["--data", "digits", "--objectives", "[standard, fast_bat]", "--seeds", "[0]", "--epochs", "1"]
    assert main(["bench", "objectives", *arguments, "--num_test", "30", "--out", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert [run["objective"] for run in runs] == ["standard", "fast_bat"]
    assert all(0 <= run[name] <= 1 and math.isfinite(run[name]) for run in runs for name in ACCURACIES)
    captured = capsys.readouterr()
    assert "Fast-BAT, relative step" in captured.out
    assert captured.err == ""
