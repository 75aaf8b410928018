"""What all pictures share: figures without pyplot, colours, axes, legends.

Figures are made with matplotlib's objects alone: nothing global changes and no window opens. The colours are those of
Okabe and Ito, which people with any colour vision can tell apart.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from robustdist.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "ATTACKS",
    "CLEAN",
    "GRID",
    "INK",
    "LINES",
    "MODELS",
    "MUTED",
    "WORST",
    "legend",
    "new_figure",
    "png_bytes",
    "short",
    "style",
]

INK = "#222222"
MUTED = "#666666"
GRID = "#dddddd"
CLEAN = "#0072b2"
WORST = "#d55e00"
ATTACKS = ("#009e73", "#cc79a7", "#56b4e9", "#222222", "#8c96a0")
MODELS = ("#8c96a0", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")
LINES = ((0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))
_LONGEST_NAME = 18


def png_bytes(figure: Figure, dpi: int = 170) -> bytes:
    """Return ``figure`` as a PNG file; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Figure:
    """Return an empty figure of a size in inches.

    Raises:
        UsageError: If matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401 - a missing package is noticed here even when its parts are loaded
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(f"pictures need matplotlib ({error}): pip install 'robustdist[plots]'") from error
    figure = Figure(figsize=(width, height), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def style(axes: Axes) -> None:
    """Give axes the house style: a light grid of horizontal lines, no frame."""
    axes.set_facecolor("white")
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", color=GRID, linewidth=0.8, linestyle="-")
    axes.grid(visible=False, axis="x")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(MUTED)
    axes.tick_params(colors=MUTED, labelcolor=INK, labelsize=10)


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Put a legend above the axes, in as many columns as fit."""
    widths = [0.6 + 0.085 * len(label) for label in labels]  # inches, about
    room = figure.get_figwidth()
    columns = len(labels) if sum(widths) <= room else int(room / max(widths))
    drawn = figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=max(1, columns),
        frameon=False,
        fontsize=10.5,
        labelcolor=INK,
        handlelength=2.2,
    )
    for text in drawn.get_texts():
        text.set_parse_math(False)


def short(name: str, longest: int = _LONGEST_NAME) -> str:
    """Return ``name`` in one line of at most ``longest`` characters, shortened in the middle."""
    name = " ".join(name.split()) or "unnamed"
    # shortened in the middle: names often differ at the end only
    return name if len(name) <= longest else f"{name[: longest // 2]}…{name[1 - longest // 2 :]}"
