"""The frame of a report page: its style, its document, its tables. No script, nothing from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape

__all__ = ["document", "facts", "picture", "plural", "row", "table"]

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
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem .9rem; margin: .4rem 0 1rem; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; }
.pass, .fail, .left { display: inline-block; min-width: 4.2rem; font-weight: 700; }
.left { color: var(--soft); }
.pass { color: var(--good); }
.fail, .alarm { color: var(--bad); }
.alarm { font-weight: 600; }
pre { margin: .6rem 0; padding: .8rem 1rem; overflow-x: auto; background: var(--box); border-radius: .6rem;
  font: .85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
details { margin: .8rem 0; }
summary { cursor: pointer; color: var(--soft); }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.2rem; }
figure { margin: 0; min-width: 0; }
figure.whole { grid-column: 1 / -1; }
figure .scroll { background: #fff; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; padding: .5rem; }
figure img.wide { min-width: 36rem; }
figcaption { margin-bottom: .4rem; color: var(--soft); }
.note { background: var(--box); border-left: .25rem solid var(--soft); border-radius: .3rem; padding: .6rem 1rem;
  margin-top: 2.2rem; }
.note h2 { margin-top: .2rem; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """Return a whole page of ``parts``; empty ones are left out."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + "\n</main>\n</body>\n</html>\n"
    )


def facts(pairs: Mapping[str, str]) -> str:
    """Return names and values as a list in two columns, which wraps on a phone."""
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs.items())
    return f'<dl class="facts">{lines}</dl>'


def picture(caption: str, png: bytes) -> str:
    """Return a PNG file as part of the page; a wide one takes the whole width, and scrolls on a phone."""
    width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")  # the PNG header
    frame, image = (' class="whole"', ' class="wide"') if width > _WIDEST_FLUID else ("", "")
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<figure{frame}><figcaption>{escape(caption)}</figcaption><div class="scroll" tabindex="0">'
        f'<img alt="{escape(caption)}" width="{width}" height="{height}"{image} src="data:image/png;base64,{data}">'
        "</div></figure>"
    )


def table(head: Sequence[str], rows: Iterable[str], left: Sequence[int] = (0,)) -> str:
    """Return a table whose columns ``left`` are aligned left; it scrolls by itself where it is too wide."""
    cells = "".join(f'<th scope="col"{_name_class(index, left)}>{escape(cell)}</th>' for index, cell in enumerate(head))
    body = "\n".join(rows)
    # tabindex: a box that scrolls must be reachable by keyboard
    content = f"<table><thead><tr>{cells}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    return f'<div class="scroll" tabindex="0">{content}</div>'


def row(cells: Sequence[str], *, left: Sequence[int] = (0,), strong: bool = False) -> str:
    """Return one row of :func:`table`; the first cell is its heading."""
    first, *rest = (escape(cell) for cell in cells)
    line = "".join(f"<td{_name_class(index, left)}>{cell}</td>" for index, cell in enumerate(rest, start=1))
    start = '<tr class="strong">' if strong else "<tr>"
    return f'{start}<th scope="row" class="name">{first}</th>{line}</tr>'


def _name_class(index: int, left: Sequence[int]) -> str:
    return ' class="name"' if index in left else ""


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
