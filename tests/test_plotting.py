"""Pictures show the numbers that they are made of, and say what is missing."""

import builtins

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import plotting
from keras_lso.underflow import UnderflowReport
from keras_lso.underflow_counts import counts_of

pytest.importorskip("matplotlib")
import matplotlib  # noqa: E402

matplotlib.use("Agg")

WARMUP = keras_lso.schedules.LinearWarmup(0.5, 4, 0.0)


def lines_of(axis):
    return [(line.get_xdata(), line.get_ydata()) for line in axis.get_lines()]


def test_a_schedule_is_drawn_step_by_step():
    figure = plotting.plot_schedule(WARMUP, steps=6)
    [(steps, rates)] = lines_of(figure.axes[0])
    assert list(steps) == [0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(rates, [float(WARMUP(i)) for i in range(6)], rtol=1e-6)
    assert figure.axes[0].get_legend() is None


def test_a_long_schedule_is_drawn_from_its_first_step_to_its_last():
    steps = lines_of(plotting.plot_schedule(WARMUP, np.int64(3)).axes[0])[0][0]
    assert list(steps) == [0, 1, 2]
    [(steps, _)] = lines_of(plotting.plot_schedule(WARMUP, steps=123_456).axes[0])
    assert (steps[0], steps[-1]) == (0, 123_455)
    assert len(steps) <= 1000


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
def test_several_schedules_are_told_apart(schedules, labels):
    axis = plotting.plot_schedule(schedules, steps=5).axes[0]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == labels
    assert len({line.get_color() for line in axis.get_lines()}) == 2


def test_a_history_is_drawn():
    logs = {"loss": [3.0, 2.0, 1.0], "loss_scale": [8.0, 4.0, 8.0]}
    logs["skipped_steps"] = [1, 4, 4]
    history = keras.callbacks.History()
    history.history = logs
    for given in (logs, history):
        figure = plotting.plot_loss_scale(given)
        above, below, bars = figure.axes
        assert list(lines_of(above)[0][1]) == logs["loss"]
        assert list(lines_of(below)[0][1]) == logs["loss_scale"]
        assert [bar.get_height() for bar in bars.patches] == [1, 3, 0]


def test_ratios_are_drawn_by_their_median_and_range():
    snapshots = [{"a": 0.1, "b": 1.0}, {"a": 0.3, "b": 1.0}, {"a": 0.2}]
    [axis] = plotting.plot_trust_ratios(snapshots).axes
    [(medians, rows)] = lines_of(axis)
    assert (list(medians), list(rows)) == ([0.2, 1.0], [0, 1])
    segments = axis.collections[0].get_segments()
    assert [segment[:, 0].tolist() for segment in segments] == [[0.1, 0.3], [1.0, 1.0]]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b"]


def make_report(*values):
    scales = [2.0**i for i in range(0, 25, 4)]
    arrays = {f"layer {i}": np.array(v, "float32") for i, v in enumerate(values)}
    return UnderflowReport(
        scales, {n: counts_of([a], scales) for n, a in arrays.items()}
    )


def test_underflow_is_blue_and_overflow_is_red(tmp_path):
    report = make_report([1e-9], [1.0], [1e4])
    path = tmp_path / "underflow.png"
    [axis] = report.plot(path).axes
    image = axis.get_images()[0].get_array()
    assert image.shape == (3, 7, 3)
    flushed, fine, overflowing = image[0, 0], image[1, 0], image[2, -1]
    assert flushed[2] > flushed[0] + 0.5
    assert list(fine) == [1, 1, 1]
    assert overflowing[0] > overflowing[2] + 0.5
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("values", [([1e-9], [1e9]), ([np.inf],), ([0.0],)])
def test_a_report_is_drawn_and_printed_whatever_it_says(values):
    report = make_report(*values)
    report.plot()
    assert "layer 0" in str(report)


@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: plotting.plot_schedule(0.1, 5), "`schedules` must be"),
        (lambda: plotting.plot_schedule([], 5), "`schedules` must be"),
        (lambda: plotting.plot_schedule(WARMUP, 1), "`steps` must be"),
        (lambda: plotting.plot_schedule(WARMUP, 9.5), "`steps` must be"),
        (lambda: plotting.plot_loss_scale({"loss": [1.0]}), "LossScaleMonitor"),
        (lambda: plotting.plot_loss_scale(None), "LossScaleMonitor"),
        (lambda: plotting.plot_trust_ratios([]), "`ratios` must be"),
        (lambda: plotting.plot_trust_ratios([0.1]), "`ratios` must be"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, message):
    with pytest.raises((ValueError, TypeError), match=message):
        draw()


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    import_ = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return import_(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r'pip install "keras-lso\[plot\]"'):
        plotting.plot_trust_ratios({"a": 1.0})
