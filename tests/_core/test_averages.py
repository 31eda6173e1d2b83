"""`use_ema` of the inner optimizer, in steps in one pass; the reference is Keras's."""

import keras
import numpy as np
import pytest

import keras_lso
from testing.beside_keras import Pair, steps_by_rule

K = keras.optimizers
BACKEND = keras.backend.backend()
MAKE = {
    "SGD": K.SGD,
    "AdamW": K.AdamW,
    "LARS": lambda rate, **k: keras_lso.LARS(rate, eeta=0.5, **k),
    "LAMB": keras_lso.LAMB,
}
each = pytest.mark.parametrize("name", ["LARS"] if BACKEND == "jax" else MAKE)
# The steps are Keras's own there, which eager JAX compiles one by one.
pytestmark = [pytest.mark.full] if BACKEND == "jax" else []


def pair_of(name, **options):
    return Pair(MAKE[name], **{"use_ema": True, "ema_momentum": 0.75, **options})


@each
@pytest.mark.parametrize(
    "count, frequency", [(None, None), (None, 1), (None, 3), (3, None), (3, 2)]
)
def test_weights_and_averages_match_keras_despite_overflows(
    name, count, frequency, way
):
    pair = pair_of(
        name, gradient_accumulation_steps=count, ema_overwrite_frequency=frequency
    )
    for number in range(13):
        if number in (0, 1, 2, 5):
            # Before the first step, before the averages overwrite, and after it.
            pair.overflow([np.nan, np.inf][number % 2])
        pair.step()
        pair.assert_alike()
    assert steps_by_rule(pair.optimizer)


def test_ema_momentum_and_overwrite_frequency_are_read_at_each_step():
    pair = pair_of("SGD")
    for momentum, frequency in [(0.5, None), (0.9, 2), (0.1, 2), (0.5, 3), (0.5, 1)]:
        for optimizer in (pair.optimizer.inner_optimizer, pair.inner):
            optimizer.ema_momentum = momentum
            optimizer.ema_overwrite_frequency = frequency
        pair.step()
        pair.assert_alike()


def test_averages_of_float16_variables_match_keras_in_float32(way):
    pair = pair_of("AdamW", dtype="float16", ema_overwrite_frequency=2)
    for _ in range(5):
        pair.step_in_float16()
        pair.assert_weights_alike_in_float16()
    averages = pair.optimizer.inner_optimizer._model_variables_moving_average
    expected = pair.inner._model_variables_moving_average
    for ours, theirs in zip(averages, expected, strict=True):
        assert ours.dtype == "float32"
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_variable_without_gradient_is_averaged_as_in_keras():
    pair = pair_of("SGD")
    for missing in (None, 1, None, 0):
        pair.step_without(missing)
        pair.assert_alike()


def test_finalize_variable_values_assigns_averages_as_in_keras():
    pair = pair_of("SGD")
    for _ in range(3):
        pair.step()
    pair.optimizer.finalize_variable_values(pair.ours)
    pair.inner.finalize_variable_values(pair.theirs)
    pair.assert_alike()


@pytest.mark.skipif(
    BACKEND == "tensorflow", reason="Keras has no `stateless_apply` on TensorFlow"
)
@pytest.mark.parametrize("count", [None, 2])
def test_stateless_averaged_steps_are_bitwise_equal_to_apply(count, way):
    options = {"gradient_accumulation_steps": count, "ema_overwrite_frequency": 2}
    pair, twin = pair_of("AdamW", **options), pair_of("AdamW", **options)
    pair.assert_stateless_steps_are_those_of(twin, count=5)


@each
@pytest.mark.parametrize("frequency", [None, 2])
def test_assignment_within_window_reaches_averages(name, frequency, way):
    """As in Keras, whose averages are of the weights as they are."""
    make, found = MAKE[name], []
    for dtype in ("float32", "float16"):
        w = keras.Variable(np.ones(2, dtype), dtype=dtype)
        inner = make(
            0.5,
            use_ema=True,
            ema_momentum=0.5,
            ema_overwrite_frequency=frequency,
            gradient_accumulation_steps=4,
        )
        optimizer = inner
        if dtype == "float16":
            optimizer = keras_lso.LossScaleOptimizer(inner, initial_scale=1.0)
            optimizer.scale_loss(1.0)
        optimizer.build([w])
        grads = [np.zeros(2, dtype)]
        for number in range(7):
            if number in (4, 6):
                # By `set_weights`, say: at the start of a window, and within it.
                w.assign(np.full(2, number, dtype))
            optimizer.apply(list(map(keras.ops.convert_to_tensor, grads)), [w])
        [average] = inner._model_variables_moving_average
        found.append([np.float16(v.numpy()).tolist() for v in (average, w)])
    assert found[0] == found[1]
