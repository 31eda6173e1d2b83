"""Subclasses of `LARS`, whose `update_step` is called."""

import keras
import pytest
from keras import ops

from keras_lso import LARS
from testing.lars import PATHS, InNumPy, assert_close, forms, values_of, variable
from testing.optimizer_steps import SCALE, apply
from testing.tensors import tensor


class HalfSteps(LARS):
    """A user's: each step is half as long."""

    def update_step(self, gradient, variable, learning_rate):
        half = ops.multiply(ops.cast(learning_rate, "float32"), 0.5)
        super().update_step(gradient, variable, half)


class CountedSteps(LARS):
    """A user's, which changes nothing but looks on."""

    calls = 0

    def update_step(self, gradient, variable, learning_rate):
        self.calls += 1
        super().update_step(gradient, variable, learning_rate)


class JustANewName(LARS):
    """A user's, which changes nothing at all."""


@pytest.mark.exhaustive
@forms
def test_overridden_update_step_is_used(wrap, compiled, start, gradients, form):
    inner = HalfSteps(0.5, weight_decay_rate=0.1, eeta=0.1, **form)
    optimizer = wrap(inner)
    reference = InNumPy(start, weight_decay_rate=0.1, eeta=0.1, **form)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    optimizer.build(variables)

    def step(grads):
        optimizer.apply(grads, variables)

    call = compiled(step, [*variables, *optimizer.variables])
    scale = 1.0 if optimizer is inner else SCALE
    for grads in gradients[:3]:
        call([tensor(g * scale) for g in grads])
        reference.step(grads, 0.25)
    assert_close(values_of(variables), reference.weights)


def test_overridden_update_step_is_called_once_per_variable(wrap, start, gradients):
    inner = CountedSteps(0.5, eeta=0.1)
    optimizer = wrap(inner)
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for step, grads in enumerate(gradients[:2]):
        apply(optimizer, grads, variables)
        reference.step(grads, 0.5)
        assert inner.calls == (step + 1) * len(variables)
    assert_close(values_of(variables), reference.weights)


@forms
def test_subclass_without_changes_matches_lars(wrap, start, gradients, form):
    variables, twins = (
        [variable(p, w) for p, w in zip(PATHS, start, strict=True)] for _ in range(2)
    )
    settings = dict(weight_decay_rate=0.1, eeta=0.1, **form)
    optimizer, subclass = LARS(0.5, **settings), wrap(JustANewName(0.5, **settings))
    for grads in gradients:
        apply(optimizer, grads, variables)
        apply(subclass, grads, twins)
    assert_close(values_of(twins), values_of(variables))


def test_subclass_round_trips_as_its_own_class():
    config = keras.saving.serialize_keras_object(HalfSteps(0.5, eeta=0.25))
    twin = keras.saving.deserialize_keras_object(
        config, custom_objects={"HalfSteps": HalfSteps}
    )
    assert type(twin) is HalfSteps
    assert twin.eeta == 0.25
