from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from robustdist.errors import RobustDistWarning, UsageError
from robustdist.report import (
    AttackScore,
    Check,
    ClassScore,
    CurvePoint,
    EvaluationResult,
    Examples,
    SavedScore,
    Step,
    wilson_interval,
    write_report,
)

from .conftest import NASTY, make_result
from .page import Page


def test_json_has_the_promised_fields(tmp_path, result):
    write_report(tmp_path, result)
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert report["clean_acc"] == 0.95
    assert report["robust_acc"] == 0.595
    assert report["robust_acc_interval"] == list(wilson_interval(119, 200))
    assert report["num_samples"] == 200
    assert report["threat_model"] == {"norm": "linf", "eps": 8 / 255, "bounds": [0.0, 1.0]}
    assert report["seed"] == 7
    assert list(report["attacks"]) == ["fgsm", "pgd20", NASTY]
    assert report["attacks"]["pgd20"]["acc"] == 0.605
    assert report["attacks"]["pgd20"]["seconds"] == 134.6
    assert report["attacks"]["pgd20"]["settings"] == result.attacks["pgd20"].settings
    assert report["checks"]["budget"] == {"passed": False, "detail": "excess of 0.1 <pixels>"}
    assert not {"comparison", "history", "train_seconds"} & set(report)


def test_json_is_read_back(tmp_path, result):
    (path, *_) = write_report(tmp_path, result)
    back = EvaluationResult.from_dict(json.loads(path.read_text("utf-8")))
    assert back == replace(result, threat_model=result.threat_model | {"bounds": [0.0, 1.0]})


def test_all_that_was_found_is_read_back(tmp_path):
    full = make_result(
        checks={"logits": Check(True, "a"), "gradient": Check(False, "b"), "transfer": Check(None, "c")},
        classes=[ClassScore(3, 10, 9, 8)],
        loaders=[ClassScore(0, 200, 190, 119)],
        waterfall=[Step("clean", 190), Step("pgd", 119)],
        curves={"eps": [CurvePoint(0.1, 3, 4)]},
        precision="float32",
        model_hash="ab",
        saved=SavedScore("examples.pt", 200, 119, None),
    )
    (path, *_) = write_report(tmp_path, full)
    report = json.loads(path.read_text("utf-8"))
    assert set(report["checks"]) == {"logits", "gradient"}
    assert report["checks_not_run"] == {"transfer": "c"}
    assert report["classes"][0]["robust_interval"] == list(wilson_interval(8, 10))
    assert report["curves"]["eps"][0]["interval"] == list(wilson_interval(3, 4))
    back = EvaluationResult.from_dict(report)
    assert back == replace(full, threat_model=full.threat_model | {"bounds": [0.0, 1.0]})
    assert back.failed_checks == ["gradient"]


def test_a_report_of_an_older_version_is_read(result):
    old = result.to_dict()
    for name in ("checks_not_run", "classes", "loaders", "waterfall", "curves", "saved", "precision", "model_hash"):
        del old[name]
    assert EvaluationResult.from_dict(old) == result


def test_everything_is_written(tmp_path, result, history, examples, comparison):
    folder = tmp_path / "a" / "b"
    seconds = {"adversarial training": 12.5}
    paths = write_report(
        folder, result, history=history, examples=examples, comparison=comparison, train_seconds=seconds, title="Digits"
    )
    names = ["report.json", "curves.png", "attacks.png", "examples.png", "report.html"]
    assert [path.name for path in paths] == names
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)  # no temporary file is left
    report = json.loads(paths[0].read_text("utf-8"))
    assert report["history"] == history
    assert report["train_seconds"] == seconds
    assert report["comparison"] == {name: json.loads(json.dumps(other.to_dict())) for name, other in comparison.items()}
    page = Page(paths[-1].read_text("utf-8"))
    embedded = [base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) for image in page.all("img")]
    assert embedded == [(folder / name).read_bytes() for name in names[1:4]]
    assert all(png.startswith(b"\x89PNG\r\n\x1a\n") for png in embedded)
    assert all(image["alt"] for image in page.all("img"))


def test_a_second_report_replaces_the_first(tmp_path, result):
    write_report(tmp_path, make_result(seed=1))
    write_report(str(tmp_path), make_result(seed=2))
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["seed"] == 2


def test_a_failed_write_keeps_the_old_file(tmp_path, result, monkeypatch):
    write_report(tmp_path, result)
    before = (tmp_path / "report.json").read_bytes()

    def full(path, content):
        path.touch()
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="disk full"):
        write_report(tmp_path, make_result(seed=99))
    assert (tmp_path / "report.json").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_values_that_json_lacks_do_not_cost_the_report(tmp_path):
    settings = {"inf": math.inf, "tensor": torch.tensor([1.0, math.nan]), "scalar": np.float32(0.5), "path": Path("x")}
    write_report(
        tmp_path,
        make_result(attacks={"odd": AttackScore(119, math.nan, settings)}),
        history=[{"epoch": 0, "clean_acc": 0.9, "acc": math.nan}],
        title="lone surrogate \udc80",
    )
    report = json.loads((tmp_path / "report.json").read_text("utf-8"), parse_constant=pytest.fail)
    assert report["history"] == [{"epoch": 0, "clean_acc": 0.9, "acc": None}]
    assert report["attacks"]["odd"]["seconds"] is None
    assert report["attacks"]["odd"]["settings"] == {"inf": None, "tensor": [1.0, None], "scalar": 0.5, "path": "x"}


def test_samples_that_are_no_images_are_left_out(tmp_path, result):
    x = torch.zeros(3, 7)
    paths = write_report(tmp_path, result, examples=Examples(x, x, [0] * 3, [0] * 3, [0] * 3))
    assert [path.name for path in paths] == ["report.json", "attacks.png", "report.html"]


def test_attacks_with_different_threat_models(tmp_path, examples):
    mixed = make_result(threat_model={"norm": "mixed", "eps": None, "bounds": None})
    paths = write_report(tmp_path, mixed, examples=examples)
    assert "examples.png" in {path.name for path in paths}
    assert "differs between the attacks" in Page(paths[-1].read_text("utf-8")).text


def test_a_file_in_the_place_of_the_folder(tmp_path, result):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(UsageError, match=r"report_dir=.*is a file"):
        write_report(tmp_path / "taken", result)


def test_without_matplotlib_only_the_pictures_are_missing(tmp_path, monkeypatch, result, history, examples):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(RobustDistWarning, match=r"pip install 'robustdist\[plots\]'") as caught:
        paths = write_report(tmp_path, result, history=history, examples=examples)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert [path.name for path in paths] == ["report.json", "report.html"]
    assert "img" not in dict(Page(paths[-1].read_text("utf-8")).tags)


@pytest.mark.slow
def test_importing_the_package_needs_neither_matplotlib_nor_lightning():
    code = (
        "import sys; import robustdist.report; "
        "print([name for name in ('matplotlib', 'lightning', 'pytorch_lightning') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_report_raises_no_warning_of_its_own(tmp_path, result, history, examples, comparison):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(tmp_path, result, history=history, examples=examples, comparison=comparison, title="Prüfung 検査")
