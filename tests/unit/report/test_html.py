"""The page: well-formed, self-contained, and it says what has to stand beside a robust accuracy."""

from __future__ import annotations

import re

from robustdist.report import (
    AttackScore,
    Check,
    ClassScore,
    SavedScore,
    render_html,
    wilson_interval,
)

from .conftest import NASTY, make_result
from .page import Page

DASH = "\u2013"


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
    assert f"Robust accuracy, upper bound 59.5 % 95 % interval {low} to {high}" in page.text
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


def test_a_failed_check_is_an_alarm_and_one_that_was_not_run_is_none():
    checks = {"logits": Check(True, "fine"), "transfer": Check(None, "needs attacks of its own")}
    page = Page(render_html("T", make_result(checks=checks)))
    assert "not run transfer needs attacks of its own" in page.text
    assert "FAILED" not in page.text
    assert "Read them before" not in page.text
    alarmed = Page(render_html("T", make_result(checks=checks | {"gradient": Check(False, "none")})))
    assert "1 of 2 checks FAILED: gradient, 1 not run. Read them before you quote a figure." in alarmed.text


def test_what_stands_beside_the_number():
    settings = {
        "attack": "PGD",
        "norm": "linf",
        "eps": 8 / 255,
        "steps": 20,
        "step_size": 2 / 255,
        "restarts": 3,
        "attack_loss": "margin",
        "model_mode": "eval",
        "seed": 4,
    }
    result = make_result(attacks={"p": AttackScore(119, 1.0, settings)}, precision="float32", model_hash="abc123")
    text = Page(render_html("T", result, about={"model": "Net", "checkpoint": "a.ckpt"})).text
    for words in (
        "attack PGD norm linf radius 8/255 = 0.03137254901960784 steps 20",
        "step size 2/255 = 0.00784313725490196 restarts 3 loss margin mode eval seed 4",
        "samples 200, robust 59.5 % (52.6 to 66.1)",
        "model Net checkpoint a.ckpt",
        "precision float32 seed 7 model hash abc123",
    ):
        assert words in text


def test_standard_autoattack_is_named_and_nothing_else_is():
    published = {"attack": "AutoAttack", "version": "standard", "steps": 100, "queries": 5000, "precision": "32"}
    for change in ({}, {"version": "rand"}, {"steps": 10}, {"queries": 200}, {"precision": "bf16"}, {"attack": "PGD"}):
        score = AttackScore(119, 1.0, published | change)
        text = Page(render_html("T", make_result(attacks={"pgd": AttackScore(150, 1.0, {}), "aa": score}))).text
        assert ("Robust accuracy, AutoAttack standard" in text) == (not change)
        assert ("Robust accuracy, upper bound" in text) == bool(change)


def test_classes_and_saved_examples():
    classes = [ClassScore(label, 10, 9, label % 10) for label in range(12)]
    saved = SavedScore("examples.pt", 200, 119, 121)
    text = Page(render_html("T", make_result(classes=classes, saved=saved))).text
    assert "Class Samples Clean Robust 95 % interval 0 10 90.0 0.0 0.0-27.8 1 10 90.0 10.0 1.8-40.4" in text.replace(
        DASH, "-"
    )
    assert "file examples.pt images 200 in float32 59.5 % (95 % interval 52.6 to 66.1) in 8 bit 60.5 %" in text
    many = render_html("T", make_result(classes=[ClassScore(label, 1, 1, 1) for label in range(21)]))
    assert "All 21 classes" in Page(many).text
    unmeasured = Page(render_html("T", make_result(saved=SavedScore("examples.pt", 200, None, None)))).text
    assert "in float32" not in unmeasured


def test_the_row_for_a_leaderboard_is_there_to_copy():
    page = Page(render_html("T", make_result(), leaderboard={"name": NASTY, "venue": None, "unreliable": False}))
    assert '"venue": null, "unreliable": false' in page.text
    assert "Row for a leaderboard" not in Page(render_html("T", make_result())).text
