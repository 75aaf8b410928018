"""An evaluation as one HTML file that needs nothing else: no script, no style sheet, no picture from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType

from robustdist.report.result import EvaluationResult
from robustdist.report.text import (
    attack_names,
    checks_text,
    interval_text,
    percent,
    seconds_text,
    setting_text,
    short_settings,
    threat_model_text,
)

__all__ = ["render_html"]

_WIDEST_FLUID = 1300  # pixels; what is wider has small print

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6670; --line: #d9dee3; --page: #fff; --box: #f4f6f8;
  --good: #00694c; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #a3adb6; --line: #3a424a; --page: #15191d;
  --box: #20262c; --good: #4cc9a0; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 58rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere;
  -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .6rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .75rem; }
.figure { background: var(--box); border-radius: .6rem; padding: .8rem 1rem; }
.figure b { display: block; font-size: 2rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.figure small, .soft { color: var(--soft); }
.figure small { display: block; font-size: .9rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .6rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .8rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
@media (max-width: 30rem) { th, td { padding: .45rem .6rem; } }
thead th { border-top: 0; background: var(--box); font-weight: 600; }
th.name, td.name { text-align: left; }
tbody th { font-weight: 400; }
tr.strong th, tr.strong td { font-weight: 700; }
code { font: .88em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.checks { list-style: none; margin: 0; padding: 0; }
.checks li { padding: .45rem 0; border-top: 1px solid var(--line); }
.checks li:first-child { border-top: 0; }
.pass, .fail { display: inline-block; min-width: 4.2rem; font-weight: 700; }
.pass { color: var(--good); }
.fail, .alarm { color: var(--bad); }
.alarm { font-weight: 600; }
details { margin: .8rem 0; }
summary { cursor: pointer; color: var(--soft); }
figure { margin: 0 0 1.5rem; }
figure .scroll { background: #fff; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; padding: .5rem; }
figure img.wide { min-width: 36rem; }
figcaption { margin-bottom: .4rem; color: var(--soft); }
.note { background: var(--box); border-left: .25rem solid var(--soft); border-radius: .3rem; padding: .6rem 1rem;
  margin-top: 2.2rem; }
.note h2 { margin-top: .2rem; }
"""

_NOTE = """<section class="note"><h2>How to read the robust accuracy</h2>
<p>A sample counts as robust when the model is right on it without attack and under <em>every</em> attack listed here.
Another attack may still find an error on it, so this worst case is an <strong>upper bound</strong> on the true robust
accuracy for this threat model. More steps, restarts and kinds of attack bring the bound closer.</p>
<p>The 95 % interval (Wilson) covers the choice of the samples only. It does not cover attacks that were not run, nor
a larger radius or another norm.</p></section>"""


def render_html(
    title: str,
    result: EvaluationResult,
    *,
    comparison: Mapping[str, EvaluationResult] = MappingProxyType({}),
    train_seconds: Mapping[str, float] = MappingProxyType({}),
    images: Mapping[str, bytes] = MappingProxyType({}),
    about: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return a whole HTML page; it follows the reader's light or dark mode and fits a phone.

    Args:
        title: Heading of the page.
        result: The evaluation that the page is about.
        comparison: Evaluations by name of the model, one row each; without any the table is left out.
        train_seconds: Seconds of training by name of the model.
        images: PNG files by caption, in order.
        about: What was judged, by kind: "model", "stage", "checkpoint".
    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        _headline(result),
        _about(about),
        _comparison(comparison, train_seconds, result),
        _attacks(result),
        _checks(result),
        _pictures(images),
        _NOTE,
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + "\n</main>\n</body>\n</html>\n"
    )


def _about(about: Mapping[str, str]) -> str:
    judged = ", ".join(f"{escape(kind)} {escape(name)}" for kind, name in about.items())
    return f"<p>Judged: {judged}.</p>" if judged else ""


def _headline(result: EvaluationResult) -> str:
    def figure(label: str, value: str, detail: str) -> str:
        return f'<div class="figure">{label}<b>{value}</b><small>{detail}</small></div>'

    def accuracy(label: str, correct: int) -> str:
        interval = interval_text(correct, result.num_samples, " to ")
        share = percent(correct / max(1, result.num_samples))
        return figure(label, f"{share} %", f"95 % interval {interval}")

    figures = [
        accuracy("Clean accuracy", result.num_clean),
        accuracy("Robust accuracy", result.num_robust),
        figure("Samples", f"{result.num_samples:,}", f"{_plural(len(result.attacks), 'attack')}, seed {result.seed}"),
    ]
    lines = [
        f'<div class="figures">{"".join(figures)}</div>',
        f"<p>Threat model: {escape(threat_model_text(result.threat_model))}.</p>",
    ]
    if not all(check.passed for check in result.checks.values()):
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
        rows.append(_row(cells, strong=result is current))
    return f"<h2>Comparison</h2>\n<p class='soft'>Accuracy in %.</p>\n{_table(head, rows)}"


def _attacks(result: EvaluationResult) -> str:
    head = ["Attack", "Accuracy", "95 % interval", "Seconds", "Settings"]
    last = len(head) - 1

    def row(name: str, correct: int, seconds: str, settings: str, *, strong: bool = False) -> str:
        accuracy = percent(correct / max(1, result.num_samples))
        interval = interval_text(correct, result.num_samples, "–")  # noqa: RUF001 - a range
        return _row([name, accuracy, interval, seconds, settings], left=(0, last), strong=strong)

    rows = [row("clean", result.num_clean, "", "")]
    rows += [
        row(name, score.num_robust, seconds_text(score.seconds), short_settings(score.settings))
        for name, score in result.attacks.items()
    ]
    total = seconds_text(sum(score.seconds for score in result.attacks.values()))
    rows.append(row("worst case", result.num_robust, total, "right under every attack", strong=True))
    settings = "".join(
        f"<p>{escape(name)}: <code>"
        + escape(", ".join(f"{key}={setting_text(key, value)}" for key, value in score.settings.items()))
        + "</code></p>"
        for name, score in result.attacks.items()
    )
    details = f"<details><summary>All settings</summary>{settings}</details>" if settings else ""
    return f"<h2>Attacks</h2>\n<p class='soft'>Accuracy in %.</p>\n{_table(head, rows, left=(0, last))}\n{details}"


def _checks(result: EvaluationResult) -> str:
    if not result.checks:
        return ""
    lines = "".join(
        f'<li><span class="{"pass" if check.passed else "fail"}">{"✓ pass" if check.passed else "✗ FAIL"}</span>'
        f'<strong>{escape(name)}</strong> <span class="soft">{escape(check.detail)}</span></li>'
        for name, check in result.checks.items()
    )
    return f'<h2>Checks of the evaluation</h2>\n<ul class="checks">{lines}</ul>'


def _pictures(images: Mapping[str, bytes]) -> str:
    if not images:
        return ""
    figures = "\n".join(
        f'<figure><figcaption>{escape(caption)}</figcaption><div class="scroll" tabindex="0">'
        f'<img alt="{escape(caption)}"{_size(png)} src="data:image/png;base64,{base64.b64encode(png).decode("ascii")}">'
        "</div></figure>"
        for caption, png in images.items()
    )
    return f"<h2>Pictures</h2>\n{figures}"


def _size(png: bytes) -> str:
    """Return the attributes that reserve an image's place; a wide one scrolls on a phone, to stay legible."""
    width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")  # the PNG header
    wide = ' class="wide"' if width > _WIDEST_FLUID else ""
    return f' width="{width}" height="{height}"{wide}'


def _table(head: Sequence[str], rows: Iterable[str], left: Sequence[int] = (0,)) -> str:
    cells = "".join(f'<th scope="col"{_name_class(index, left)}>{escape(cell)}</th>' for index, cell in enumerate(head))
    body = "\n".join(rows)
    # tabindex: a box that scrolls must be reachable by keyboard
    table = f"<table><thead><tr>{cells}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _row(cells: Sequence[str], *, left: Sequence[int] = (0,), strong: bool = False) -> str:
    first, *rest = (escape(cell) for cell in cells)
    line = "".join(f"<td{_name_class(index, left)}>{cell}</td>" for index, cell in enumerate(rest, start=1))
    start = '<tr class="strong">' if strong else "<tr>"
    return f'{start}<th scope="row" class="name">{first}</th>{line}</tr>'


def _name_class(index: int, left: Sequence[int]) -> str:
    return ' class="name"' if index in left else ""


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
