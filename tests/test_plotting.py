"""Pictures show the numbers that they are made of, and say what is missing."""

import builtins

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import plotting
from keras_lso.diagnostics.underflow import UnderflowReport
from keras_lso.diagnostics.underflow_counts import counts_of
from testing.schedules import ALL, STEPS, rates

pytest.importorskip("matplotlib")
import matplotlib  # noqa: E402
import matplotlib.image  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402

matplotlib.use("Agg")

WARMUP = keras_lso.schedules.LinearWarmup(0.5, 4, 0.0)


def lines_of(axis):
    return [(line.get_xdata(), line.get_ydata()) for line in axis.get_lines()]


def texts_of(texts):
    return [text.get_text() for text in texts]


def labels_of(axis):
    return axis.get_xlabel(), axis.get_ylabel()


def test_plot_schedule_draws_rate_of_each_step():
    figure = plotting.plot_schedule(WARMUP, steps=6)
    [(steps, rates)] = lines_of(figure.axes[0])
    assert list(steps) == [0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(rates, [0, 0.125, 0.25, 0.375, 0.5, 0.5], rtol=1e-6)
    [axis] = figure.axes
    assert labels_of(axis) == ("step", "learning rate")
    assert axis.get_xlim() == (0, 5)
    assert (axis.get_xscale(), axis.get_yscale()) == ("linear", "linear")
    assert axis.get_legend() is None


def test_plot_schedule_starts_rate_axis_at_zero():
    halving = keras_lso.schedules.LinearWarmup(0.5, 4, 1.0)
    [axis] = plotting.plot_schedule(halving, steps=6).axes
    bottom, top = axis.get_ylim()
    assert bottom == 0
    assert top > 1


def test_plot_schedule_spans_first_to_last_step_of_long_schedule():
    steps = lines_of(plotting.plot_schedule(WARMUP, np.int64(3)).axes[0])[0][0]
    assert list(steps) == [0, 1, 2]
    [(steps, _)] = lines_of(plotting.plot_schedule(WARMUP, steps=123_456).axes[0])
    assert (steps[0], steps[-1]) == (0, 123_455)
    # As many as there are, about equally far from each other.
    assert len(steps) == 1000
    assert set(np.diff(steps)) == {123, 124}


@pytest.mark.one_backend
def test_plot_schedule_draws_rates_of_every_schedule():
    schedules = {name: make() for name, make in ALL.items()}
    axis = plotting.plot_schedule(schedules, steps=len(STEPS)).axes[0]
    for line, schedule in zip(axis.get_lines(), schedules.values(), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), rates(schedule))


@pytest.mark.parametrize(
    "schedules, labels",
    [
        ({"a": WARMUP, "b": WARMUP}, ["a", "b"]),
        (
            [WARMUP, keras.optimizers.schedules.CosineDecay(0.1, 5, name="cosine")],
            ["LinearWarmup", "cosine"],
        ),
        ([WARMUP, WARMUP], ["0: LinearWarmup", "1: LinearWarmup"]),
    ],
)
def test_plot_schedule_labels_several_schedules(schedules, labels):
    axis = plotting.plot_schedule(schedules, steps=5).axes[0]
    assert texts_of(axis.get_legend().get_texts()) == labels
    lines = axis.get_lines()
    assert [line.get_label() for line in lines] == labels
    given = schedules.values() if isinstance(schedules, dict) else schedules
    for line, schedule in zip(lines, given, strict=True):
        np.testing.assert_allclose(
            line.get_ydata(), rates(schedule, range(5)), rtol=1e-6
        )
    in_legend = [line.get_color() for line in axis.get_legend().get_lines()]
    assert in_legend == [line.get_color() for line in lines]
    assert len(set(in_legend)) == 2


LOGS = {
    "loss": [3.0, 2.0, 1.0],
    # Of the first two epochs.
    "val_loss": [3.5, 2.5],
    "loss_scale": [8.0, 4.0, 8.0],
    "skipped_steps": [1, 4, 4],
}


@pytest.mark.one_backend
def test_plot_loss_scale_draws_losses_scale_and_skipped_steps():
    history = keras.callbacks.History()
    history.history = LOGS
    for given in (LOGS, history):
        losses, scale, bars = plotting.plot_loss_scale(given).axes
        drawn = {line.get_label(): line for line in losses.get_lines()}
        assert texts_of(losses.get_legend().get_texts()) == ["loss", "val_loss"]
        for name, epochs in (("loss", [1, 2, 3]), ("val_loss", [1, 2])):
            assert list(drawn[name].get_xdata()) == epochs
            assert list(drawn[name].get_ydata()) == LOGS[name]
        assert losses.get_ylabel() == "loss"
        [(epochs, scales)] = lines_of(scale)
        assert (list(epochs), list(scales)) == ([1, 2, 3], LOGS["loss_scale"])
        assert labels_of(scale) == ("epoch", "loss scale")
        assert scale.get_yscale() == "log"
        assert scale.yaxis.get_transform().base == 2
        # In the middle of each epoch: what was skipped in it.
        middles = [bar.get_x() + bar.get_width() / 2 for bar in bars.patches]
        assert middles == pytest.approx([1, 2, 3])
        assert [bar.get_height() for bar in bars.patches] == [1, 3, 0]
        assert bars.get_ylabel() == "steps skipped in the epoch"
        assert bars.get_ylim() == (0, 9)
        # The line is not hidden by them.
        assert scale.get_zorder() > bars.get_zorder()
        assert not scale.patch.get_visible()


@pytest.mark.one_backend
def test_plot_loss_scale_draws_partial_history():
    [scale] = plotting.plot_loss_scale({"loss_scale": [8.0, 4.0]}).axes
    [(epochs, scales)] = lines_of(scale)
    assert (list(epochs), list(scales)) == ([1, 2], [8.0, 4.0])
    logs = {"loss_scale": [8.0, 8.0], "skipped_steps": [0, 1]}
    _, bars = plotting.plot_loss_scale(logs).axes
    assert [bar.get_height() for bar in bars.patches] == [0, 1]
    # One step that was skipped does not look like a disaster.
    assert bars.get_ylim() == (0, 4)


def make_record(outcomes="applied overflow applied spike applied", **columns):
    outcomes = np.array(outcomes.split())
    count = len(outcomes)
    return {
        "step": np.arange(7, 7 + count),
        "outcome": outcomes,
        "loss_scale": np.array([8.0, 8.0, 4.0, 4.0, 4.0][:count], "float32"),
        "gradient_norm": np.array([1.0, np.inf, 2.0, 90.0, 3.0][:count], "float32"),
        "learning_rate": np.linspace(0.5, 0.1, count).astype("float32"),
        "largest_gradient": np.full(count, np.nan, "float32"),
    } | columns


def lines_by_label(axis):
    """Returns the labelled lines, dicts of steps to numbers."""
    return {
        line.get_label(): dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axis.get_lines()
        if not line.get_label().startswith("_")
    }


@pytest.mark.one_backend
def test_plot_record_draws_four_panels():
    record = make_record()
    axes = norms, scales, rates, skipped = plotting.plot_record(record).axes
    steps = [7, 8, 9, 10, 11]
    for axis, name in ((norms, "gradient_norm"), (scales, "loss_scale")):
        line = axis.get_lines()[0]
        assert list(line.get_xdata()) == steps
        values = np.where(np.isinf(record[name]), np.nan, record[name])
        np.testing.assert_array_equal(line.get_ydata(), values)
        assert axis.get_ylabel() == name.replace("_", " ")
        assert axis.get_yscale() == "log"
    assert norms.yaxis.get_transform().base == 10
    assert scales.yaxis.get_transform().base == 2
    [(at, values)] = lines_of(rates)
    assert (list(at), list(values)) == (steps, list(record["learning_rate"]))
    assert rates.get_yscale() == "linear"
    assert rates.get_ylabel() == "learning rate"
    # Where they were, and how many so far.
    assert lines_by_label(norms) == {"spike": {10: 90.0}}
    assert lines_by_label(scales) == {"overflow": {8: 8.0}}
    assert lines_by_label(skipped) == {
        "overflow": dict(zip(steps, [0, 1, 1, 1, 1], strict=True)),
        "spike": dict(zip(steps, [0, 0, 0, 1, 1], strict=True)),
    }
    assert labels_of(skipped) == ("step", "skipped steps")
    assert skipped.get_ylim() == (0, 4)
    # A reason has one colour.
    of_reasons = {
        line.get_label(): line.get_color()
        for axis in (norms, scales)
        for line in axis.get_lines()[1:]
    }
    below = {line.get_label(): line.get_color() for line in skipped.get_lines()}
    assert of_reasons == below
    assert len({*below.values(), norms.get_lines()[0].get_color()}) == 3
    assert [axis.get_legend() is None for axis in axes] == [False, False, True, False]


@pytest.mark.one_backend
def test_plot_record_has_no_marks_without_skipped_steps():
    record = make_record("applied accumulated applied")
    norms, scales, _, skipped = plotting.plot_record(record).axes
    assert lines_by_label(norms) == lines_by_label(scales) == {}
    assert lines_by_label(skipped) == {"overflow": {7: 0, 8: 0, 9: 0}}
    assert norms.get_legend() is None


@pytest.mark.one_backend
def test_plot_record_draws_largest_gradient_and_rate_skips_if_present():
    largest = np.array([0.5, np.nan, 1.0, 1.5, 2.0], "float32")
    record = make_record("applied overflow rate rate applied", largest_gradient=largest)
    norms, *_, skipped = plotting.plot_record(record).axes
    found = list(lines_by_label(norms)["largest"].values())
    np.testing.assert_array_equal(found, largest)
    assert list(lines_by_label(skipped)["rate"].values()) == [0, 0, 1, 2, 2]


@pytest.mark.one_backend
@pytest.mark.parametrize("norm", [0.0, np.nan])
def test_plot_record_accepts_zero_and_nan_norms(norm):
    norms, *_ = plotting.plot_record(
        make_record("overflow", gradient_norm=np.array([norm]))
    ).axes
    assert norms.get_yscale() == "linear"


@pytest.mark.one_backend
@pytest.mark.parametrize("name", ["steps.csv", "steps.jsonl"])
def test_plot_record_draws_same_figure_from_file_and_history(name, tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, loss="mse")
    x = np.ones((6, 1), "float32")
    x[3] = np.inf
    callback = keras_lso.callbacks.StepRecord(tmp_path / name)
    told = {"batch_size": 1, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, x, callbacks=[callback], **told).history
    pictures = [
        plotting.plot_record(given)
        for given in (tmp_path / name, str(tmp_path / name), history["step_record"])
    ]
    for figure in pictures:
        assert list(figure.axes[0].get_lines()[0].get_xdata()) == [*range(1, 13)]
        overflows = lines_by_label(figure.axes[1])["overflow"]
        assert overflows == {4: 2.0**15, 10: 2.0**14}
        for axis, first in zip(figure.axes, pictures[0].axes, strict=True):
            pairs = zip(axis.get_lines(), first.get_lines(), strict=True)
            for one, other in pairs:
                # A file has decimal digits, which are read as float64.
                numbers = one.get_ydata(), other.get_ydata()
                np.testing.assert_allclose(*numbers, rtol=1e-7)


@pytest.mark.one_backend
def test_plot_trust_ratios_draws_median_and_range():
    snapshots = [{"a": 0.1, "b": 1.0}, {"a": 0.3, "b": 1.0}, {"a": 0.2}]
    [axis] = plotting.plot_trust_ratios(snapshots).axes
    [(medians, rows)] = lines_of(axis)
    assert (list(medians), list(rows)) == ([0.2, 1.0], [0, 1])
    segments = axis.collections[0].get_segments()
    assert [segment.tolist() for segment in segments] == [
        [[0.1, 0], [0.3, 0]],
        [[1.0, 1], [1.0, 1]],
    ]
    assert texts_of(axis.get_yticklabels()) == ["a", "b"]
    assert list(axis.get_yticks()) == [0, 1]
    # The first one is at the top.
    assert axis.get_ylim() == (1.5, -0.5)
    assert (axis.get_xlabel(), axis.get_xscale()) == ("trust ratio", "log")
    [(medians, _)] = lines_of(plotting.plot_trust_ratios({"a": 0.1, "b": 1.0}).axes[0])
    assert list(medians) == [0.1, 1.0]


def make_report(*values):
    scales = [2.0**i for i in range(0, 25, 4)]
    arrays = {f"layer {i}": np.array(v, "float32") for i, v in enumerate(values)}
    return UnderflowReport(
        scales, {n: counts_of([a], scales) for n, a in arrays.items()}
    )


# What stands for a share of 1. A smaller one is more transparent, by its square root.
BLUE, RED, GREEN = (to_rgb(color) for color in ("#0072B2", "#D55E00", "#009E73"))


def pale(color, share):
    return *color, np.sqrt(share)


@pytest.mark.one_backend
def test_underflow_plot_draws_underflow_blue_and_overflow_red():
    # At 2**0 the first is flushed, and of the second two in four; at 2**4 these are
    # subnormal, which counts half. The third overflows from 2**4 on.
    report = make_report([2.0**-25], [1.0, 2.0**-25, -(2.0**-26), 1.0], [1e4])
    [axis] = report.plot().axes
    image = axis.get_images()[0].get_array()
    assert image.shape == (3, 7, 4)
    np.testing.assert_allclose(image[0, :2], [pale(BLUE, 1), pale(BLUE, 1 / 2)])
    np.testing.assert_allclose(image[1, :2], [pale(BLUE, 1 / 2), pale(BLUE, 1 / 4)])
    np.testing.assert_allclose(image[2, 1:], [pale(RED, 1)] * 6)
    # Where nothing is lost, one sees the background.
    np.testing.assert_array_equal(image[[2, 0, 1], [0, 3, 3], 3], [0, 0, 0])
    # A half of the second one overflows at 2**16.
    np.testing.assert_allclose(image[1, 4:], [pale(RED, 1 / 2)] * 3)
    # Where values are lost at both ends, both colours are mixed, and lie on each other.
    [axis] = make_report([2.0**-40, 1e9]).plot().axes
    mixed = [*np.mean([BLUE, RED], axis=0), 1 - (1 - np.sqrt(1 / 2)) ** 2]
    np.testing.assert_allclose(axis.get_images()[0].get_array()[0, 0], mixed)


@pytest.mark.one_backend
def test_underflow_plot_labels_layers_and_scales():
    figure = make_report([1.0], [1.0]).plot()
    [axis] = figure.axes
    assert texts_of(axis.get_yticklabels()) == ["layer 0", "layer 1"]
    assert list(axis.get_yticks()) == [0, 1]
    exponents = range(0, 25, 4)
    assert texts_of(axis.get_xticklabels()) == [f"$2^{{{i}}}$" for i in exponents]
    assert list(axis.get_xticks()) == [0, 1, 2, 3, 4, 5, 6]
    assert axis.get_xlabel() == "loss scale"
    [legend] = figure.legends
    colors = {
        text.get_text(): to_rgb(line.get_color())
        for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)
    }
    assert colors == {
        "flushed to zero, or subnormal (fainter)": BLUE,
        "overflow": RED,
        "safe for all layers": GREEN,
    }


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "values, ends",
    [
        # From 2**-25 to 2**2 of the first, to 2**13 of the second, in steps of 2**4.
        (([2.0**-29], [2.0**3]), (1.0, 13 / 4)),
        # Both of them end beyond the picture.
        (([2.0**-10],), (0.0, 6.0)),
        (([0.0],), (0.0, 6.0)),
        (([1e-9], [1e9]), None),
        (([np.inf],), None),
    ],
)
def test_underflow_plot_marks_safe_scales_with_bar(values, ends):
    [axis] = make_report(*values).plot().axes
    if ends is None:
        assert lines_of(axis) == []
        return
    [line] = axis.get_lines()
    # The largest float16 is 65504, not 2**16: less by 0.0002 of such steps.
    assert list(line.get_xdata()) == pytest.approx(ends, abs=3e-4)
    assert to_rgb(line.get_color()) == GREEN
    # The first row ends at -0.5.
    assert axis.get_ylim()[1] < line.get_ydata()[0] == line.get_ydata()[1] < -0.5


@pytest.mark.one_backend
def test_saved_plot_is_identical_to_returned_figure(tmp_path):
    figure = make_report([1e-9], [1.0], [1e4]).plot(tmp_path / "underflow.png")
    figure.savefig(tmp_path / "again.png")
    saved, again = (
        matplotlib.image.imread(tmp_path / name)
        for name in ("underflow.png", "again.png")
    )
    np.testing.assert_array_equal(saved, again)


TABLE = """
                  flushed  flushed  subnormal  overflow
 layer    median  at 2**0  at 2**8    at 2**8   at 2**8      safe scales
 -----------------------------------------------------------------------
 layer 0   6e-08                       100.0%             2**-1 to 2**39
 layer 1   1e+00    50.0%    <0.1%      49.9%              2**2 to 2**15
 layer 2   2e+01                                         2**-29 to 2**11

Safe for all layers: 2**2 to 2**11. Recommended initial_scale: 2**10."""


@pytest.mark.one_backend
def test_underflow_report_prints_shares_at_one_and_recommended_scale():
    # Of 2000 values, 1000 are flushed at 1, and the last one at 2**8 as well. That is
    # the one of the report's scales that comes next to 2**10.
    mixed = [1.0] * 1001 + [2.0**-25] * 899 + [2.0**-27] * 99 + [2.0**-40]
    report = make_report([2.0**-24], mixed, [16.0] * 9 + [17.0])
    assert str(report) == TABLE


@pytest.mark.one_backend
def test_underflow_report_prints_overflow_shares():
    *_, row, _, _ = str(make_report([1.0, 1.0, 1.0, 1e9])).splitlines()
    assert row.split() == ["layer", "0", "1e+00", "25.0%", "2**-25", "to", "2**-14"]


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "values, safe, scale",
    [
        (([1e-9], [1e9]), "No scale is safe.", "2**-14"),
        (([0.0],), "Safe for all layers: any.", "2**15"),
    ],
)
def test_underflow_report_states_scales_safe_for_all_layers(values, safe, scale):
    last = str(make_report(*values)).splitlines()[-1]
    assert last == f"{safe} Recommended initial_scale: {scale}."


@pytest.mark.one_backend
def test_underflow_report_recommends_no_scale_for_non_finite_gradients():
    last = str(make_report([1.0], [1.0, np.nan])).splitlines()[-1]
    assert last == (
        "The gradients contain inf or NaN in float32 already: first look for their "
        "source."
    )


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: plotting.plot_schedule(0.1, 5), "`schedules` must be"),
        (lambda: plotting.plot_schedule([], 5), "`schedules` must be"),
        (lambda: plotting.plot_schedule(WARMUP, 1), "`steps` must be"),
        (lambda: plotting.plot_schedule(WARMUP, 9.5), "`steps` must be"),
        (lambda: plotting.plot_loss_scale({"loss": [1.0]}), "LossScaleMonitor"),
        (lambda: plotting.plot_loss_scale(None), "LossScaleMonitor"),
        (lambda: plotting.plot_record([]), "`record` must be"),
        (lambda: plotting.plot_record(LOGS), "`record` must be"),
        (lambda: plotting.plot_record(3), "`record` must be"),
        (lambda: plotting.plot_record("steps.txt"), "must end with"),
        (lambda: plotting.plot_record(make_record("")), "has no steps. Train first"),
        (lambda: plotting.plot_trust_ratios([]), "`ratios` must be"),
        (lambda: plotting.plot_trust_ratios([0.1]), "`ratios` must be"),
    ],
)
def test_plot_functions_reject_invalid_arguments(draw, message):
    with pytest.raises((ValueError, TypeError), match=message):
        draw()


@pytest.mark.one_backend
def test_missing_matplotlib_error_names_extra_to_install(monkeypatch):
    import_ = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return import_(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r'pip install "keras-lso\[plot\]"'):
        plotting.plot_trust_ratios({"a": 1.0})
