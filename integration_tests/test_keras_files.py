"""Files that Keras's own `LossScaleOptimizer` wrote, around each optimizer.

What `keras_lso.load_model` reads from them is what Keras reads, and training goes on
from there. Keras is the reference, except for the parts that its files lack. The steps
are calls of `apply`; `test_resume.py` has runs of `fit`.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_lso
from integration_tests.keras_optimizers import keras_optimizers
from integration_tests.saved_models import assert_same
from keras_lso import LossScaleOptimizer
from testing.keras_versions import multi_optimizer
from testing.tiers import full_but_for

pytestmark = pytest.mark.usefixtures("no_warnings")


OPTIMIZERS = keras.optimizers
INNER = {
    **keras_optimizers(),
    "Adafactor with a schedule": lambda: OPTIMIZERS.Adafactor(
        OPTIMIZERS.schedules.ExponentialDecay(0.01, 10, 0.5)
    ),
    "Nadam, averaging": lambda: OPTIMIZERS.Nadam(use_ema=True),
    "Adafactor, averaging": lambda: OPTIMIZERS.Adafactor(use_ema=True),
    "Nadam, accumulating": lambda: OPTIMIZERS.Nadam(gradient_accumulation_steps=2),
    "Adafactor, accumulating": lambda: OPTIMIZERS.Adafactor(
        gradient_accumulation_steps=2
    ),
    "Nadam and Adafactor": lambda: multi_optimizer(
        OPTIMIZERS.Nadam(), {".*bias": OPTIMIZERS.Adafactor()}
    ),
    "Adafactor and Nadam": lambda: multi_optimizer(
        OPTIMIZERS.Adafactor(), {".*bias": OPTIMIZERS.Nadam()}
    ),
    "LARS": lambda: keras_lso.LARS(1.0),
    "LAMB": lambda: keras_lso.LAMB(0.1),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.1),
    "LARC around Nadam": lambda: keras_lso.LARC(OPTIMIZERS.Nadam()),
    "LARC around Adafactor": lambda: keras_lso.LARC(OPTIMIZERS.Adafactor()),
}
# For the others a file holds slots as for these: `state.py` has no word on them.
SHOWN = INNER.keys() - keras_optimizers().keys() | {"Adam", "Nadam", "Adafactor"}
every_inner = pytest.mark.parametrize("inner", full_but_for(SHOWN, INNER))


def new_model(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(2)]
    )
    model.compile(optimizer, loss="mean_squared_error")
    return model


def train(model, steps):
    """Takes steps on gradients of always the same course."""
    optimizer, variables = model.optimizer, model.trainable_variables
    optimizer.build(variables)
    numbers = np.random.default_rng(0)
    for _ in range(steps):
        grads = [
            ops.convert_to_tensor(numbers.normal(size=v.shape).astype("float32"))
            for v in variables
        ]
        if type(optimizer) is keras.optimizers.LossScaleOptimizer:
            # What it does in `fit`. By itself JAX would compile each of these.
            optimizer.inner_optimizer.apply(grads, variables)
            optimizer.step_counter.assign_add(1)
        elif type(optimizer) is LossScaleOptimizer:
            scale = optimizer.loss_scale
            optimizer.apply([g * scale for g in grads], variables, scaled=True)
        else:
            optimizer.apply(grads, variables)
    return model


def keras_own(inner):
    return keras.optimizers.LossScaleOptimizer(INNER[inner](), initial_scale=64.0)


def guarded(inner):
    return LossScaleOptimizer(INNER[inner](), initial_scale=64.0)


def values(variables):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def named(optimizer):
    """Those variables that Keras's class saves: it has added them by name."""
    return [v for v in optimizer.variables if "/" in v.path]


def assert_reads_what_keras_reads(ours, theirs):
    assert type(ours) is LossScaleOptimizer
    assert int(theirs.inner_optimizer._iterations) == 3
    assert int(ours.iterations) == int(theirs.iterations)
    assert float(ours.loss_scale) == float(theirs.dynamic_scale) == 64.0
    assert int(ours.dynamic_counter) == int(theirs.step_counter) == 3
    assert int(ours.skipped_steps) == 0
    assert bool(ours.last_step_applied)
    assert_same(
        values(named(ours.inner_optimizer)), values(theirs.inner_optimizer.variables)
    )


def assert_take_the_same_step(model, other):
    """Rounded otherwise, and four steps of an adaptive optimizer are no longer."""
    for each in (model, other):
        train(each, steps=1)
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@every_inner
def test_load_model_reads_file_of_keras_wrapper_as_keras_does(inner, tmp_path):
    file, weights = tmp_path / "model.keras", tmp_path / "model.weights.h5"
    model = train(new_model(keras_own(inner)), steps=3)
    model.save(file)
    model.save_weights(weights)

    theirs, ours = keras.saving.load_model(file), keras_lso.load_model(file)
    assert_same(ours.get_weights(), theirs.get_weights())
    assert_reads_what_keras_reads(ours.optimizer, theirs.optimizer)
    again = new_model(guarded(inner))
    again.optimizer.build(again.trainable_variables)
    again.load_weights(weights)
    assert_reads_what_keras_reads(again.optimizer, theirs.optimizer)
    assert_same(values(again.optimizer.variables), values(ours.optimizer.variables))
    if "Nadam" not in inner:  # Keras forgets a part of its state: see below.
        assert_take_the_same_step(ours, theirs)


@pytest.mark.parametrize(
    "inner",
    ["Nadam", "Nadam, accumulating", "Nadam and Adafactor", "LARC around Nadam"],
)
def test_nadam_resumes_from_keras_wrapper_like_uninterrupted_run(inner, tmp_path):
    # Its product of momenta is not in Keras's file.
    path = tmp_path / "model.weights.h5"
    bare = new_model(INNER[inner]())
    bare.optimizer.build(bare.trainable_variables)
    train(bare, steps=3)
    theirs = new_model(keras_own(inner))
    theirs.optimizer.build(theirs.trainable_variables)
    theirs.set_weights(bare.get_weights())
    wrapped = theirs.optimizer.inner_optimizer.variables
    for variable, value in zip(wrapped, values(named(bare.optimizer)), strict=True):
        variable.assign(value)
    theirs.save_weights(path)

    # One that has a product of its own already.
    ours = train(new_model(guarded(inner)), steps=2)
    ours.load_weights(path)
    assert_take_the_same_step(ours, bare)
