"""Training that stops and goes on: from our files, Keras's, and the bare optimizer's.

- A run that was saved and resumed equals one that was never interrupted, bit for
  bit, through `.keras` and through `.weights.h5`.
- A file written with `keras.optimizers.LossScaleOptimizer` goes on here with its
  whole state, and `.weights.h5` files go both ways.
- A run of the bare inner optimizer, in float32 say, goes on with loss scaling.
- On TensorFlow the same holds for `tf.train.Checkpoint`.

Every run has a batch whose gradients overflow, once an epoch. What the files hold is
compared in `test_serialization.py`.
"""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_lso
from keras_lso import LossScaleOptimizer
from keras_lso.loss_scales import DynamicLossScale, LogMaxLossScale

BATCHES = 4


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def momentum_sgd(**options):
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def new_model(optimizer, dtype="mixed_float16"):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, activation="tanh", dtype=dtype),
            layers.Dense(2, dtype=dtype),
        ]
    )
    model.compile(optimizer, loss="mean_squared_error")
    return model


def built_model(optimizer, dtype="mixed_float16"):
    """A file's optimizer state needs variables to go to."""
    model = new_model(optimizer, dtype)
    optimizer.build(model.trainable_variables)
    return model


def fit(model, epochs, initial_epoch=0, overflows=True, callbacks=()):
    """Always the same batches in the same order; the second overflows."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(4 * BATCHES, 4)).astype("float32")
    y = numbers.normal(size=(4 * BATCHES, 2)).astype("float32")
    if overflows:
        x[4, 0] = np.inf
    model.fit(
        x,
        y,
        batch_size=4,
        epochs=epochs,
        initial_epoch=initial_epoch,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model


def state(optimizer):
    return [v.numpy() for v in optimizer.variables]


def assert_same(actual, expected):
    """Bit for bit: NaN equals NaN, and 0.0 does not equal -0.0."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def assert_close(actual, expected):
    """Within 1e-6 of each tensor's largest magnitude.

    Where an optimizer has a fast path, the wrapped and the bare one round
    differently.
    """
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


# --- Interrupted and not ----------------------------------------------------


def decaying_adam():
    return keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=3, decay_rate=0.5)
    )


# Three finite steps and an overflow an epoch, and a file after two epochs.
RUNS = {
    # The first step after the file is the third of a streak: the scale grows.
    "default": lambda: LossScaleOptimizer(
        momentum_sgd(), initial_scale=2.0**10, dynamic_growth_steps=3
    ),
    # Two of the four overflows of the budget are spent before, two after.
    "hysteresis": lambda: LossScaleOptimizer(
        decaying_adam(), loss_scale=DynamicLossScale(2.0**10, 50, hysteresis=4)
    ),
    # Six steps are a whole number of windows of two, but not of four.
    "accumulation": lambda: LossScaleOptimizer(
        momentum_sgd(gradient_accumulation_steps=4), dynamic_growth_steps=2
    ),
    "EMA": lambda: LossScaleOptimizer(
        momentum_sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=4)
    ),
    # Its averages are in the middle of things.
    "LogMax": lambda: LossScaleOptimizer(
        momentum_sgd(), loss_scale=LogMaxLossScale(beta1=0.5, beta2=0.75)
    ),
}


class SaveDuringFit(keras.callbacks.Callback):
    """Saves in the middle of a run that goes on as if nothing had happened."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            self.model.save(self.folder / "run.keras")
            self.model.save_weights(self.folder / "run.weights.h5")
            self.steps = int(self.model.optimizer.iterations)


def from_keras_file(folder, run, dtype):
    return keras.saving.load_model(folder / "run.keras")


def from_weights_file(folder, run, dtype):
    model = built_model(RUNS[run](), dtype)
    model.load_weights(folder / "run.weights.h5")
    return model


# Float16 variables have float32 masters, which the files must hold as well.
@pytest.mark.parametrize(
    ("run", "dtype"),
    [*((run, "mixed_float16") for run in RUNS), ("EMA", "float16")],
)
def test_a_resumed_run_equals_an_uninterrupted_one(run, dtype, tmp_path):
    save = SaveDuringFit(tmp_path)
    whole = fit(new_model(RUNS[run](), dtype), epochs=4, callbacks=[save])
    assert int(whole.optimizer.skipped_steps) == 4

    for restore in (from_keras_file, from_weights_file):
        resumed = restore(tmp_path, run, dtype)
        assert int(resumed.optimizer.iterations) == save.steps
        assert int(resumed.optimizer.skipped_steps) == 2
        fit(resumed, epochs=4, initial_epoch=2)
        assert_same(resumed.get_weights(), whole.get_weights())
        assert_same(state(resumed.optimizer), state(whole.optimizer))


# --- Files of Keras's own class ---------------------------------------------

INNER = {"SGD": momentum_sgd, "Adam": keras.optimizers.Adam}
every_inner = pytest.mark.parametrize("inner", INNER.values(), ids=INNER.keys())


def ours(inner=momentum_sgd):
    return LossScaleOptimizer(inner(), initial_scale=2.0**10, dynamic_growth_steps=3)


def keras_own(inner=momentum_sgd):
    return keras.optimizers.LossScaleOptimizer(inner(), 2.0**10, 3)


def assert_same_scale(ours, theirs):
    assert float(ours.loss_scale) == float(theirs.dynamic_scale.numpy())
    assert int(ours.dynamic_counter) == int(theirs.step_counter.numpy())
    assert int(ours.iterations) == int(theirs.iterations)


def assert_both_go_on_alike(a, b):
    """Both train for another epoch, in float32, and stay together."""
    for model in (a, b):
        fit(model, epochs=3, initial_epoch=2)
    assert_same_scale(a.optimizer, b.optimizer)
    assert_close(a.get_weights(), b.get_weights())


@every_inner
def test_a_file_of_keras_own_class_goes_on_here(inner, tmp_path):
    theirs = fit(new_model(keras_own(inner), "float32"), epochs=2)
    assert float(theirs.optimizer.dynamic_scale.numpy()) == 2.0**9
    assert int(theirs.optimizer.step_counter.numpy()) == 2
    theirs.save(tmp_path / "theirs.keras")

    model = keras_lso.load_model(tmp_path / "theirs.keras")
    optimizer = model.optimizer
    assert type(optimizer) is LossScaleOptimizer
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (2.0**10, 3)
    assert_same_scale(optimizer, theirs.optimizer)
    assert_same(
        [v.numpy() for v in optimizer.inner_optimizer.variables],
        [v.numpy() for v in theirs.optimizer.inner_optimizer.variables],
    )
    # Keras's class does not count what it skips.
    assert int(optimizer.iterations) == 6
    assert int(optimizer.skipped_steps) == 0
    assert bool(optimizer.last_step_applied)
    assert_both_go_on_alike(model, theirs)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(0.0, 2.0**-14), (2.0**-30, 2.0**-14), (np.inf, 2.0**24), (np.nan, 2.0**10)],
)
def test_a_scale_that_keras_own_class_has_ruined_is_mended(saved, loaded, tmp_path):
    theirs = built_model(keras_own())
    theirs.optimizer.dynamic_scale.assign(saved)
    theirs.save(tmp_path / "theirs.keras")
    theirs.save_weights(tmp_path / "theirs.weights.h5")

    model = keras_lso.load_model(tmp_path / "theirs.keras")
    assert float(model.optimizer.loss_scale) == loaded
    model = built_model(ours())
    model.load_weights(tmp_path / "theirs.weights.h5")
    assert float(model.optimizer.loss_scale) == loaded


@every_inner
def test_weights_go_to_keras_own_class_and_back(inner, tmp_path):
    start = fit(new_model(ours(inner), "float32"), epochs=2)
    start.save_weights(tmp_path / "start.weights.h5")

    theirs = built_model(keras_own(inner), "float32")
    theirs.load_weights(tmp_path / "start.weights.h5")
    assert_same_scale(start.optimizer, theirs.optimizer)
    assert_same(state(theirs.optimizer), state(start.optimizer)[:-1])
    theirs.save_weights(tmp_path / "theirs.weights.h5")

    back = built_model(ours(inner), "float32")
    back.load_weights(tmp_path / "theirs.weights.h5")
    assert_same(state(back.optimizer), state(start.optimizer))
    assert int(back.optimizer.skipped_steps) == 2
    # What was loaded can be saved for Keras's class again.
    back.save_weights(tmp_path / "back.weights.h5")
    theirs = built_model(keras_own(inner), "float32")
    theirs.load_weights(tmp_path / "back.weights.h5")
    assert_both_go_on_alike(back, theirs)


# --- The bare inner optimizer -----------------------------------------------


def assert_carried_on(optimizer, bare):
    """The inner optimizer is where the bare one was; the scale starts afresh."""
    assert_same([v.numpy() for v in optimizer.inner_optimizer.variables], state(bare))
    assert float(optimizer.loss_scale) == 2.0**10
    assert int(optimizer.dynamic_counter) == 0
    assert int(optimizer.iterations) == 8
    assert int(optimizer.skipped_steps) == 0
    assert bool(optimizer.last_step_applied)


@pytest.mark.parametrize("suffix", [".weights.h5", ".keras"])
def test_a_run_of_the_bare_optimizer_goes_on_with_loss_scaling(suffix, tmp_path):
    path = tmp_path / f"bare{suffix}"
    bare = new_model(momentum_sgd(), "float32")
    fit(bare, epochs=2, overflows=False)
    bare.save(path) if suffix == ".keras" else bare.save_weights(path)

    # A wrapper that has skipped and backed off before.
    model = fit(new_model(ours(), "float32"), epochs=1)
    assert float(model.optimizer.loss_scale) == 2.0**9
    model.load_weights(path)
    assert_carried_on(model.optimizer, bare.optimizer)
    for going_on in (model, bare):
        fit(going_on, epochs=4, initial_epoch=2, overflows=False)
    assert_close(model.get_weights(), bare.get_weights())


@pytest.mark.parametrize("dtype", ["mixed_float16", "float16"])
def test_a_float32_run_goes_on_in_float16(dtype, tmp_path):
    bare = new_model(momentum_sgd(), "float32")
    fit(bare, epochs=2, overflows=False).save_weights(tmp_path / "bare.weights.h5")

    model = built_model(ours(), dtype)
    model.load_weights(tmp_path / "bare.weights.h5")
    assert_carried_on(model.optimizer, bare.optimizer)
    for going_on in (model, bare):
        fit(going_on, epochs=3, initial_epoch=2, overflows=False)
    assert int(model.optimizer.iterations) == 12
    for half, full in zip(model.get_weights(), bare.get_weights(), strict=True):
        # Float16 rounds to 2**-11; four steps make no more than ten of that.
        np.testing.assert_allclose(half, full, rtol=0, atol=10 * 2.0**-11)


# --- tf.train.Checkpoint ----------------------------------------------------


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="tf.train.Checkpoint tracks TensorFlow variables only",
)
@pytest.mark.parametrize("run", ["default", "hysteresis"])
@pytest.mark.parametrize("restore_first", [False, True], ids=["built", "not built"])
def test_a_tensorflow_checkpoint_resumes_the_run(run, restore_first, tmp_path):
    import tensorflow as tf

    def checkpoint(model):
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    whole = fit(new_model(RUNS[run]()), epochs=2)
    path = checkpoint(whole).save(tmp_path / "run")
    fit(whole, epochs=3, initial_epoch=2)

    # Values that come before their variables wait for them.
    resumed = new_model(RUNS[run]()) if restore_first else built_model(RUNS[run]())
    status = checkpoint(resumed).restore(path)
    resumed.optimizer.build(resumed.trainable_variables)
    status.assert_consumed()
    assert int(resumed.optimizer.skipped_steps) == 2
    fit(resumed, epochs=3, initial_epoch=2)
    assert_same(resumed.get_weights(), whole.get_weights())
    assert_same(state(resumed.optimizer), state(whole.optimizer))
