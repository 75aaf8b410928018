from __future__ import annotations

import io
import math
import sys

import pytest
import torch
from matplotlib.image import imread

from robustdist.errors import UsageError
from robustdist.report import (
    CurvePoint,
    Examples,
    Step,
    is_drawable,
    plot_attacks,
    plot_curve,
    plot_curves,
    plot_examples,
    plot_waterfall,
    png_bytes,
    wilson_interval,
)

from .conftest import NASTY, make_result


def check_png(figure):
    png = png_bytes(figure)
    pixels = imread(io.BytesIO(png))
    assert 2_000 < len(png) < 1_000_000
    assert 300 < pixels.shape[1] < 2500
    assert 200 < pixels.shape[0] < 2500
    assert pixels[..., :3].std() > 0.01  # something is drawn
    return png


def texts(axes):
    return [text.get_text() for text in axes.texts]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_curves(history):
    figure = plot_curves(history)
    (axes,) = figure.axes
    assert legend(figure) == ["clean", "pgd20", "worst case"]
    clean, pgd, worst = axes.lines
    assert list(clean.get_xdata()) == [0, 1, 2, 3]
    assert list(clean.get_ydata()) == pytest.approx([90, 91, 92, 93])
    assert list(pgd.get_ydata()) == pytest.approx([60, 62, 64, 66])
    assert list(worst.get_ydata()) == pytest.approx([59, 61, 63, 65])
    assert clean.get_marker() == "o"
    assert texts(axes) == ["93.0", "65.0"]
    assert axes.get_ylim()[0] == 50
    assert "%" in axes.get_ylabel()
    assert check_png(figure) == png_bytes(plot_curves(history))


def test_curves_with_one_epoch_gaps_and_many_epochs(history):
    single = plot_curves(history[2:3])
    check_png(single)
    assert list(single.axes[0].get_xticks()) == [2]
    history[1]["acc"] = math.nan
    del history[2]["pgd20_acc"]
    history[3][f"{NASTY}_acc"] = 0.01
    gaps = plot_curves(history)
    check_png(gaps)
    assert gaps.axes[0].get_ylim()[0] == 0
    assert [line.get_marker() for line in plot_curves(history * 10).axes[0].lines] == [""] * 4
    nothing = plot_curves([{"epoch": 0, "clean_acc": math.nan, "acc": math.nan}])
    png_bytes(nothing)
    with pytest.raises(UsageError, match="history is empty"):
        plot_curves([])


def test_attacks(comparison):
    figure = plot_attacks(comparison)
    (axes,) = figure.axes
    assert legend(figure) == ["ordinary training", "adversarial training"]
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == pytest.approx([95, 25, 10.5, 15, 9.5, 95, 75, 60.5, 65, 59.5])
    assert "60.5" in texts(axes)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels[:3] == ["clean", "fgsm", "pgd20"]
    assert labels[-1] == "worst case"
    assert axes.get_ylim()[0] == 0
    # error bars are the Wilson interval
    segments = axes.collections[1].get_segments()
    assert [end[1] / 100 for end in segments[2]] == pytest.approx(wilson_interval(121, 200))
    check_png(figure)


def test_attacks_of_one_model_need_no_legend(result):
    figure = plot_attacks({"model": result})
    assert not figure.legends
    assert len({bar.get_facecolor() for bar in figure.axes[0].patches}) == 3
    check_png(figure)


def test_attacks_at_the_ends_and_missing_ones():
    perfect = make_result(num_robust=0, num_clean=200, attacks={})
    empty = make_result(num_samples=0, num_clean=0, num_robust=0, drop=150, attacks={})
    figure = plot_attacks({"a": perfect, "b": make_result(), "c": empty})
    assert len(figure.axes[0].patches) == 2 + 5 + 2
    check_png(figure)
    many = {f"model {index} with a long name": make_result() for index in range(9)}
    check_png(plot_attacks(many))
    with pytest.raises(UsageError, match="results is empty"):
        plot_attacks({})


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (5, 1, 8, 8), (3, 3, 16, 8), (4, 9, 9), (2, 1, 40, 2)])
def test_examples_draw_any_image(shape):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    labels = list(range(len(x)))
    figure = plot_examples(Examples(x, (x + 0.1).clamp(0, 1), labels, labels, labels), 0.1)
    assert len(figure.axes) == 3 * len(x)
    check_png(figure)


def test_examples_say_what_is_wrong_and_how_far_it_is_enlarged(examples):
    figure = plot_examples(examples, 8 / 255)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:6] == ["true 0, pred. 0", "", "true 0, pred. 0", "true 1, pred. 1", "", "true 1, pred. 5"]
    colors = [axes.title.get_color() for axes in figure.axes]
    wrong = [index for index, color in enumerate(colors) if color == "#c00000"]
    assert wrong == [5, 12, 14]
    assert {axes.title.get_fontweight() for index, axes in enumerate(figure.axes) if index in wrong} == {"bold"}
    assert texts(figure.axes[0]) == ["clean"]
    assert texts(figure.axes[1]) == ["perturbation \u00d710"]
    # zero is the middle of the colour map, the whole enlarged perturbation is inside
    (image,) = figure.axes[1].images
    low, high = image.get_clim()
    assert low == -high
    shown = torch.as_tensor(image.get_array().data)
    assert torch.allclose(shown, 10 * (examples.x_adv - examples.x)[0, 0], atol=1e-5)
    assert 0.3 < shown.abs().max() <= 0.5


def test_examples_do_not_depend_on_the_pixel_range(examples):
    scaled = Examples(examples.x * 255, examples.x_adv * 255, examples.y, examples.predicted, examples.predicted_adv)
    figure = plot_examples(scaled, 8, bounds=(0, 255))
    assert texts(figure.axes[1]) == ["perturbation \u00d710"]
    assert float(figure.axes[0].images[0].get_array().max()) <= 1
    png_bytes(plot_examples(scaled, 0.0, bounds=None))


def test_examples_without_perturbation_and_with_more_samples_than_shown():
    x = torch.zeros(20, 3, 4, 4)
    labels = [0] * 20
    figure = plot_examples(Examples(x, x, labels, labels, labels), 0.0)
    assert len(figure.axes) == 3 * 8
    assert texts(figure.axes[1]) == ["perturbation \u00d71"]
    check_png(figure)


@pytest.mark.parametrize("shape", [(2, 5), (2, 4, 8, 8), (0, 1, 8, 8), (2, 1, 1, 8, 8)])
def test_examples_that_are_no_images_are_refused(shape):
    x = torch.zeros(shape)
    examples = Examples(x, x, [0, 1], [0, 1], [0, 1])
    assert not is_drawable(examples)
    with pytest.raises(UsageError, match="1 or 3 channels"):
        plot_examples(examples, 0.1)


def test_no_global_state_is_touched(history, comparison, examples):
    import matplotlib

    before, pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    for figure in (plot_curves(history), plot_attacks(comparison), plot_examples(examples, 0.1)):
        png_bytes(figure)
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == pyplot


def test_a_dark_style_of_the_user_does_not_hide_text(history):
    import matplotlib

    expected = png_bytes(plot_curves(history))
    with matplotlib.rc_context({"text.color": "white", "axes.labelcolor": "white", "figure.facecolor": "black"}):
        assert png_bytes(plot_curves(history)) == expected


def test_missing_matplotlib_names_the_extra(monkeypatch, history, comparison, examples):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (
        lambda: plot_curves(history),
        lambda: plot_attacks(comparison),
        lambda: plot_examples(examples, 0.1),
        lambda: plot_curve([CurvePoint(1.0, 1, 2)], "steps"),
        lambda: plot_waterfall([Step("clean", 1)], 2),
    ):
        with pytest.raises(UsageError, match=r"pip install 'robustdist\[plots\]'"):
            draw()


def test_a_curve_shows_every_point_and_its_interval():
    points = [CurvePoint(0.0, 190, 200), CurvePoint(0.01, 180, 200), CurvePoint(0.1, 80, 200), CurvePoint(0.5, 0, 200)]
    figure = plot_curve(points, "eps", mark=0.1)
    (axes,) = figure.axes
    line, mark = axes.lines
    assert list(line.get_xdata()) == [0, 0.01, 0.1, 0.5]
    assert list(line.get_ydata()) == pytest.approx([95, 90, 40, 0])
    assert list(mark.get_xdata()) == [0.1, 0.1]
    # the second label would run into the first
    assert texts(axes) == ["95.0", "40.0", "0.0", "evaluated at 0.1"]
    low, high = wilson_interval(80, 200)
    band = axes.collections[0].get_paths()[0].vertices
    at = sorted(height / 100 for place, height in band.tolist() if place == 0.1)
    assert (at[0], at[-1]) == pytest.approx((low, high))
    assert axes.get_xscale() == "linear"
    check_png(figure)


@pytest.mark.parametrize("name", ["steps", "restarts"])
def test_steps_and_restarts_are_far_apart_on_a_logarithmic_axis(name):
    figure = plot_curve([CurvePoint(float(value), 200 - value, 200) for value in (1, 2, 5, 50)], name)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "5", "50"]
    assert name in axes.get_xlabel()
    check_png(figure)
    png_bytes(plot_curve([CurvePoint(1.0, 0, 0)], name))


def test_the_waterfall_shows_what_is_left_after_each_step():
    steps = [Step("clean", 180), Step("pgd", 90), Step(f"{NASTY}: square", 80)]
    figure = plot_waterfall(steps, 200)
    (axes,) = figure.axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([90, 90, 45, 90, 45, 40])  # pale what there was before, then what is left
    assert texts(axes) == ["90.0", "45.0", "40.0"]
    assert list(axes.lines[1].get_xdata()) == pytest.approx([100 * end for end in wilson_interval(90, 200)])
    assert axes.yaxis_inverted()
    check_png(figure)
    png_bytes(plot_waterfall(steps[:1], 200))


def test_nothing_to_draw_is_said():
    with pytest.raises(UsageError, match="no curve"):
        plot_curve([], "eps")
    with pytest.raises(UsageError, match="no waterfall"):
        plot_waterfall([], 3)
