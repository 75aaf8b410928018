"""A real Trainer examines its evaluation and saves what it found, on any number of processes."""

from __future__ import annotations

import json

import pytest
import torch

from robustdist.attacks import PGD
from robustdist.callbacks import RobustEvaluation
from robustdist.cli.trainer import RobustTrainer
from robustdist.errors import UsageError
from robustdist.evaluation import load_examples
from robustdist.evaluation.findings import CHECKS

from .support import Classifier, loader, trained_net

EPS = 0.1


def run_test(launch, images, report_dir, processes=1, attacks=None, module=None, count=41, **options):
    x, y = images(count)
    options = {"report_dir": str(report_dir), **options}
    evaluation = RobustEvaluation(attacks or {"pgd": PGD(eps=EPS, steps=10)}, **options)
    ranks = launch(
        module or Classifier(trained_net()),
        loader(x, y, batch_size=7),
        verb="test",
        processes=processes,
        callbacks=[evaluation],
        collect=lambda trainer, module: trainer.callbacks[0].result.to_dict(),
    )
    for result in ranks:
        for attack in result["attacks"].values():
            del attack["seconds"]
    return ranks


@pytest.mark.slow
def test_the_examination_does_not_depend_on_the_number_of_processes(launch, images, tmp_path):
    options = {"thorough": True, "check_samples": 20, "save_examples": True}
    (one,) = run_test(launch, images, tmp_path / "1", **options)
    assert set(one["checks"]) == {*CHECKS, "saved_examples"}
    assert one["checks_not_run"] == {}
    assert [point["num_samples"] for point in one["curves"]["eps"]] == [20] * len(one["curves"]["eps"])
    saved = load_examples(tmp_path / "1" / one["saved"]["file"])
    for processes in (2, 3):
        folder = tmp_path / str(processes)
        for other in run_test(launch, images, folder, processes, **options):
            assert other == one
        again = load_examples(folder / one["saved"]["file"])
        assert all(torch.equal(before, after) for before, after in zip(saved, again, strict=True))
        report = json.loads((folder / "report.json").read_text())
        assert report["leaderboard"]["unreliable"] is any(not check["passed"] for check in report["checks"].values())
        assert {path.name for path in folder.glob("*.png")} >= {"eps.png", "steps.png", "restarts.png", "waterfall.png"}


def test_saved_examples_give_the_number_of_the_report(launch, images, tmp_path):
    attacks = {"weak": PGD(eps=EPS, steps=1), "strong": PGD(eps=EPS, steps=10)}
    (result,) = run_test(launch, images, tmp_path / "r", attacks=attacks, save_examples=True)
    assert 0 < result["robust_acc"] < result["clean_acc"]
    saved = load_examples(tmp_path / "r" / result["saved"]["file"])
    x, y = images(41)
    assert torch.equal(saved.label, y)
    assert saved.id.tolist() == list(range(41))
    assert ((saved.x_adv - x).abs() <= EPS + 1e-6).all()
    net = trained_net().eval()
    with torch.no_grad():
        right = net(saved.x_adv).argmax(1) == y
        clean = net(x).argmax(1) == y
    assert int(right.sum()) == result["saved"]["num_right"] == round(41 * result["robust_acc"])
    # what is wrong without attack stands as it is
    assert torch.equal(saved.x_adv[~clean], x[~clean])
    assert result["checks"]["saved_examples"]["passed"]
    assert not (tmp_path / "r" / "progress").exists()


def test_without_thorough_the_rest_is_named_as_not_run(launch, images, tmp_path):
    (result,) = run_test(launch, images, tmp_path / "r")
    assert list(result["checks"]) == list(CHECKS[:8])
    assert set(result["checks_not_run"]) == set(CHECKS[8:])
    assert all("thorough=True" in reason for reason in result["checks_not_run"].values())
    assert len(result["model_hash"]) == 32
    assert result["precision"] == "float32"


class Reads(Classifier):
    """Its forward function needs the rest of the batch."""


def reads_batch(module, x, batch):
    assert len(x) == len(batch[1])
    return module.net(x)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_forward_that_reads_the_batch_is_examined_in_whole_batches(launch, images, tmp_path, processes):
    options = {"forward": reads_batch, "thorough": True, "check_samples": 10, "save_examples": True}
    for result in run_test(launch, images, tmp_path / "r", processes, module=Reads(trained_net()), **options):
        assert set(result["checks_not_run"]) == {"saved_examples"}
        assert [point["num_samples"] for point in result["curves"]["steps"]] == [10] * 6
        assert result["saved"]["num_samples"] == 41
        assert result["saved"]["num_right"] is None


def test_wrong_options_are_refused_before_the_work():
    with pytest.raises(UsageError, match="did you mean 'authors'"):
        RobustEvaluation(leaderboard={"author": "me"})
    with pytest.raises(UsageError, match="check_samples=0"):
        RobustEvaluation(check_samples=0)


def test_examples_are_measured_again_by_the_trainer(launch, images, tmp_path):
    (result,) = run_test(launch, images, tmp_path / "r", save_examples=True)
    x, y = images(41)
    evaluation = RobustEvaluation({"pgd": PGD(eps=EPS, steps=10)})
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = RobustTrainer(accelerator="cpu", callbacks=[evaluation], default_root_dir=tmp_path, **quiet)
    path = tmp_path / "r" / result["saved"]["file"]
    score = trainer.remeasure(Classifier(trained_net()), str(path), dataloaders=loader(x, y))
    assert score.num_right == result["saved"]["num_right"]
    assert score.num_right_8bit == result["saved"]["num_right_8bit"]
    assert json.loads(path.with_suffix(".json").read_text())["acc"] == result["robust_acc"]
    assert trainer.callbacks[0] is evaluation
    assert trainer.limit_test_batches == 1.0
    # another model has another accuracy
    other = trainer.remeasure(Classifier(), str(path), dataloaders=loader(x, y))
    assert other.num_right != score.num_right
    with pytest.raises(UsageError, match="does not exist"):
        trainer.remeasure(Classifier(), str(tmp_path / "none.pt"), dataloaders=loader(x, y))
    evaluation.forward = reads_batch
    with pytest.raises(UsageError, match="whole batch"):
        trainer.remeasure(Classifier(), str(path), dataloaders=loader(x, y))
