"""Training that stops and goes on: from our files, Keras's, and the bare optimizer's.

- A run that was saved and resumed equals one that was never interrupted, bit for
  bit, through `.keras` and through `.weights.h5`.
- A file written with `keras.optimizers.LossScaleOptimizer` goes on here with its
  whole state, and `.weights.h5` files go both ways.
- A run of the bare inner optimizer, in float32 say, goes on with loss scaling.
- On TensorFlow the same holds for `tf.train.Checkpoint`.

Every run has a batch whose gradients overflow, once an epoch. What the files hold is
compared in `tests/_core/test_policy_state.py`.
"""

import types

import keras
import numpy as np
import pytest

from integration_tests.saved_models import (
    assert_same,
    decaying_adam,
    momentum_sgd,
    small_model,
    wide_layers,
)
from keras_lso import LossScaleOptimizer
from keras_lso.loss_scales import DynamicLossScale, LogMaxLossScale

pytestmark = pytest.mark.usefixtures("no_warnings")

BATCHES = 4


def built_model(optimizer, dtype="mixed_float16", wide=False):
    """A file's optimizer state needs variables to go to."""
    model = small_model(optimizer, dtype, wide_layers(dtype) if wide else ())
    optimizer.build(model.trainable_variables)
    return model


def fit(model, epochs, initial_epoch=0, overflows=True, callbacks=()):
    """Always the same batches in the same order; the second overflows."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(4 * BATCHES, 4)).astype("float32")
    y = numbers.normal(size=(4 * BATCHES, 2)).astype("float32")
    if overflows:
        x[4, 0] = np.inf
    if not model.optimizer.built:
        # TensorFlow would trace the step twice: with its variables, and without.
        model.optimizer.build(model.trainable_variables)
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
    # On PyTorch `numpy()` is a view of the variable.
    return [np.array(v.numpy()) for v in optimizer.variables]


def weights_of(model):
    return [np.array(w) for w in model.get_weights()]


def assert_close(actual, expected):
    """Within 1e-6 of each tensor's largest magnitude.

    Where an optimizer has a fast path, the wrapped and the bare one round
    differently.
    """
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


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
    "narrow slots": lambda: LossScaleOptimizer(
        decaying_adam(), initial_scale=2.0**10, slot_dtype="bfloat16"
    ),
    "int8": lambda: LossScaleOptimizer(
        decaying_adam(), initial_scale=2.0**10, slot_dtype="int8"
    ),
}


def model_of(run, dtype="mixed_float16"):
    """Returns a new model of a run."""
    wide = wide_layers(dtype) if run == "int8" else ()
    return small_model(RUNS[run](), dtype, wide)


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


# Float16 variables have float32 masters, which the files must hold as well.
@pytest.mark.parametrize(
    "run, dtype",
    [
        *((run, "mixed_float16") for run in RUNS if run != "EMA"),
        ("EMA", "float16"),
        pytest.param("EMA", "mixed_float16", marks=pytest.mark.full),
    ],
)
def test_resumed_run_is_bitwise_equal_to_uninterrupted_run(run, dtype, tmp_path):
    save = SaveDuringFit(tmp_path)
    whole = fit(model_of(run, dtype), epochs=4, callbacks=[save])
    assert int(whole.optimizer.skipped_steps) == 4
    weights, variables = weights_of(whole), state(whole.optimizer)

    def assert_goes_on(resumed):
        assert int(resumed.optimizer.iterations) == save.steps
        assert int(resumed.optimizer.skipped_steps) == 2
        fit(resumed, epochs=4, initial_epoch=2)
        assert_same(resumed.get_weights(), weights)
        assert_same(state(resumed.optimizer), variables)

    assert_goes_on(keras.saving.load_model(tmp_path / "run.keras"))
    # The other file goes into the run itself, which has ended: none of its values may
    # stay, and its step need not be compiled again.
    whole.load_weights(tmp_path / "run.weights.h5")
    assert_goes_on(whole)


GROWING = {"initial_scale": 2.0**10, "dynamic_growth_steps": 3}
# Adam has more slots, on whose way `test_keras_files.py` has more to say.
every_inner = pytest.mark.parametrize(
    "inner",
    [
        pytest.param(momentum_sgd, id="SGD"),
        pytest.param(keras.optimizers.Adam, id="Adam", marks=pytest.mark.full),
    ],
)


def ours(inner=momentum_sgd, **options):
    return LossScaleOptimizer(inner(), **options, **GROWING)


def keras_own(inner=momentum_sgd):
    return keras.optimizers.LossScaleOptimizer(inner(), **GROWING)


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


@pytest.mark.parametrize("slot_dtype", [None, "bfloat16", "int8"])
@every_inner
def test_weights_round_trip_through_keras_wrapper(inner, slot_dtype, tmp_path):
    is_wide = slot_dtype == "int8"
    optimizer = ours(inner, slot_dtype=slot_dtype)
    start = fit(built_model(optimizer, "float32", is_wide), epochs=2)
    start.save_weights(tmp_path / "start.weights.h5")

    theirs = built_model(keras_own(inner), "float32", is_wide)
    theirs.load_weights(tmp_path / "start.weights.h5")
    assert_same_scale(start.optimizer, theirs.optimizer)
    # In Keras's class the first variable takes the number of all steps from the file.
    iteration, *others = state(theirs.optimizer)
    skipped, *_ = state(start.optimizer)
    store = {}
    start.optimizer.save_own_variables(store)
    _, *our_others = store.values()
    assert iteration == skipped + int(start.optimizer.iterations)
    # It keeps narrow slots in float32.
    wide = [v.dtype for v in theirs.optimizer.variables[1:]]
    assert_same(others, [v.astype(d) for v, d in zip(our_others, wide, strict=True)])
    theirs.save_weights(tmp_path / "theirs.weights.h5")

    back = built_model(ours(inner, slot_dtype=slot_dtype), "float32", is_wide)
    back.load_weights(tmp_path / "theirs.weights.h5")
    assert_same(state(back.optimizer), state(start.optimizer))
    assert int(back.optimizer.skipped_steps) == 2
    # What was loaded can be saved for Keras's class again.
    back.save_weights(tmp_path / "back.weights.h5")
    theirs = built_model(keras_own(inner), "float32", is_wide)
    theirs.load_weights(tmp_path / "back.weights.h5")
    if slot_dtype is None:
        assert_both_go_on_alike(back, theirs)


@pytest.fixture(scope="module")
def bare_run(tmp_path_factory):
    """Files of a float32 run after two epochs, its state, and the weights it ends on.

    Those are a dict of the number of epochs to the weights.
    """
    keras.utils.set_random_seed(0)
    folder = tmp_path_factory.mktemp("bare")
    model = small_model(momentum_sgd(), "float32")
    fit(model, epochs=2, overflows=False)
    model.save(folder / "bare.keras")
    model.save_weights(folder / "bare.weights.h5")
    run = types.SimpleNamespace(folder=folder, state=state(model.optimizer), ends={})
    for epochs in (3, 4):
        fit(model, epochs, initial_epoch=epochs - 1, overflows=False)
        run.ends[epochs] = weights_of(model)
    return run


def assert_carried_on(optimizer, bare_run):
    """The inner optimizer is where the bare one was; the scale starts anew."""
    inner = optimizer.inner_optimizer
    assert_same([v.numpy() for v in inner.variables], bare_run.state)
    assert float(optimizer.loss_scale) == 2.0**10
    assert int(optimizer.dynamic_counter) == 0
    assert int(optimizer.iterations) == 8
    assert int(optimizer.skipped_steps) == 0
    assert bool(optimizer.last_step_applied)


def test_run_of_bare_optimizer_resumes_with_loss_scaling(bare_run):
    # A wrapper that has skipped and backed off before, and then grown.
    model = fit(small_model(ours(), "float32"), epochs=1)
    assert float(model.optimizer.loss_scale) == 2.0**9
    for name in ("bare.weights.h5", "bare.keras"):
        model.load_weights(bare_run.folder / name)
        assert_carried_on(model.optimizer, bare_run)
        fit(model, epochs=4, initial_epoch=2, overflows=False)
        assert float(model.optimizer.loss_scale) == 2.0**12
        assert_close(model.get_weights(), bare_run.ends[4])


@pytest.mark.parametrize("dtype", ["mixed_float16", "float16"])
def test_float32_run_resumes_in_float16(dtype, bare_run):
    model = built_model(ours(), dtype)
    model.load_weights(bare_run.folder / "bare.weights.h5")
    assert_carried_on(model.optimizer, bare_run)
    fit(model, epochs=3, initial_epoch=2, overflows=False)
    assert int(model.optimizer.iterations) == 12
    for half, full in zip(model.get_weights(), bare_run.ends[3], strict=True):
        # Float16 rounds to 2**-11; four steps make no more than ten of that.
        np.testing.assert_allclose(half, full, rtol=0, atol=10 * 2.0**-11)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="tf.train.Checkpoint tracks TensorFlow variables only",
)
@pytest.mark.exhaustive
@pytest.mark.parametrize("run", ["default", "hysteresis", "narrow slots"])
@pytest.mark.parametrize("restore_first", [False, True], ids=["built", "not built"])
def test_run_resumes_from_tensorflow_checkpoint(run, restore_first, tmp_path):
    import tensorflow as tf

    def checkpoint(model):
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    whole = fit(model_of(run), epochs=2)
    path = checkpoint(whole).save(tmp_path / "run")
    fit(whole, epochs=3, initial_epoch=2)

    # Values that come before their variables wait for them.
    resumed = model_of(run)
    if not restore_first:
        resumed.optimizer.build(resumed.trainable_variables)
    status = checkpoint(resumed).restore(path)
    resumed.optimizer.build(resumed.trainable_variables)
    status.assert_consumed()
    assert int(resumed.optimizer.skipped_steps) == 2
    fit(resumed, epochs=3, initial_epoch=2)
    assert_same(resumed.get_weights(), whole.get_weights())
    assert_same(state(resumed.optimizer), state(whole.optimizer))
    if run == "narrow slots":
        wide = built_model(LossScaleOptimizer(decaying_adam()))
        with pytest.raises(tf.errors.InvalidArgumentError, match="expected dtype flo"):
            checkpoint(wide).restore(path)
