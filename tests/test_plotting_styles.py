"""Pictures are drawn in the user's style, which the package completes."""

import numpy as np
import pytest

import keras_lso
from keras_lso import plotting
from keras_lso.diagnostics.float16 import Float16Report
from keras_lso.diagnostics.float16_ranges import LayerRange
from keras_lso.diagnostics.magnitudes import Magnitudes
from keras_lso.diagnostics.underflow import UnderflowReport
from keras_lso.diagnostics.underflow_counts import counts_of

pytest.importorskip("matplotlib")
import matplotlib  # noqa: E402
import matplotlib.style  # noqa: E402
from matplotlib.colors import to_hex, to_rgba  # noqa: E402

from testing.visible import assert_visible, contrast  # noqa: E402

matplotlib.use("Agg")

pytestmark = pytest.mark.one_backend

STYLES = ["default", "dark_background", "ggplot", "grayscale"]
OKABE_ITO = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"]
SCALES = [2.0**i for i in range(0, 25, 4)]
LOGS = {"loss": [3.0, 2.0], "loss_scale": [8.0, 4.0], "skipped_steps": [1, 4]}
RECORD = {
    "step": np.arange(1, 5),
    "outcome": np.array(["applied", "overflow", "spike", "rate"]),
    "loss_scale": np.array([8.0, 8.0, 4.0, 4.0]),
    "gradient_norm": np.array([1.0, np.inf, 9.0, 1.0]),
    "learning_rate": np.array([0.1, 0.1, 0.1, np.nan]),
    "largest_gradient": np.array([0.5, np.inf, 5.0, 0.5]),
}


def underflow_report():
    # Lost at both ends of float16, at one of them, and not at all.
    values = {"both": [2.0**-40, 1e9], "one": [2.0**-25], "none": [1.0]}
    layers = {name: counts_of([array], SCALES) for name, array in values.items()}
    return UnderflowReport(SCALES, layers)


def float16_report():
    found = Magnitudes(is_float16=True, largest=4.0)
    layer = LayerRange("float16", 1, found, found, {"matmul": found}, found)
    return Float16Report({"kept": layer, "other": layer}, ["kept"], None, None, True)


def warmups(count):
    schedule = keras_lso.schedules.LinearWarmup(0.5, 4, 0.0)
    return {str(i): schedule for i in range(count)}


DRAWN = {
    "schedules": lambda: plotting.plot_schedule(warmups(4), steps=5),
    "loss scale": lambda: plotting.plot_loss_scale(LOGS),
    "record": lambda: plotting.plot_record(RECORD),
    "trust ratios": lambda: plotting.plot_trust_ratios([{"a": 0.1}, {"a": 0.3}]),
    "underflow": lambda: plotting.plot_underflow(underflow_report()),
    "float16": lambda: plotting.plot_float16(float16_report()),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_plot_elements_contrast_with_background_of_style(draw, style):
    with matplotlib.style.context(style):
        figure = draw()
        assert to_rgba(figure.get_facecolor()) == to_rgba(rc("figure.facecolor"))
        for axis in figure.axes:
            assert to_rgba(axis.get_facecolor()) == to_rgba(rc("axes.facecolor"))
        # One of two axes that share a place has it, and it is the one behind.
        shown = [axis.patch.get_visible() for axis in figure.axes]
        has_twins = draw is DRAWN["loss scale"]
        assert shown == ([True, False, True] if has_twins else [True] * len(shown))
    # In the style in which it was drawn, whatever follows.
    assert_visible(figure)


def rc(name):
    return matplotlib.rcParams[name]


def test_contrast_matches_wcag_examples():
    assert contrast((1, 1, 1), (0, 0, 0)) == pytest.approx(21)
    # W3C's example of what just passes.
    assert contrast((1, 1, 1), to_rgba("#767676")[:3]) == pytest.approx(4.54, abs=0.01)


def test_assert_visible_detects_invisible_line():
    figure = DRAWN["float16"]()
    figure.axes[0].set_facecolor("black")
    with pytest.raises(AssertionError, match="Line2D"):
        assert_visible(figure)


def colors_of(figure):
    return [to_hex(line.get_color()) for line in figure.axes[0].get_lines()]


def test_colors_come_from_style_or_okabe_ito_palette():
    assert colors_of(DRAWN["schedules"]()) == OKABE_ITO
    with matplotlib.style.context("dark_background"):
        cycle = [to_hex(c) for c in rc("axes.prop_cycle").by_key()["color"]]
        figure = DRAWN["schedules"]()
        [underflow] = DRAWN["underflow"]().legends
    assert colors_of(figure) == cycle[:4]
    # A figure keeps them when it is drawn in another style.
    assert [to_hex(line.get_color()) for line in underflow.get_lines()] == cycle[:3]


@pytest.mark.parametrize("cycle", ["color=['w', 'y']", "linestyle=['-', '--']"])
def test_color_cycle_with_fewer_than_three_colors_is_ignored(cycle):
    with matplotlib.rc_context({"axes.prop_cycle": f"cycler({cycle})"}):
        assert colors_of(DRAWN["schedules"]()) == OKABE_ITO


def test_colors_repeat_after_end_of_palette():
    figure = plotting.plot_schedule(warmups(7), steps=5)
    colors = colors_of(figure)
    assert colors[:4] == OKABE_ITO
    assert len(set(colors)) == 6
    assert colors[6] == colors[0]


def test_style_settings_take_precedence_over_package_defaults():
    def looks(**style):
        with matplotlib.rc_context(style):
            [axis] = DRAWN["trust ratios"]().axes
            line = axis.get_xgridlines()[0]
            grid = line.get_visible(), line.get_alpha(), line.get_linewidth()
            top = axis.spines["top"].get_visible()
            return axis.xaxis.label.get_fontsize(), top, grid

    assert looks() == (9, False, (True, 0.33, 0.6))
    assert looks(**{"font.size": 14})[0] == 14
    # A style with a grid has it as it is there.
    assert looks(**{"axes.grid": True, "grid.linewidth": 3.0})[2] == (True, 1.0, 3.0)


def test_plots_leave_rc_params_unchanged():
    before = matplotlib.rcParams.copy()
    for draw in DRAWN.values():
        draw()
    assert matplotlib.rcParams == before
