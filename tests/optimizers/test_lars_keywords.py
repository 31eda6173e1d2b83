"""`LARS` with the keywords of every Keras optimizer: clips, averages, accumulation."""

import keras
import numpy as np
import pytest

from keras_lso import LARS
from testing.lars import PATHS, InNumPy, assert_close, values_of, variable
from testing.optimizer_steps import apply, stepper


def clipped_by_norm(grads):
    return [g * min(1.0, 0.5 / np.linalg.norm(g)) for g in grads]


def clipped_by_global_norm(grads):
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in grads))
    return [g * min(1.0, 0.5 / norm) for g in grads]


def clipped_by_value(grads):
    return [np.clip(g, -0.5, 0.5) for g in grads]


CLIPS = {
    "clipnorm": clipped_by_norm,
    "global_clipnorm": clipped_by_global_norm,
    "clipvalue": clipped_by_value,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("keyword", CLIPS)
def test_gradients_are_clipped_before_weight_decay_and_trust_ratio(
    wrap, start, gradients, keyword
):
    # Without decay the norm of a gradient would not matter.
    settings = dict(weight_decay_rate=0.2, eeta=0.1)
    optimizer = wrap(LARS(0.5, **settings, **{keyword: 0.5}))
    reference = InNumPy(start, **settings)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.step(CLIPS[keyword]([g.astype("float64") for g in grads]), 0.5)
        assert_close(values_of(variables), reference.weights)


def test_ema_averages_weights_after_each_step(wrap, start, gradients):
    optimizer = wrap(LARS(0.5, eeta=0.1, use_ema=True, ema_momentum=0.75))
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    averages = None
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.step(grads, 0.5)
        averages = [
            w if averages is None else 0.75 * averages[i] + 0.25 * w
            for i, w in enumerate(reference.weights)
        ]
    assert_close(values_of(variables), reference.weights)
    optimizer.finalize_variable_values(variables)
    assert_close(values_of(variables), averages)


def test_accumulated_gradients_take_one_step_of_their_mean(
    wrap, compiled_on_jax, start, gradients
):
    settings = dict(weight_decay_rate=0.1, eeta=0.1, nesterov=True)
    optimizer = wrap(LARS(0.5, gradient_accumulation_steps=3, **settings))
    reference = InNumPy(start, **settings)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    apply_once = stepper(compiled_on_jax, optimizer, variables)
    for step, grads in enumerate(gradients):
        apply_once(grads)
        if step % 3 == 2:
            window = zip(*gradients[step - 2 : step + 1], strict=True)
            reference.step([np.mean(np.float64(g), axis=0) for g in window], 0.5)
        assert_close(values_of(variables), reference.weights)


def test_keras_weight_decay_shrinks_weights_before_each_step(wrap, start, gradients):
    optimizer = wrap(LARS(0.5, eeta=0.1, weight_decay=0.25))
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.weights = [w * (1 - 0.25 * 0.5) for w in reference.weights]
        reference.step(grads, 0.5)
    assert_close(values_of(variables), reference.weights)


def test_constraint_holds_after_step(wrap):
    w = variable("w", [3.0, 4.0])
    w.constraint = keras.constraints.MinMaxNorm(max_value=1.0)
    apply(wrap(LARS(0.5)), [[1.0, 1.0]], [w])
    np.testing.assert_allclose(np.linalg.norm(values_of([w])[0]), 1.0, rtol=1e-5)
