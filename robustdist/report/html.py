"""An evaluation as one HTML file that needs nothing else: no script, no style sheet, no picture from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from types import MappingProxyType
from typing import Any

from robustdist.report.page import document, facts, picture, plural, row, table
from robustdist.report.result import Check, ClassScore, EvaluationResult
from robustdist.report.text import (
    attack_names,
    bound_text,
    checks_text,
    exact_text,
    interval_text,
    percent,
    seconds_text,
    setting_text,
    short_settings,
    threat_model_text,
)

__all__ = ["render_html"]

_MANY_CLASSES = 20

_NOTE = """<section class="note"><h2>How to read the robust accuracy</h2>
<p>A sample counts as robust when the model is right on it without attack and under <em>every</em> attack listed here.
Another attack may still find an error on it, so this worst case is an <strong>upper bound</strong> on the true robust
accuracy for this threat model. More steps, restarts and kinds of attack bring the bound closer: figures that are
compared with those of others come from AutoAttack in its standard version.</p>
<p>The 95 % interval (Wilson) covers the choice of the samples only. It does not cover attacks that were not run, nor
a larger radius or another norm.</p></section>"""

# What a reader of a settings list looks for first, in words.
_BESIDE = {
    "norm": "norm",
    "eps": "radius",
    "steps": "steps",
    "queries": "queries",
    "step_size": "step size",
    "restarts": "restarts",
    "attack_loss": "loss",
    "version": "version",
    "model_mode": "mode",
    "seed": "seed",
}


def render_html(
    title: str,
    result: EvaluationResult,
    *,
    comparison: Mapping[str, EvaluationResult] = MappingProxyType({}),
    train_seconds: Mapping[str, float] = MappingProxyType({}),
    images: Mapping[str, bytes] = MappingProxyType({}),
    about: Mapping[str, str] = MappingProxyType({}),
    leaderboard: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return a whole HTML page; it follows the reader's light or dark mode and fits a phone.

    Args:
        title: Heading of the page.
        result: The evaluation that the page is about.
        comparison: Evaluations by name of the model, one row each; without any the table is left out.
        train_seconds: Seconds of training by name of the model.
        images: PNG files by caption, in order.
        about: What was judged, by kind: "model", "stage", "checkpoint".
        leaderboard: The row for a leaderboard; left out if empty.
    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        _headline(result),
        _comparison(comparison, train_seconds, result),
        _attacks(result),
        _checks(result.checks),
        _pictures(images),
        _classes(result.classes),
        _saved(result),
        _beside(result, about),
        _leaderboard(leaderboard),
        _NOTE,
    ]
    return document(title, parts)


def _headline(result: EvaluationResult) -> str:
    def figure(label: str, value: str, detail: str) -> str:
        return f'<div class="figure">{label}<b>{value}</b><small>{detail}</small></div>'

    def accuracy(label: str, correct: int) -> str:
        interval = interval_text(correct, result.num_samples, " to ")
        share = percent(correct / max(1, result.num_samples))
        return figure(label, f"{share} %", f"95 % interval {interval}")

    figures = [
        accuracy("Clean accuracy", result.num_clean),
        accuracy(f"Robust accuracy, {bound_text(result)}", result.num_robust),
        figure("Samples", f"{result.num_samples:,}", f"{plural(len(result.attacks), 'attack')}, seed {result.seed}"),
    ]
    lines = [
        f'<div class="figures">{"".join(figures)}</div>',
        f"<p>Threat model: {escape(threat_model_text(result.threat_model))}.</p>",
    ]
    if result.failed_checks:
        lines.append(f'<p class="alarm">{escape(checks_text(result))}. Read them before you quote a figure.</p>')
    return "\n".join(lines)


def _comparison(
    results: Mapping[str, EvaluationResult], train_seconds: Mapping[str, float], current: EvaluationResult
) -> str:
    if not results:
        return ""
    names = attack_names(results.values())
    head = ["Model", "Clean", *names, "Worst case", *(["Training"] if train_seconds else [])]
    rows = []
    for model, result in results.items():
        cells = [model, percent(result.clean_acc)]
        cells += [percent(result.attack_acc(name)) if name in result.attacks else "-" for name in names]
        cells.append(percent(result.robust_acc))
        if train_seconds:
            cells.append(f"{seconds_text(train_seconds[model])} s" if model in train_seconds else "-")
        rows.append(row(cells, strong=result is current))
    return f"<h2>Comparison</h2>\n<p class='soft'>Accuracy in %.</p>\n{table(head, rows)}"


def _attacks(result: EvaluationResult) -> str:
    head = ["Attack", "Accuracy", "95 % interval", "Seconds", "Settings"]
    last = len(head) - 1

    def line(name: str, correct: int, seconds: str, settings: str, *, strong: bool = False) -> str:
        accuracy = percent(correct / max(1, result.num_samples))
        interval = interval_text(correct, result.num_samples, "–")  # noqa: RUF001 - a range
        return row([name, accuracy, interval, seconds, settings], left=(0, last), strong=strong)

    rows = [line("clean", result.num_clean, "", "")]
    rows += [
        line(name, score.num_robust, seconds_text(score.seconds), short_settings(score.settings))
        for name, score in result.attacks.items()
    ]
    total = seconds_text(sum(score.seconds for score in result.attacks.values()))
    rows.append(line("worst case", result.num_robust, total, "right under every attack", strong=True))
    return f"<h2>Attacks</h2>\n<p class='soft'>Accuracy in %.</p>\n{table(head, rows, left=(0, last))}"


def _checks(checks: Mapping[str, Check]) -> str:
    if not checks:
        return ""
    words = {True: ("pass", "✓ pass"), False: ("fail", "✗ FAIL"), None: ("left", "not run")}
    lines = "".join(
        f'<li><span class="{words[check.passed][0]}">{words[check.passed][1]}</span> '
        f'<strong>{escape(name)}</strong> <span class="soft">{escape(check.detail)}</span></li>'
        for name, check in checks.items()
    )
    return f'<h2>Checks of the evaluation</h2>\n<ul class="checks">{lines}</ul>'


def _pictures(images: Mapping[str, bytes]) -> str:
    if not images:
        return ""
    figures = "\n".join(picture(caption, png) for caption, png in images.items())
    return f'<h2>Pictures</h2>\n<div class="pictures">\n{figures}\n</div>'


def _classes(classes: list[ClassScore]) -> str:
    if not classes:
        return ""
    head = ["Class", "Samples", "Clean", "Robust", "95 % interval"]
    rows = [
        row(
            [
                str(score.label),
                str(score.num_samples),
                percent(score.clean_acc),
                percent(score.robust_acc),
                interval_text(score.num_robust, score.num_samples, "–"),  # noqa: RUF001 - a range
            ]
        )
        for score in classes
    ]
    content = f"<p class='soft'>Accuracy in %.</p>\n{table(head, rows)}"
    if len(classes) > _MANY_CLASSES:
        content = f"<details><summary>All {len(classes)} classes</summary>{content}</details>"
    return f"<h2>Classes</h2>\n{content}"


def _saved(result: EvaluationResult) -> str:
    saved = result.saved
    if saved is None:
        return ""

    def again(right: int) -> str:
        share = percent(right / max(1, saved.num_samples))
        return f"{share} % (95 % interval {interval_text(right, saved.num_samples, ' to ')})"

    lines = {"file": saved.file, "images": f"{saved.num_samples:,}"}
    if saved.num_right is not None:
        lines["in float32"] = again(saved.num_right)
    if saved.num_right_8bit is not None:
        lines["in 8 bit"] = again(saved.num_right_8bit)
    told = "Accuracy on the saved adversarial images, measured again from the file: as they are, and rounded to 8 bit."
    return f"<h2>Saved examples</h2>\n<p class='soft'>{told}</p>\n{facts(lines)}"


def _beside(result: EvaluationResult, about: Mapping[str, str]) -> str:
    """Return what has to stand beside a robust accuracy wherever it is quoted."""
    general = dict(about)
    general["samples"] = (
        f"{result.num_samples:,}, robust {percent(result.robust_acc)} % "
        f"({interval_text(result.num_robust, result.num_samples, ' to ')})"
    )
    known = {"precision": result.precision, "seed": str(result.seed), "model hash": result.model_hash}
    general.update({name: value for name, value in known.items() if value is not None})
    parts = [f"<h2>What stands beside the number</h2>\n{facts(general)}"]
    for name, score in result.attacks.items():
        settings = score.settings
        kind = settings.get("name") if settings.get("attack") == "TorchAttack" else settings.get("attack")
        chosen = {"attack": str(kind)} if kind else {}
        for key, word in _BESIDE.items():
            value = settings.get(key)
            if value is not None:
                exact = key in ("eps", "step_size") and isinstance(value, float)
                chosen[word] = exact_text(value) if exact else setting_text(key, value)
        every = ", ".join(f"{key}={setting_text(key, value)}" for key, value in settings.items())
        parts.append(
            f"<h3>{escape(name)}</h3>\n{facts(chosen)}"
            f"<details><summary>All settings</summary><p><code>{escape(every)}</code></p></details>"
        )
    return "\n".join(parts)


def _leaderboard(leaderboard: Mapping[str, Any]) -> str:
    if not leaderboard:
        return ""
    text = escape(json.dumps(dict(leaderboard), indent=1, ensure_ascii=False, default=str))
    return (
        "<h2>Row for a leaderboard</h2>\n"
        "<p class='soft'>RobustBench's fields; null is what nobody told or checked.</p>\n"
        f'<pre tabindex="0">{text}</pre>'
    )
