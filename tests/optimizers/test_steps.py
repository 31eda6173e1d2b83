"""LARS, LAMB and NovoGrad step by their formulas in NumPy float64.

In each form, with schedules, decay, every dtype, and the keywords of every Keras
optimizer.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LAMB, LARS, LossScaleOptimizer
from testing.layer_wise import (
    FORMULAS,
    assert_as,
    assert_close,
    each,
    forms,
    make_variables,
    slots_of,
    values_of,
    variable,
)
from testing.optimizer_steps import SCALE, apply, in_loss_scale_optimizer, stepper
from testing.tensors import tensor

# JAX has float64 only where x64 is on; `tensor` skips where it is not.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
RATE = 0.5


@forms
def test_steps_match_formula_in_numpy(wrap, start, gradients, cls, settings):
    inner, reference = cls(RATE, **settings), FORMULAS[cls](start, **settings)
    optimizer, variables = wrap(inner), make_variables(start)
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.step(grads, RATE)
        assert_as(inner, variables, reference)


@pytest.mark.exhaustive
@forms
def test_compiled_loss_scaled_steps_match_formula_despite_skipped_steps(
    compiled, start, gradients, cls, settings, snapshot
):
    inner, reference = cls(RATE, **settings), FORMULAS[cls](start, **settings)
    optimizer = LossScaleOptimizer(inner, dynamic=False, initial_scale=SCALE)
    variables = make_variables(start)
    step = stepper(compiled, optimizer, variables)
    state = [*variables, *inner.variables]
    for number, grads in enumerate(gradients):
        # A step is skipped before each that is applied: the first one has no slots yet.
        before = snapshot(state)
        poisoned = [np.array(g) for g in grads]
        poisoned[number % 5].flat[-1] = (np.inf, -np.inf, np.nan)[number % 3]
        step(poisoned)
        assert snapshot(state) == before
        step(grads)
        reference.step(grads, RATE)
        assert_as(inner, variables, reference)
    # Decay and bias correction count applied steps alone.
    assert int(inner.iterations) == len(gradients)


@forms
def test_loss_scaled_steps_are_bitwise_equal_to_bare_steps(
    start, gradients, cls, settings, snapshot
):
    results = []
    for wrap in (lambda o: o, in_loss_scale_optimizer):
        inner, variables = cls(RATE, **settings), make_variables(start)
        optimizer = wrap(inner)
        for grads in gradients:
            apply(optimizer, grads, variables)
        results.append(snapshot([*variables, *slots_of(inner)]))
    assert results[0] == results[1]


@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow",
    reason="Keras has no stateless_apply on TensorFlow",
)
@each
def test_stateless_steps_are_bitwise_equal_to_apply(
    wrap, start, gradients, cls, settings, snapshot
):
    variables, inner = make_variables(start), cls(RATE, **settings)
    optimizer = wrap(inner)
    optimizer.build(variables)
    scale = 1.0 if optimizer is inner else SCALE
    before = snapshot([*variables, *optimizer.variables])
    trained = [ops.copy(ops.convert_to_tensor(v)) for v in variables]
    state = [ops.copy(ops.convert_to_tensor(v)) for v in optimizer.variables]
    for grads in gradients:
        trained, state = optimizer.stateless_apply(
            state, [tensor(g * scale) for g in grads], trained
        )
    assert snapshot([*variables, *optimizer.variables]) == before
    for grads in gradients:
        apply(optimizer, grads, variables)
    assert snapshot(variables) == snapshot(trained)
    assert snapshot(optimizer.variables) == snapshot(state)


@each
def test_schedule_decay_and_changed_settings_apply_to_each_step(
    wrap, start, gradients, cls, settings
):
    decay = {} if cls not in (LARS, LAMB) else {"decay": 0.75}
    schedule = keras.optimizers.schedules.ExponentialDecay(RATE, 2, 0.25)
    inner, reference = cls(schedule, **settings, **decay), FORMULAS[cls](start)
    vars(reference).update(settings)
    optimizer, variables = wrap(inner), make_variables(start)
    name = "momentum" if cls is LARS else "beta_1"
    for step, grads in enumerate(gradients):
        if step == 3:
            for attribute, value in {name: 0.5, "weight_decay_rate": 0.25}.items():
                setattr(optimizer, attribute, value)
                setattr(reference, attribute, value)
        apply(optimizer, grads, variables)
        rate = RATE * 0.25 ** (step / 2)
        reference.step(grads, rate / (1 + decay.get("decay", 0.0) * step))
    assert_as(inner, variables, reference)


@each
def test_assigned_and_callable_learning_rates_apply_from_next_step(
    wrap, start, gradients, cls, settings
):
    rates = iter([2.0, 0.25])
    variables, inner = make_variables(start), cls(RATE, **settings)
    optimizer, reference = wrap(inner), FORMULAS[cls](start, **settings)
    for step, rate in enumerate([RATE, 0.125, 2.0, 0.25]):
        if step == 1:
            optimizer.learning_rate = rate
        if step == 2:
            optimizer.learning_rate = lambda: next(rates)
        apply(optimizer, gradients[step], variables)
        reference.step(gradients[step], rate)
    assert_close(variables, reference.weights)


@each
def test_overridden_update_step_is_called_once_per_variable(
    wrap, compiled_once, start, gradients, cls, settings
):
    calls = []

    class HalfSteps(cls):
        def update_step(self, gradient, variable, learning_rate):
            calls.append(variable)
            half = ops.multiply(ops.cast(learning_rate, "float32"), 0.5)
            super().update_step(gradient, variable, half)

    variables, inner = make_variables(start), HalfSteps(RATE, **settings)
    optimizer, reference = wrap(inner), FORMULAS[cls](start, **settings)
    step = stepper(compiled_once, optimizer, variables)
    for grads in gradients:
        step(grads)
        reference.step(grads, RATE / 2)
    assert_as(inner, variables, reference)
    # Compiled, a step is traced once.
    traces = len(gradients) if keras.backend.backend() == "torch" else 1
    assert len(calls) == traces * len(variables)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@each
def test_16_bit_variables_step_in_float32(dtype, cls, settings):
    settings = settings | ({"epsilon": 0.5} if cls is LAMB else {})
    [w] = make_variables([[3.0, 4.0]], dtype)
    optimizer = cls(RATE / 4, **settings)
    reference = FORMULAS[cls]([[3.0, 4.0]], **settings)
    # The squares of these overflow float16.
    for gradient in ([1024.0, 512.0], [-4096.0, 0.5]):
        if cls is LAMB:
            gradient = np.divide(gradient, 1024)
        optimizer.apply([tensor(gradient, dtype)], [w])
        reference.step([gradient], RATE / 4)
        # The weights and the slots are rounded.
        epsilon = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        assert_close([w], reference.weights, 3 * epsilon)
    assert optimizer.momentums[0].dtype == dtype


@each
def test_float16_variables_step_through_float32_masters(
    start, gradients, cls, settings
):
    variables = make_variables(start, "float16")
    inner, reference = cls(RATE, **settings), FORMULAS[cls](values_of(variables))
    vars(reference).update(settings)
    optimizer = in_loss_scale_optimizer(inner)
    for grads in gradients:
        grads = [(g / 64).astype("float16") for g in grads]
        given = [tensor(np.float64(g) * SCALE, "float16") for g in grads]
        optimizer.apply(given, variables)
        reference.step(grads, RATE)
    assert {v.dtype for v in slots_of(inner)} == {"float32"}
    # The weights are rounded.
    assert_close(variables, reference.weights, 2.0**-11)


@each
def test_float64_variables_step_in_float64(start, gradients, cls, settings):
    tensor(0.0, "float64")  # Skips if the backend has no float64.
    variables, optimizer = make_variables(start, "float64"), cls(RATE, **settings)
    reference = FORMULAS[cls](start, **settings)
    reference.rounded = float
    for grads in gradients:
        optimizer.apply([tensor(g, "float64") for g in grads], variables)
        reference.step(grads, RATE)
    assert_as(optimizer, variables, reference, 1e-11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@each
def test_float32_variables_accept_gradients_of_other_dtypes(dtype, cls, settings):
    variables, optimizer = make_variables([[3.0, 4.0], 2.0]), cls(RATE, **settings)
    reference = FORMULAS[cls]([[3.0, 4.0], 2.0], **settings)
    for grads in ([[1.0, -2.0], 3.0], [[0.5, 0.25], -1.0]):
        optimizer.apply([tensor(g, dtype) for g in grads], variables)
        reference.step(grads, RATE)
    assert_as(optimizer, variables, reference)


@pytest.mark.exhaustive
@each
def test_sparse_gradients_step_like_dense_gradients(
    wrap, sparse_gradient, compiled, cls, settings
):
    values = np.array([[8.0, 1.0], [16.0, 2.0], [24.0, 3.0]], "float32")
    # One row twice: the norm is of their sum.
    rows = [2, 0, 0]
    dense = np.zeros((4, 2), "float32")
    np.add.at(dense, rows, values)
    start = np.arange(1.0, 9.0, dtype="float32").reshape(4, 2)
    table, inner = variable("table", start), cls(RATE, **settings)
    optimizer, reference = wrap(inner), FORMULAS[cls]([start], **settings)
    optimizer.build([table])
    step = compiled(
        lambda g: optimizer.apply([g], [table]), [table, *optimizer.variables]
    )
    scale = np.float32(1.0 if optimizer is inner else SCALE)
    for _ in range(2):
        step(sparse_gradient(values * scale, rows, (4, 2)))
        reference.step([dense], RATE)
    # Rows without a gradient move too.
    assert_as(inner, [table], reference)


@each
def test_variables_without_gradient_and_their_slots_stay_unchanged(
    wrap, start, gradients, cls, settings, snapshot
):
    variables, inner = make_variables(start), cls(RATE, **settings)
    optimizer = wrap(inner)
    optimizer.build(variables)
    left_out = [variables[0], *slots_of(inner)[:: len(variables)]]
    before = snapshot([*left_out, variables[1]])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([None, *map(tensor, gradients[0][1:])], variables)
    after = snapshot([*left_out, variables[1]])
    assert after[:-1] == before[:-1]
    assert after[-1] != before[-1]


@each
def test_variable_overwritten_by_gradient_takes_no_step(wrap, cls, settings):
    variables, inner = make_variables([[3.0, 4.0], [1.0, 1.0]]), cls(RATE, **settings)
    variables[1].overwrite_with_gradient = True
    optimizer, reference = wrap(inner), FORMULAS[cls]([[3.0, 4.0]], **settings)
    # Such a gradient is not scaled.
    scale = 1.0 if optimizer is inner else SCALE
    optimizer.apply([tensor([0.0, 16.0 * scale]), tensor([7.0, 8.0])], variables)
    reference.step([[0.0, 16.0]], RATE)
    assert_close(variables, [*reference.weights, [7.0, 8.0]])


@each
def test_numpy_arrays_and_lists_are_gradients_and_stay_unchanged(cls, settings):
    reference = FORMULAS[cls]([[3.0, 4.0]], **settings)
    reference.step([[8.0, -0.0]], RATE)
    array = np.array([8.0, -0.0], "float32")
    for gradient in (array, tensor(array), [8.0, -0.0]):
        [w] = make_variables([[3.0, 4.0]])
        cls(RATE, **settings).apply([gradient], [w])
        assert_close([w], reference.weights)
        kept = np.float32(ops.convert_to_numpy(gradient))
        assert kept.tobytes() == array.tobytes()


# What PyTorch warns of would be an error in the tests only.
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("shape", [(3,), (2, 2, 2)])
@each
def test_gradient_of_wrong_shape_is_rejected(wrap, shape, cls, settings):
    w = variable("w", [3.0, 4.0])
    with pytest.raises(ValueError, match="shape of its variable.*variable 'w' of"):
        wrap(cls(RATE, **settings)).apply([ops.ones(shape)], [w])
    assert values_of([w])[0].tolist() == [3.0, 4.0]


CLIPS = {
    "clipnorm": lambda grads: [g / max(1.0, np.linalg.norm(g) / 0.5) for g in grads],
    "global_clipnorm": lambda grads: [
        g / max(1.0, np.sqrt(sum(np.sum(np.square(g)) for g in grads)) / 0.5)
        for g in grads
    ],
    "clipvalue": lambda grads: [np.clip(g, -0.5, 0.5) for g in grads],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("keyword", CLIPS)
@each
def test_gradients_are_clipped_before_the_step(
    wrap, start, gradients, keyword, cls, settings
):
    variables, inner = make_variables(start), cls(RATE, **settings, **{keyword: 0.5})
    optimizer, reference = wrap(inner), FORMULAS[cls](start, **settings)
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.step(CLIPS[keyword]([g.astype("float64") for g in grads]), RATE)
    assert_as(inner, variables, reference)


@each
def test_ema_averages_weights_after_each_step(wrap, start, gradients, cls, settings):
    variables = make_variables(start)
    optimizer = wrap(cls(RATE, use_ema=True, ema_momentum=0.75, **settings))
    reference, averages = FORMULAS[cls](start, **settings), None
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.step(grads, RATE)
        averages = [
            w if averages is None else 0.75 * averages[i] + 0.25 * w
            for i, w in enumerate(reference.weights)
        ]
    assert_close(variables, reference.weights)
    optimizer.finalize_variable_values(variables)
    assert_close(variables, averages)


@each
def test_accumulated_gradients_take_one_step_of_their_mean(
    wrap, compiled_on_jax, start, gradients, cls, settings
):
    decay = {} if cls not in (LARS, LAMB) else {"decay": 0.75}
    variables = make_variables(start)
    inner = cls(RATE, gradient_accumulation_steps=2, **settings, **decay)
    optimizer, reference = wrap(inner), FORMULAS[cls](start, **settings)
    step = stepper(compiled_on_jax, optimizer, variables)
    for window, pair in enumerate(zip(gradients[::2], gradients[1::2], strict=True)):
        for grads in pair:
            assert_close(variables, reference.weights)
            step(grads)
        mean = [(np.float64(a) + b) / 2 for a, b in zip(*pair, strict=True)]
        # `decay` counts windows.
        reference.step(mean, RATE / (1 + decay.get("decay", 0.0) * window))
    assert_close(variables, reference.weights)
    assert int(inner.iterations) == 3


@each
def test_keras_weight_decay_shrinks_weights_before_each_step(
    wrap, start, gradients, cls, settings
):
    variables, inner = make_variables(start), cls(RATE, **settings)
    inner.weight_decay_rate, inner.weight_decay = 0.0, 0.25
    optimizer = wrap(inner)
    reference = FORMULAS[cls](start, **settings | {"weight_decay_rate": 0.0})
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.weights = [w * (1 - 0.25 * RATE) for w in reference.weights]
        reference.step(grads, RATE)
    assert_close(variables, reference.weights)


def test_constraint_holds_after_step(wrap):
    w = variable("w", [3.0, 4.0])
    w.constraint = keras.constraints.MinMaxNorm(max_value=1.0)
    apply(wrap(LARS(RATE)), [[1.0, 1.0]], [w])
    np.testing.assert_allclose(np.linalg.norm(values_of([w])[0]), 1.0, rtol=1e-5)


@each
def test_gradient_norm_that_overflows_only_when_scaled_skips_no_step(cls, settings):
    # 1e20 squared overflows float32; unscaled, no norm does. LAMB squares each element.
    size = 2.0**60 if cls is LAMB else 2.0**70
    inner, reference = cls(RATE, **settings), FORMULAS[cls]([[3.0, 4.0]], **settings)
    optimizer = LossScaleOptimizer(inner, initial_scale=2.0**20)
    variables = make_variables([[3.0, 4.0]])
    optimizer.apply([tensor([0.0, size])], variables)
    reference.step([[0.0, size / 2.0**20]], RATE)
    assert_as(inner, variables, reference)
    assert bool(optimizer.last_step_applied)
