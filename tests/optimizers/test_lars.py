"""`LARS` steps by its formula: in NumPy float64, with schedules, decay, and compiled.

`test_lars_*.py` have its arguments, exclusions, trust ratios, configs and the rest.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LARS
from testing.lars import PATHS, SHARE, InNumPy, assert_close, forms, values_of, variable
from testing.optimizer_steps import SCALE, apply, in_loss_scale_optimizer, stepper
from testing.tensors import tensor

# --- The formula --------------------------------------------------------------


@pytest.mark.exhaustive
@forms
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_lars_steps_match_formula_in_numpy(
    wrap, start, gradients, form, decay, momentum
):
    settings = dict(momentum=momentum, weight_decay_rate=decay, eeta=0.1, **form)
    reference = InNumPy(start, **settings)
    optimizer = LARS(0.5, **settings)
    outer = wrap(optimizer)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for grads in gradients:
        apply(outer, grads, variables)
        reference.step(grads, 0.5)
        assert_close(values_of(variables), reference.weights)
        # A momentum is a sum of many steps, some of which cancel.
        assert_close(values_of(optimizer.momentums), reference.momentums, 2 * SHARE)


def test_lars_step_matches_hand_computed_values():
    # |w| is 5 and |g| is 10, so that the ratio is 0.5 * 5 / 10.
    w = variable("w", [3.0, 4.0])
    optimizer = LARS(2.0, momentum=0.5, eeta=0.5)
    apply(optimizer, [[0.0, 10.0]], [w])
    assert values_of([w])[0].tolist() == [3.0, -1.0]
    assert values_of(optimizer.momentums)[0].tolist() == [0.0, 5.0]
    # |w| is 0: a ratio of 1.
    w.assign([0.0, 0.0])
    apply(optimizer, [[1.0, 0.0]], [w])
    assert values_of([w])[0].tolist() == [-2.0, -2.5]


def test_schedule_sets_learning_rate_of_each_step(wrap, start, gradients):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        [1, 3], [0.5, 0.25, 2.0]
    )
    optimizer = wrap(LARS(schedule, eeta=0.1))
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for grads, rate in zip(gradients, [0.5, 0.5, 0.25, 0.25, 2.0, 2.0], strict=True):
        apply(optimizer, grads, variables)
        reference.step(grads, rate)
    assert_close(values_of(variables), reference.weights)


def test_callable_learning_rate_is_called_once_per_step(wrap):
    rates = iter([0.5, 2.0])
    optimizer = wrap(LARS(lambda: next(rates), momentum=0.0, eeta=0.1))
    w = variable("w", [3.0, 4.0])
    reference = InNumPy([[3.0, 4.0]], momentum=0.0, eeta=0.1)
    for rate in (0.5, 2.0):
        apply(optimizer, [[1.0, 1.0]], [w])
        reference.step([[1.0, 1.0]], rate)
    assert_close(values_of([w]), reference.weights)


def test_changed_settings_apply_from_next_step(wrap, start, gradients):
    optimizer = wrap(LARS(0.5, eeta=0.1))
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for step, grads in enumerate(gradients):
        apply(optimizer, grads, variables)
        reference.step(grads, 0.5 if step < 2 else 0.125)
        if step == 1:
            optimizer.learning_rate = 0.125
            optimizer.weight_decay_rate = reference.weight_decay_rate = 0.25
            optimizer.momentum = reference.momentum = 0.5
            optimizer.eeta = reference.eeta = 0.2
    assert_close(values_of(variables), reference.weights)


def test_compiled_lars_steps_match_formula(compiled, start, gradients):
    settings = dict(weight_decay_rate=0.1, eeta=0.1, nesterov=True)
    optimizer = LARS(0.5, decay=0.5, **settings)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    optimizer.build(variables)

    def step(grads):
        optimizer.apply(grads, variables)

    call = compiled(step, [*variables, *optimizer.variables])
    reference = InNumPy(start, **settings)
    for i, grads in enumerate(gradients):
        call([tensor(g) for g in grads])
        reference.step(grads, 0.5 / (1 + 0.5 * i))
    assert_close(values_of(variables), reference.weights)
    assert int(optimizer.iterations) == len(gradients)


def test_lars_has_one_momentum_slot_per_variable(start):
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    optimizer = LARS(0.5)
    optimizer.build(variables)
    optimizer.build(variables)
    assert [v.shape for v in optimizer.momentums] == [v.shape for v in variables]
    # Besides, the count of steps and the learning rate.
    assert len(optimizer.variables) == 2 + len(variables)


def test_step_leaves_gradients_of_caller_unchanged(wrap):
    w = variable("w", [3.0, 4.0])
    optimizer = wrap(LARS(0.5, weight_decay_rate=0.1))
    gradient = tensor([8.0, -0.0])
    optimizer.apply([gradient], [w])
    assert ops.convert_to_numpy(gradient).tobytes() == np.float32([8, -0.0]).tobytes()


def test_variables_without_gradient_stay_unchanged(wrap):
    variables = [variable("a", [3.0, 4.0]), variable("b", [3.0, 4.0])]
    optimizer = wrap(LARS(0.5, weight_decay_rate=0.1))
    optimizer.build(variables)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([None, tensor([SCALE, 0.0])], variables)
    a, b = values_of(variables)
    assert a.tolist() == [3.0, 4.0]
    assert b.tolist() != [3.0, 4.0]


# --- decay --------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [False, True], ids=["a number", "a schedule"])
def test_decay_divides_learning_rate(wrap, start, gradients, schedule):
    rate = 0.5
    if schedule:
        rate = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.25)
    optimizer = wrap(LARS(rate, eeta=0.1, decay=0.75))
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for step, grads in enumerate(gradients):
        apply(optimizer, grads, variables)
        scheduled = 0.5 * 0.25 ** (step / 2) if schedule else 0.5
        reference.step(grads, scheduled / (1 + 0.75 * step))
    assert_close(values_of(variables), reference.weights)


def test_decay_counts_applied_steps_only():
    optimizer = in_loss_scale_optimizer(LARS(0.5, momentum=0.0, eeta=0.1, decay=1.0))
    w = variable("w", [3.0, 4.0])
    reference = InNumPy([[3.0, 4.0]], momentum=0.0, eeta=0.1)
    for i, gradient in enumerate([[1.0, 1.0], [np.inf, 0.0], [1.0, 2.0]]):
        optimizer.apply([tensor(gradient)], [w], scaled=False)
        if np.isfinite(gradient).all():
            reference.step([gradient], [0.5, None, 0.25][i])
    assert_close(values_of([w]), reference.weights)


def test_decay_counts_windows_of_accumulated_gradients(
    wrap, compiled_on_jax, start, gradients
):
    inner = LARS(0.5, eeta=0.1, decay=0.75, gradient_accumulation_steps=2)
    optimizer = wrap(inner)
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    apply_once = stepper(compiled_on_jax, optimizer, variables)
    for step, grads in enumerate(gradients):
        apply_once(grads)
        if step % 2:
            pair = zip(gradients[step - 1], grads, strict=True)
            mean = [(a.astype("float64") + b) / 2 for a, b in pair]
            reference.step(mean, 0.5 / (1 + 0.75 * (step // 2)))
        assert_close(values_of(variables), reference.weights)
    assert int(inner.iterations) == 3


def test_decay_set_after_first_step_applies_to_next_step():
    optimizer = LARS(0.5, momentum=0.0, eeta=0.1)
    w = variable("w", [3.0, 4.0])
    reference = InNumPy([[3.0, 4.0]], momentum=0.0, eeta=0.1)
    apply(optimizer, [[1.0, 1.0]], [w])
    reference.step([[1.0, 1.0]], 0.5)
    optimizer.decay = 3.0
    apply(optimizer, [[1.0, 1.0]], [w])
    reference.step([[1.0, 1.0]], 0.125)
    assert_close(values_of([w]), reference.weights)


# --- Stateless ----------------------------------------------------------------


def test_stateless_steps_are_bitwise_equal_to_apply(wrap, start, gradients, snapshot):
    if keras.backend.backend() == "tensorflow":
        pytest.skip("Keras has no stateless_apply on TensorFlow")
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    inner = LARS(0.5, weight_decay_rate=0.1, eeta=0.1)
    optimizer = wrap(inner)
    optimizer.build(variables)
    scale = 1.0 if optimizer is inner else SCALE
    before = snapshot([*variables, *optimizer.variables])
    trained = [ops.copy(ops.convert_to_tensor(v)) for v in variables]
    state = [ops.copy(ops.convert_to_tensor(v)) for v in optimizer.variables]
    reference = InNumPy(start, weight_decay_rate=0.1, eeta=0.1)
    for grads in gradients:
        trained, state = optimizer.stateless_apply(
            state, [tensor(g * scale) for g in grads], trained
        )
        reference.step(grads, 0.5)
    assert_close(values_of(trained), reference.weights)
    assert snapshot([*variables, *optimizer.variables]) == before
    for grads in gradients:
        apply(optimizer, grads, variables)
    assert snapshot(variables) == snapshot(trained)
    assert snapshot(optimizer.variables) == snapshot(state)
