"""The figures show their numbers, and the errors name what is missing."""

import builtins

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import plotting

pytest.importorskip("matplotlib")
import matplotlib
import matplotlib.style

matplotlib.use("Agg")


def lines_of(axis):
    return [(line.get_xdata(), line.get_ydata()) for line in axis.get_lines()]


def texts_of(texts):
    return [text.get_text() for text in texts]


def labels_of(axis):
    return axis.get_xlabel(), axis.get_ylabel()


LOGS = {
    "loss": [3.0, 2.0, 1.0],
    # Of the first two epochs.
    "val_loss": [3.5, 2.5],
    "loss_scale": [8.0, 4.0, 8.0],
    "skipped_steps": [1, 4, 4],
}


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
        # A bar in the middle of each epoch, for the steps that it skipped.
        middles = [bar.get_x() + bar.get_width() / 2 for bar in bars.patches]
        assert middles == pytest.approx([1, 2, 3])
        assert [bar.get_height() for bar in bars.patches] == [1, 3, 0]
        assert bars.get_ylabel() == "steps skipped in the epoch"
        assert bars.get_ylim() == (0, 9)
        # The bars do not hide the line.
        assert scale.get_zorder() > bars.get_zorder()
        assert not scale.patch.get_visible()


def test_plot_loss_scale_says_in_how_many_epochs_the_loss_is_not_finite():
    logs = LOGS | {"loss": [np.nan, 2.0, np.inf]}
    losses, *_ = plotting.plot_loss_scale(logs).axes
    texts = texts_of(losses.get_legend().get_texts())
    assert texts == ["loss: NaN or inf in 2 of 3 epochs", "val_loss"]
    line = losses.get_lines()[0]
    np.testing.assert_array_equal(line.get_ydata(), [np.nan, 2.0, np.nan])
    # A line through one point is not seen.
    assert line.get_marker() == "."
    assert len(losses.get_yticks())
    # A bad batch in each epoch: no number, and no axis that looks as if there were.
    logs = {"loss": [np.nan] * 3, "loss_scale": LOGS["loss_scale"]}
    losses, _ = plotting.plot_loss_scale(logs).axes
    [text] = texts_of(losses.get_legend().get_texts())
    assert text == "loss: NaN or inf in 3 of 3 epochs"
    assert not len(losses.get_yticks())


def test_plot_loss_scale_draws_partial_history():
    [scale] = plotting.plot_loss_scale({"loss_scale": [8.0, 4.0]}).axes
    [(epochs, scales)] = lines_of(scale)
    assert (list(epochs), list(scales)) == ([1, 2], [8.0, 4.0])
    logs = {"loss_scale": [8.0, 8.0], "skipped_steps": [0, 1]}
    _, bars = plotting.plot_loss_scale(logs).axes
    assert [bar.get_height() for bar in bars.patches] == [0, 1]
    # One skipped step has a low bar.
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
    assert rates.get_yscale() == "linear" and rates.get_ylim()[0] == 0.0
    assert rates.get_ylabel() == "learning rate"
    # The skipped steps, and their number so far.
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


def test_plot_record_draws_largest_gradient_and_rate_skips_if_present():
    largest = np.array([0.5, np.nan, 1.0, 1.5, 2.0], "float32")
    record = make_record("applied overflow rate rate applied", largest_gradient=largest)
    norms, *_, skipped = plotting.plot_record(record).axes
    found = list(lines_by_label(norms)["largest"].values())
    np.testing.assert_array_equal(found, largest)
    assert list(lines_by_label(skipped)["rate"].values()) == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("norm", [0.0, np.nan])
def test_plot_record_accepts_zero_and_nan_norms(norm):
    norms, *_ = plotting.plot_record(
        make_record("overflow", gradient_norm=np.array([norm]))
    ).axes
    assert norms.get_yscale() == "linear"


def test_plot_record_draws_same_figure_from_file_and_history(tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, loss="mse")
    x = np.ones((6, 1), "float32")
    x[3] = np.inf
    path = tmp_path / "steps.jsonl"
    callback = keras_lso.callbacks.StepRecord(path)
    told = {"batch_size": 1, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, x, callbacks=[callback], **told).history
    pictures = [
        plotting.plot_record(given)
        for given in (path, str(path), history["step_record"])
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


@pytest.mark.parametrize(
    "draw, message",
    [
        (lambda: plotting.plot_loss_scale({"loss": [1.0]}), "LossScaleMonitor"),
        (lambda: plotting.plot_loss_scale(None), "LossScaleMonitor"),
        (lambda: plotting.plot_record([]), "`record` must be"),
        (lambda: plotting.plot_record(LOGS), "`record` must be"),
        (lambda: plotting.plot_record(3), "`record` must be"),
        (lambda: plotting.plot_record("steps.txt"), "must end with"),
        (lambda: plotting.plot_record(make_record("")), "has no steps. Train first"),
    ],
)
def test_plot_functions_reject_invalid_arguments(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_missing_matplotlib_error_names_extra_to_install(monkeypatch):
    import_ = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return import_(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r'pip install "keras-lso\[plot\]"'):
        plotting.plot_loss_scale(LOGS)
