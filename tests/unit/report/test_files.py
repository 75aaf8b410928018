from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from robustdist.errors import RobustDistWarning, UsageError
from robustdist.report import AttackScore, EvaluationResult, Examples, render_html, wilson_interval, write_report

from .conftest import NASTY, make_result

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Fails on tags that do not nest; keeps the tags with their attributes and the visible text."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.words = [], [], []
        self.feed(source)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


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


def test_html_is_one_well_formed_file(result, comparison):
    source = render_html("Title", result, comparison=comparison, train_seconds={"a": 1.0}, images={"caption": b"png"})
    page = Page(source)
    assert source.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<iframe|javascript:", source.replace("</", ""))
    assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert "prefers-color-scheme: dark" in source
    assert all("data:image/png;base64," in image["src"] for image in page.all("img"))


def test_html_says_what_matters(result, comparison):
    page = Page(render_html("Digits", result, comparison=comparison, train_seconds={"adversarial training": 318.2}))
    low, high = (f"{100 * end:.1f}" for end in wilson_interval(119, 200))
    assert f"Robust accuracy 59.5 % 95 % interval {low} to {high}" in page.text
    assert "Clean accuracy 95.0 %" in page.text
    assert "Samples 200 3 attacks, seed 7" in page.text
    assert "each pixel may change by at most 8/255 (linf), within [0, 1]" in page.text
    assert (
        "ordinary training 95.0 25.0 10.5 15.0 9.5 - adversarial training 95.0 75.0 60.5 65.0 59.5 318 s" in page.text
    )
    assert "PGD eps=8/255 steps=20 restarts=5" in page.text
    assert "✓ pass gradient all fine" in page.text
    assert "✗ FAIL budget excess of 0.1 <pixels>" in page.text
    assert "1 of 2 checks FAILED: budget." in page.text
    assert "upper bound on the true robust accuracy" in page.text
    assert "note=" in page.text


def test_html_without_optional_parts():
    text = Page(render_html("T", make_result(checks={}, attacks={}, num_samples=0, num_clean=0, num_robust=0))).text
    for heading in ("Comparison", "Checks of the evaluation", "Pictures", "All settings", "FAILED"):
        assert heading not in text
    assert "interval 0.0 to 100.0" in text


def test_html_escapes_every_name(result):
    hostile = make_result(checks={NASTY: next(iter(make_result().checks.values()))}, threat_model={NASTY: NASTY})
    source = render_html(NASTY, hostile, comparison={NASTY: hostile}, train_seconds={NASTY: 1.0}, images={NASTY: b""})
    assert "<img src=x" not in source
    page = Page(source)
    assert [image["alt"] for image in page.all("img")] == [NASTY]
    assert page.text.count(NASTY) >= 8


def test_the_report_raises_no_warning_of_its_own(tmp_path, result, history, examples, comparison):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(tmp_path, result, history=history, examples=examples, comparison=comparison, title="Prüfung 検査")
