"""`LossScaleMonitor` in `fit`, and `record_overflows` in a custom loop."""

import sys
import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.callbacks import LossScaleMonitor
from testing.events import events_in
from testing.schedules import UntilStepTwo
from testing.trained_optimizers import saved


def compile_model(model, **arguments):
    inner = keras.optimizers.SGD(0.01, momentum=0.5)
    model.compile(keras_lso.LossScaleOptimizer(inner, **arguments), loss="mse")
    return model


def make_two_branches():
    """Two networks in one: overflows of one do not reach the other."""
    inputs = [keras.Input((4,), name="a"), keras.Input((4,), name="b")]
    outputs = []
    for branch, x in zip("ab", inputs, strict=True):
        x = keras.layers.Dense(3, name=f"hidden_{branch}")(x)
        x = keras.layers.BatchNormalization(name=f"norm_{branch}")(x)
        outputs.append(keras.layers.Dense(1, name=f"output_{branch}")(x))
    return keras.Model(inputs, outputs)


# TensorFlow would trace each of these models twice, the second time to locate the
# overflows. The first of these tests lets it.
EAGERLY_ON_TENSORFLOW = {"run_eagerly": keras.backend.backend() == "tensorflow"}


def fit_two_branches(
    monitor, batches, mode=EAGERLY_ON_TENSORFLOW, others=(), **arguments
):
    """Trains where branch b overflows at any scale; returns model and history."""
    model = make_two_branches()
    inner = keras.optimizers.SGD(0.01)
    # One overflow from the lowest scale.
    optimizer = keras_lso.LossScaleOptimizer(inner, initial_scale=2.0**-13)
    model.compile(optimizer, loss=["mse", "mse"], **mode)
    x = [np.ones((4 * batches, 4), "float32") for _ in range(2)]
    x[1][:] = np.inf
    y = [np.ones((4 * batches, 1), "float32") for _ in range(2)]
    callbacks = [*others, monitor]
    history = model.fit(
        x, y, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks, **arguments
    )
    return model, history


def test_history_and_progress_bar_show_loss_scale_and_skipped_steps(
    make_model, data, with_overflows, capsys
):
    x, y = data
    model = compile_model(make_model(), initial_scale=1024.0)
    history = model.fit(
        with_overflows(x, [1, 3]),
        y,
        batch_size=8,
        shuffle=False,
        epochs=2,
        verbose=2,
        callbacks=[LossScaleMonitor()],
    )
    assert history.history["loss_scale"] == [256.0, 64.0]
    assert history.history["skipped_steps"] == [2, 4]
    printed = capsys.readouterr().out
    assert "loss_scale: 256.0" in printed
    assert "skipped_steps: 4" in printed


def test_event_file_holds_loss_scale_and_skipped_steps(
    make_model, data, with_overflows, fit, tmp_path
):
    x, y = data
    model = compile_model(make_model(), initial_scale=1024.0)
    monitor = LossScaleMonitor(log_dir=tmp_path, patience=3)
    # Batches of 8: four steps an epoch. The third overflows.
    fit(model, with_overflows(x, [2]), y, epochs=2, callbacks=[monitor])
    events = events_in(tmp_path)
    scales = events["loss_scale"]
    # After every third step, and after each epoch of four.
    assert scales == [(3, 512.0), (4, 512.0), (6, 512.0), (8, 256.0)]
    skipped = events["skipped_steps"]
    assert skipped == [(3, 1.0), (4, 1.0), (6, 1.0), (8, 2.0)]
    monitor.on_epoch_end(2)  # A loop without `fit` has no logs.


STALLED = """\
Training has stalled. All steps since step 2 were skipped at the lowest loss
scale (6.10352e-05): the gradients are inf or NaN at any scale.
"""
GRADIENTS = """\
Layers whose gradients are not finite: hidden_b, norm_b, output_b.
"""
# What the forward pass wrote; weights are not touched.
VALUES = """\
Layers whose variables hold inf or NaN: norm_b.
"""
ADVICE = """\
Look for inf or NaN in the data, and for a layer that overflows in float16,
which `keras_lso.float16_report(model, x, y)` names. Without either the model
itself has diverged: go back to a checkpoint from before the stall, and lower
the learning rate or clip the gradients (`global_clipnorm` of the inner
optimizer)."""


def test_stall_warns_once_and_names_affected_layers():
    monitor = LossScaleMonitor(patience=3)
    with pytest.warns(UserWarning, match="Training has stalled") as caught:
        model, history = fit_two_branches(monitor, batches=16, mode={}, epochs=2)
    [warning] = [w for w in caught if "stalled" in str(w.message)]
    # The loss of branch b is NaN, and so is all that leads to it.
    assert str(warning.message) == STALLED + GRADIENTS + VALUES + ADVICE
    assert history.history["skipped_steps"] == [16, 32]
    assert not any(np.isnan(w).any() for w in model.optimizer.get_weights())


def test_stall_warning_is_printed_on_separate_lines(capsys, monkeypatch):
    # As outside of pytest, which records warnings to show them at the end.
    format_before = warnings.formatwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show_as_python_does)
        fit_two_branches(LossScaleMonitor(patience=3), batches=8)
    assert f"\n{STALLED}{GRADIENTS}{VALUES}{ADVICE}\n" in capsys.readouterr().err
    assert warnings.formatwarning is format_before


def show_as_python_does(message, category, filename, lineno, file=None, line=None):
    text = warnings.formatwarning(message, category, filename, lineno, line)
    print(text, file=sys.stderr, end="")


def test_stall_warning_names_at_most_three_layers():
    layers = [keras.layers.Dense(2, name=f"d{i}") for i in range(6)]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=2.0**-13
    )
    model.compile(optimizer, loss="mse", **EAGERLY_ON_TENSORFLOW)
    x, y = np.full((32, 4), np.inf, "float32"), np.zeros((32, 2), "float32")
    with pytest.warns(UserWarning, match="Training has stalled") as caught:
        monitor = LossScaleMonitor(patience=3)
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[monitor])
    [message] = [str(w.message) for w in caught if "stalled" in str(w.message)]
    words = " ".join(message.split())
    assert "gradients are not finite: net/d0, net/d1, net/d2 and 3 more. " in words
    assert "hold inf or NaN: none." in words


@pytest.mark.parametrize("on_stall", ["warn", "stop", "raise"])
@pytest.mark.parametrize("batches", [1, 4])
def test_stall_detected_at_end_of_epoch_names_layers_after_next_step(
    batches, on_stall, tmp_path
):
    path = tmp_path / "bad.npz"
    monitor = LossScaleMonitor(patience=3, on_stall=on_stall, save_bad_batch=path)
    error = FloatingPointError if on_stall == "raise" else UserWarning
    reported = pytest.raises if on_stall == "raise" else pytest.warns
    with reported(error, match="gradients are not finite: hidden_b, norm_b, output_b"):
        fit_two_branches(monitor, batches, epochs=5)
    with np.load(path) as saved:
        assert {name.split("/")[0] for name in saved["variables"]} >= {"hidden_b"}


RATES = """\
Training has stalled. All steps since step 3 were skipped.
The learning rate is nan at step 2, as `UntilStepTwo` computes it. A step with
such a number is skipped, whatever the gradients are, and the loss scale stays
as it is."""


@pytest.mark.parametrize("on_stall, steps", [("warn", 16), ("stop", 7)])
@pytest.mark.filterwarnings("ignore:The learning rate")
def test_non_finite_learning_rate_warns_once(on_stall, steps, make_model, data, fit):
    inner = keras.optimizers.SGD(UntilStepTwo())
    model = make_model()
    model.compile(keras_lso.LossScaleOptimizer(inner, initial_scale=8.0), loss="mse")
    # Batches of 8: four steps an epoch.
    monitor = LossScaleMonitor(patience=3, on_stall=on_stall)
    with pytest.warns(UserWarning, match="Training has stalled") as caught:
        fit(model, *data, epochs=4, callbacks=[monitor])
    [message] = [str(w.message) for w in caught if "stalled" in str(w.message)]
    assert message.startswith(RATES)
    assert "layers" not in message.lower()
    optimizer = model.optimizer
    assert int(optimizer.iterations) == 2
    assert int(optimizer.skipped_steps) == steps - 2
    # Nothing looks at single gradients: they are finite.
    assert optimizer.variables[-1].path.endswith("consecutive_skips")


def test_monitor_rejects_other_optimizers(make_model, data, fit):
    model = make_model()
    model.compile(keras.optimizers.SGD(0.01), loss="mse")
    with pytest.raises(ValueError, match="This model has Keras's own, which"):
        fit(model, *data, callbacks=[LossScaleMonitor()])
    model = make_model("float32")
    model.compile(keras.optimizers.SGD(0.01), loss="mse")
    with pytest.raises(ValueError, match="compiled with a keras_lso.GuardedOpt"):
        fit(model, *data, callbacks=[LossScaleMonitor()])


def test_overflowed_variables_reports_only_last_step():
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    variables = [keras.Variable([1.0], name=name) for name in "abc"]
    with pytest.raises(ValueError, match="must be built"):
        optimizer.record_overflows()
    optimizer.build(variables)
    with pytest.raises(ValueError, match="only after"):
        optimizer.overflowed_variables()
    optimizer.record_overflows()
    assert optimizer.overflowed_variables() == []
    finite, bad = ops.array([1.0]), ops.array([np.nan])
    with pytest.warns(UserWarning, match="do not exist"):
        optimizer.apply([finite, None, bad], variables)
    assert [v.name for v in optimizer.overflowed_variables()] == ["c"]
    optimizer.apply([bad, bad], [variables[1], variables[0]])
    assert [v.name for v in optimizer.overflowed_variables()] == ["a", "b"]
    optimizer.apply([bad], [variables[1]])
    assert [v.name for v in optimizer.overflowed_variables()] == ["b"]
    optimizer.apply([finite] * 3, variables)
    assert optimizer.overflowed_variables() == []
    optimizer.apply([bad] * 3, variables)
    with pytest.warns(UserWarning, match="All gradients.*forward pass.*float16_report"):
        assert optimizer.overflowed_variables() == variables
    # It is a part of no file.
    assert len(saved(optimizer)) == len(optimizer.variables) - 2


def test_stall_detected_only_at_end_of_run_warns():
    with pytest.warns(UserWarning, match="Training has stalled") as caught:
        fit_two_branches(LossScaleMonitor(patience=3), batches=4)
    [warning] = [w for w in caught if "stalled" in str(w.message)]
    assert str(warning.message) == STALLED + VALUES + ADVICE


class Shown(keras.callbacks.Callback):
    """Keeps what the progress bar shows of each epoch."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))


def test_skipped_steps_are_shown_once_there_is_one_and_always_in_history():
    model = compile_model(keras.Sequential([keras.layers.Dense(1)]), initial_scale=8.0)
    x, shown = np.ones((4, 2), "float32"), Shown()
    callbacks = [LossScaleMonitor(), shown]
    history = model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=callbacks)
    assert history.history["skipped_steps"] == [0, 0]
    assert all("skipped_steps" not in logs for logs in shown.logs)
    history = model.fit(x * np.inf, x[:, :1], verbose=0, callbacks=callbacks)
    assert history.history["skipped_steps"] == [shown.logs[-1]["skipped_steps"]] == [1]
