"""A few samples for the eye: clean, perturbation, adversarial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from robustdist.errors import UsageError
from robustdist.report.drawing import GRID, INK, new_figure
from robustdist.report.result import Examples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["is_drawable", "plot_examples"]

_CELL = 1.25  # inches of one image
_ENLARGED = 10.0


def is_drawable(examples: Examples) -> bool:
    """Return whether there are samples and they are images that :func:`plot_examples` can show."""
    shape = examples.x.shape
    return examples.x.numel() > 0 and (len(shape) == 3 or (len(shape) == 4 and shape[1] in (1, 3)))


def plot_examples(
    examples: Examples,
    eps: float,
    *,
    bounds: Sequence[float] | None = (0.0, 1.0),
    max_samples: int = 8,
) -> Figure:
    """Show samples in rows: clean, perturbation, adversarial; the label above is red and bold when wrong.

    The perturbation is enlarged ten times, or less where its largest entry (at most ``eps``) would leave the colour
    range; the factor is in the title. With one channel red is brighter and blue is darker than the clean image; with
    three it is added to grey.

    Args:
        examples: Samples of shape (n, channels, height, width) or (n, height, width), 1 or 3 channels.
        eps: Radius of the threat model in pixel units.
        bounds: Smallest and largest valid pixel; None takes them from the samples.
        max_samples: Number of samples shown, from the first on.

    Raises:
        UsageError: If there is no sample, it is not an image of 1 or 3 channels, or matplotlib is missing.
    """
    x, x_adv = (images[:max_samples].detach().float().cpu() for images in (examples.x, examples.x_adv))
    if not is_drawable(examples):
        raise UsageError(
            f"examples of shape {tuple(examples.x.shape)} cannot be drawn: "
            "give at least one image of 1 or 3 channels, shape (n, channels, height, width)"
        )
    if x.dim() == 3:
        x, x_adv = x[:, None], x_adv[:, None]
    low, high = bounds if bounds is not None else (float(x.min()), float(x.max()))
    span = (high - low) or 1.0
    delta = (x_adv - x) / span
    clean, adversarial = ((images - low) / span for images in (x, x_adv))
    factor = _factor(float(delta.abs().max()), eps / span)

    count, columns = len(x), 3
    blocks = 1 if count <= 4 else 2
    rows = math.ceil(count / blocks)
    height = _CELL * min(2.0, x.shape[2] / x.shape[3])
    # every axes has its place in inches: images stay aligned whatever the labels say
    pitch_x, pitch_y, block_gap, top, edge = _CELL + 0.08, height + 0.3, 0.25, 0.25, 0.08
    figure_width = blocks * columns * pitch_x - 0.08 + (blocks - 1) * block_gap + 2 * edge
    figure_height = rows * pitch_y + top + edge
    figure = new_figure(figure_width, figure_height, layout=None)
    for sample in range(count):
        block, row = divmod(sample, rows)
        left = edge + block * (columns * pitch_x + block_gap)
        bottom = figure_height - top - (row + 1) * pitch_y
        axes = [
            figure.add_axes(
                (
                    (left + column * pitch_x) / figure_width,
                    bottom / figure_height,
                    _CELL / figure_width,
                    height / figure_height,
                )
            )
            for column in range(columns)
        ]
        _show(axes[0], clean[sample])
        _show(axes[1], delta[sample] * factor, signed=True)
        _show(axes[2], adversarial[sample])
        _verdict(axes[0], examples.y[sample], examples.predicted[sample])
        _verdict(axes[2], examples.y[sample], examples.predicted_adv[sample])
        if row == 0:
            enlarged = f"perturbation ×{factor:g}"  # noqa: RUF001 - a multiplication
            for column, heading in enumerate(("clean", enlarged, "adversarial")):
                _heading(axes[column], heading)
    return figure


def _factor(largest: float, eps: float) -> float:
    """Return 10, or the largest enlargement that brings no entry beyond half of the pixel range, rounded down."""
    reach = min(largest, eps) if eps > 0 and largest > 0 else max(largest, eps)
    if not 0 < reach < math.inf:
        return 1.0
    factor = 0.5 / reach * (1 + 1e-4)
    digits = 10.0 ** math.floor(math.log10(factor) - 1)
    return min(_ENLARGED, math.floor(factor / digits + 1e-9) * digits)


def _show(axes: Axes, image: Tensor, *, signed: bool = False) -> None:
    image = torch.nan_to_num(image)
    options: dict[str, Any]
    if len(image) == 1:
        # the very ends of the diverging map are too dark to tell apart
        options = {"cmap": "RdBu_r", "vmin": -0.65, "vmax": 0.65} if signed else {"cmap": "gray", "vmin": 0, "vmax": 1}
        pixels = image[0]
    else:
        options = {}
        pixels = (image + 0.5 if signed else image).clamp(0, 1).permute(1, 2, 0)
    axes.imshow(pixels.numpy(), interpolation="nearest", **options)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(GRID)


def _verdict(axes: Axes, truth: int, predicted: int) -> None:
    wrong = truth != predicted
    text = f"true {truth}, pred. {predicted}"
    axes.set_title(
        text,
        fontsize=min(9.0, 72 * _CELL / (0.62 * len(text))),
        color="#c00000" if wrong else INK,
        fontweight="bold" if wrong else "normal",
        pad=4,
    )


def _heading(axes: Axes, text: str) -> None:
    # above the line of the verdicts, at one height in every column
    axes.annotate(
        text,
        (0.5, 1.0),
        xytext=(0, 20),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="center",
        fontsize=9,
        fontweight="bold",
        color=INK,
    )
