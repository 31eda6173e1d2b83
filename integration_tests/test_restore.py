"""`LossScaleMonitor(on_stall="restore")`: a run that stalls continues."""

import copy
import pickle
import re
import warnings

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import callbacks, schedules

BACKEND = keras.backend.backend()
# Every 25 steps. On TensorFlow the first step builds the optimizer, and can be copied.
COPIED = (26, 51) if BACKEND == "tensorflow" else (25, 50)
BATCHES, SIZE = 150, 2
# From the 61st batch on 21 overflow at any scale, until the run goes back: two of them
# reach the lowest scale. Later ones would spoil the statistics again.
BAD = slice(60, 81)


def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCHES, SIZE, 4)).astype("float32")
    y = x.sum(-1, keepdims=True)
    x[BAD] = np.inf
    return x, y


def make_model(
    rate=2.0**-6,
    dtype="float32",
    kinds=None,
    normalization=True,
    units=8,
    **arguments,
):
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((4,), dtype="float32"),
        keras.layers.Dense(units, activation="relu", dtype=dtype, name="first"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1, dtype=dtype),
    ]
    model = keras.Sequential(layers if normalization else layers[:2] + layers[3:])
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(rate), initial_scale=2.0**-12, **(kinds or {})
    )
    model.compile(optimizer, loss="mse", **arguments)
    return model


def monitor(**arguments):
    arguments = {"patience": 10, "keep_every": 25, "on_stall": "restore"} | arguments
    return callbacks.LossScaleMonitor(**arguments)


def fit(model, x, y, *with_callbacks, warned=None, about="stalled"):
    """Returns the history, and a list of the warnings of stalls, `warned` if given."""
    x, y = (a.reshape(-1, a.shape[-1]) for a in (x, y))
    arguments = {"batch_size": SIZE, "shuffle": False, "verbose": 0}
    warned = [] if warned is None else warned
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            history = model.fit(x, y, callbacks=list(with_callbacks), **arguments)
        finally:
            warned += [str(w.message) for w in caught if about in str(w.message)]
    return history, warned


def values_of(model):
    optimizer = model.optimizer
    variables = [*model.weights, *optimizer._in_memory]
    return [keras.ops.convert_to_numpy(v) for v in variables]


def halve(model):
    optimizer = model.optimizer.inner_optimizer
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        rate.assign(rate * 0.5)
    else:
        optimizer.learning_rate = schedules.Scaled(rate, 0.5)
    model.make_train_function(force=True)


def train_and_restart(model, other):
    """Trains a run that stalls and goes on, and the same run restarted by hand."""
    x, y = data()
    record = callbacks.StepRecord()
    history, warned = fit(model, x, y, monitor(), record)
    [recorded] = history.history["step_record"]
    steps = np.array(recorded["step"])
    [at] = np.flatnonzero(np.diff(steps) < 0) + 1
    first = steps[at]
    fit(other, x[: first - 1], y[: first - 1])
    halve(other)
    fit(other, x[at:], y[at:])
    return warned, first, at


MODES = [
    {"jit_compile": False},
    {"jit_compile": True},
    {"jit_compile": True, "steps_per_execution": 5},
]
MODELS = {
    "a number": {},
    "a schedule": {"rate": schedules.WarmupCosine(2.0**-6, 10, 200)},
    "float16, masters": {"dtype": "float16", "kinds": {"master_weights": "float32"}},
    "bfloat16, remainders": {
        "dtype": "bfloat16",
        "kinds": {"master_weights": "remainder"},
    },
    "narrow slots": {"kinds": {"slot_dtype": "bfloat16"}},
    "slots in 8 bits": {"kinds": {"slot_dtype": "int8"}, "units": 1024},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(map(str, m.values())))
@pytest.mark.parametrize("arguments", MODELS.values(), ids=MODELS)
def test_restored_run_matches_run_restarted_by_hand(arguments, mode):
    if BACKEND == "torch":
        # `torch.compile` takes a minute, and there is a step at a time.
        mode = {}
    model, other = (make_model(**arguments, **mode) for _ in "ab")
    warned, first, at = train_and_restart(model, other)
    assert len(warned) == 1 and "retry 1 of 3" in warned[0]
    assert f"from the weights after step {first - 1}," in warned[0]
    assert BAD.start - 25 < first - 1 < BAD.start < at
    assert all(np.isfinite(value).all() for value in values_of(model))
    for found, right in zip(values_of(model), values_of(other), strict=True):
        np.testing.assert_array_equal(found, right)


def test_stalled_run_with_guarded_optimizer_is_restored():
    """Its loss scale is the lowest from the first step on."""
    x, y = data()
    x[BAD] = 1.0
    x[60:71] = np.inf
    model = make_model()
    inner = keras.optimizers.Adam(0.01)
    model.compile(keras_lso.GuardedOptimizer(inner), loss="mse")
    _, warned = fit(model, x, y, monitor())
    assert len(warned) == 1 and f"from the weights after step {COPIED[1]}," in warned[0]
    assert all(np.isfinite(value).all() for value in values_of(model))


def test_restore_leaves_record_of_overflows_that_user_has_started():
    model = make_model()
    model.optimizer.build(model.trainable_variables)
    model.optimizer.record_overflows()
    _, warned = fit(model, *data(), monitor())
    assert len(warned) == 1 and "retry 1" in warned[0]
    assert model.optimizer.overflowed_variables() == []


class Poison(keras.callbacks.Callback):
    """Makes the last kernel NaN, once, before a batch of the first epoch."""

    def __init__(self, batch):
        super().__init__()
        self.left = batch + 1

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            kernel = self.model.layers[-1].kernel
            kernel.assign(kernel * np.nan)


class Weights(keras.callbacks.Callback):
    """Keeps the weights before each batch, by epoch and batch."""

    def on_train_begin(self, logs=None):
        self.kept = {}

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.kept[self.epoch, batch] = np.concatenate(
            [w.ravel() for w in self.model.get_weights()]
        )


def fit_poisoned(batch, epochs, *with_callbacks, after=(), **arguments):
    """Trains 21 batches an epoch with averages; returns the model and the warnings.

    The callbacks `after` are called after the monitor.
    """
    x, y = (np.ones((42, n), "float32") for n in (4, 1))
    model = make_model(normalization=False)
    inner = keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.9)
    model.compile(keras_lso.GuardedOptimizer(inner), loss="mse")
    watching = monitor(patience=5, keep_every=4, **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(
            x,
            y,
            batch_size=2,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[Poison(batch), *with_callbacks, watching, *after],
        )
    return model, [str(w.message) for w in caught if "stalled" in str(w.message)]


SWAPS = [callbacks.SwapEMAWeights, keras.callbacks.SwapEMAWeights]


@pytest.mark.parametrize("swap", SWAPS, ids=["keras_lso", "keras"])
# The monitor finds the stall in an epoch, before its last batch, or at its end.
@pytest.mark.parametrize("batch", [9, 12, 15, 16])
def test_swapped_weights_of_epoch_end_do_not_undo_restore(batch, swap):
    weights = Weights()
    swap = swap(swap_on_epoch=True)
    model, warned = fit_poisoned(batch, 3, swap, after=[weights])
    assert len(warned) == 1
    kept = list(weights.kept.values())
    bad = [i for i, values in enumerate(kept) if not np.isfinite(values).all()]
    assert bad == list(range(batch, bad[-1] + 1))
    assert bad[-1] < 23 and len(kept) == 63
    copied = int(re.search(r"after step (\d+)", warned[0])[1])
    np.testing.assert_array_equal(kept[bad[-1] + 1], kept[copied])
    assert all(np.isfinite(value).all() for value in values_of(model))


def always_bad():
    x, y = data()
    x[BAD.start :] = np.inf
    return x, y


@pytest.mark.parametrize(
    "retries, keep, message",
    [
        (0, 2, "because `retries` is 0"),
        (1, 2, "Restoring a copy once did not help"),
        (2, 2, "Restoring a copy 2 times did not help"),
        (2, 1, "Restoring a copy 2 times did not help"),
    ],
)
def test_run_that_stalls_after_last_retry_raises(retries, keep, message):
    x, y = (np.concatenate([a, a[BAD.start :]]) for a in always_bad())
    model, warned = make_model(), []
    with pytest.raises(FloatingPointError) as error:
        fit(model, x, y, monitor(retries=retries, keep=keep), warned=warned)
    assert message in " ".join(str(error.value).split())
    # The second time to the copy before, if it was kept.
    for step, text in zip((COPIED[1], COPIED[-keep]), warned, strict=False):
        assert f"after step {step}," in text
    assert len(warned) == retries
    rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    assert rate == 2.0**-6 / 2**retries


def test_stall_without_copy_raises():
    x, y = data()
    x[:] = np.inf
    model = make_model()
    for layer in model.layers[:1]:
        layer.set_weights([w * np.nan for w in layer.get_weights()])
    with pytest.raises(FloatingPointError, match="There is no copy"):
        fit(model, x, y, monitor())


class SpoiledStatistics(keras.callbacks.Callback):
    """Makes the statistics of a batch normalization NaN."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 50:
            mean = self.model.layers[1].moving_mean
            mean.assign(mean * np.nan)


def test_non_finite_copy_is_not_kept():
    """The statistics of a batch normalization are inf before its gradients are."""
    x, y = data()
    model = make_model()
    _, warned = fit(model, x, y, SpoiledStatistics(), monitor())
    assert f"from the weights after step {COPIED[0]}," in warned[0]
    assert all(np.isfinite(value).all() for value in values_of(model))


def test_monitor_saves_bad_batch(tmp_path):
    x, y = data()
    x[BAD.start, 0, 0] = np.nan
    path = tmp_path / "runs" / "bad.npz"
    model, record = make_model(), callbacks.StepRecord()
    fit(model, x, y, monitor(save_bad_batch=path), record)
    with np.load(path) as saved:
        # The scale falls twice, at the 61st and the 62nd step, to its lowest value.
        assert saved["step"] == BAD.start + 3
        np.testing.assert_array_equal(saved["x"], x[BAD.start + 2])
        np.testing.assert_array_equal(saved["y"], y[BAD.start + 2])
        paths = {v.path for v in model.trainable_variables}
        assert set(saved["variables"]) <= paths and len(saved["variables"]) > 2
    assert "watched" not in repr(model.train_function)


def test_rate_that_cannot_be_scaled_is_rejected_before_training():
    model = make_model(rate=lambda: 0.1)
    with pytest.raises(ValueError, match="subclass of `LearningRateSchedule`"):
        fit(model, *data(), monitor())
    fit(make_model(rate=lambda: 0.1), *data(), monitor(learning_rate_factor=1.0))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="the others show any batch")
def test_save_bad_batch_with_several_steps_per_execution_is_rejected(tmp_path):
    model = make_model(steps_per_execution=5)
    with pytest.raises(ValueError, match="needs `steps_per_execution=1`"):
        fit(model, *data(), monitor(save_bad_batch=tmp_path / "bad.npz"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"patience": 0}, "patience"),
        ({"on_stall": "restart"}, "on_stall.*'restore'"),
        ({"keep_every": 0}, "keep_every"),
        ({"keep": 1.5}, "keep"),
        ({"learning_rate_factor": 0.0}, "learning_rate_factor"),
        ({"learning_rate_factor": 2.0}, "learning_rate_factor"),
        ({"retries": -1}, "retries"),
        ({"save_bad_batch": "bad.npy"}, "end with|ends with"),
    ],
)
def test_monitor_rejects_invalid_arguments(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        callbacks.LossScaleMonitor(**arguments)


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_run_that_is_restored_at_its_end_ends_with_averages(swap_on_epoch):
    swap = callbacks.SwapEMAWeights(swap_on_epoch)
    model, warned = fit_poisoned(14, 1, swap)
    assert "from the weights after step" in warned[0]
    averages = model.optimizer.inner_optimizer._model_variables_moving_average
    for weight, average in zip(model.trainable_weights, averages, strict=True):
        found, right = map(keras.ops.convert_to_numpy, (weight, average))
        np.testing.assert_array_equal(found, right)
        assert np.isfinite(found).all()


def test_copied_and_pickled_monitor_restores_stalled_run(tmp_path):
    watching = monitor(save_bad_batch=tmp_path / "bad.npz")
    fit(make_model(), *data(), watching)
    for copied in (copy.deepcopy(watching), pickle.loads(pickle.dumps(watching))):
        _, warned = fit(make_model(), *data(), copied)
        assert len(warned) == 1
