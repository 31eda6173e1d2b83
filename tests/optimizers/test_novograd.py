"""`NovoGrad`: its arguments, its formula, edge cases, loss scaling and configs.

The reference is the formula in NumPy float64, which the integration tests hold against
optax.
"""

import inspect
import json

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LossScaleOptimizer, NovoGrad
from testing.keras_versions import excludes_after_build
from testing.optimizer_steps import SCALE, apply, in_loss_scale_optimizer
from testing.tensors import tensor

# JAX has float64 only where x64 is on; `tensor` skips where it is not.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")

# Float32 rounds by 6e-8; a step is some ten roundings of the largest number in it.
SHARE = 1e-6
NAMES = ["kernel", "gamma", "bias", "scale"]
SHAPES = [(2, 3, 2), (3,), (4,), ()]
FORMS = {
    "plain": {},
    "decayed": dict(weight_decay_rate=0.1, exclude_from_weight_decay=["bias"]),
    "averaged": dict(weight_decay_rate=0.1, grad_averaging=True, epsilon=0.5),
    "without averages": dict(weight_decay_rate=0.1, beta_1=0.0, beta_2=0.0),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def make_variables(start, dtype="float32"):
    return [
        keras.Variable(value, dtype=dtype, name=name)
        for name, value in zip(NAMES, start, strict=True)
    ]


def array(v):
    """In float64, in which every number of a narrower dtype is exact."""
    is_double = keras.backend.standardize_dtype(v.dtype) == "float64"
    v = ops.cast(v, "float64" if is_double else "float32")
    return np.array(ops.convert_to_numpy(v)).astype("float64")


@pytest.fixture
def start():
    random = np.random.default_rng(1)
    return [random.standard_normal(s).astype("float32") for s in SHAPES]


@pytest.fixture
def gradients():
    """Of six steps, of several magnitudes."""
    random = np.random.default_rng(2)
    return [
        [
            (size * random.standard_normal(s)).astype("float32")
            for s, size in zip(SHAPES, (1e-3, 1.0, 1e3, 1.0), strict=True)
        ]
        for _ in range(6)
    ]


class InNumPy:
    """`NovoGrad` in float64, as the docstring of the class has it."""

    def __init__(
        self,
        weights,
        beta_1=0.95,
        beta_2=0.98,
        epsilon=1e-8,
        weight_decay_rate=0.0,
        grad_averaging=False,
        exclude_from_weight_decay=(),
    ):
        self.weights = [np.asarray(w, "float64") for w in weights]
        self.m = [np.zeros_like(w) for w in self.weights]
        self.v = [0.0 for _ in self.weights]
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.decays = [
            0.0 if name in exclude_from_weight_decay else weight_decay_rate
            for name in NAMES[: len(weights)]
        ]
        self.share = 1 - beta_1 if grad_averaging else 1.0

    def step(self, grads, learning_rate):
        for i, g in enumerate(grads):
            g, w = np.asarray(g, "float64"), self.weights[i]
            square = np.sum(g**2)
            moved = self.beta_2 * self.v[i] + (1 - self.beta_2) * square
            self.v[i] = square if self.v[i] == 0 else moved
            d = g / np.sqrt(self.v[i] + self.epsilon) + self.decays[i] * w
            self.m[i] = self.beta_1 * self.m[i] + self.share * d
            self.weights[i] = w - learning_rate * self.m[i]


def assert_close(actual, expected, share=SHARE):
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        tolerance = share * np.abs(e).max(initial=0)
        np.testing.assert_allclose(array(a), e, rtol=0, atol=tolerance, err_msg=str(i))


def assert_as(optimizer, variables, reference, share=SHARE):
    assert_close(variables, reference.weights, share)
    assert_close(optimizer.momentums, reference.m, share)
    assert_close(optimizer.second_moments, reference.v, share)


# --- Arguments ----------------------------------------------------------------


def test_novograd_signature_has_expected_arguments_and_defaults():
    parameters = list(inspect.signature(NovoGrad).parameters.values())[:-1]
    # As a list: the order counts as well.
    assert [(p.name, p.default) for p in parameters] == [
        ("learning_rate", 0.01),
        ("beta_1", 0.95),
        ("beta_2", 0.98),
        ("epsilon", 1e-8),
        ("weight_decay_rate", 0.0),
        ("grad_averaging", False),
        ("exclude_from_weight_decay", None),
        ("name", "NovoGrad"),
    ]


@pytest.mark.parametrize(
    "settings, parts",
    [
        ({"beta_1": 1.5}, ["`beta_1`", "between 0 and 1", "1.5"]),
        ({"beta_2": "0.5"}, ["`beta_2`", "between 0 and 1", "'0.5'"]),
        ({"epsilon": -1.0}, ["`epsilon`", "zero or more", "-1.0"]),
        ({"weight_decay_rate": np.inf}, ["`weight_decay_rate`", "finite", "inf"]),
        ({"learning_rate": -1}, ["`learning_rate`", "zero or more"]),
        ({"grad_averaging": 1}, ["`grad_averaging`", "True or False"]),
        ({"exclude_from_weight_decay": "bias"}, ["must be a list", "'bias'"]),
        ({"lr": 0.5}, ["lr"]),
        (
            {"weight_decay_rate": 0.25, "weight_decay": 0.5},
            ["Give one", "weight_decay_rate=0.25", "weight_decay=0.5"],
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_novograd_rejects_invalid_arguments_with_specific_errors(settings, parts):
    with pytest.raises((ValueError, TypeError)) as error:
        NovoGrad(**settings)
    assert all(part in str(error.value) for part in parts), str(error.value)


# --- The formula --------------------------------------------------------------


@forms
def test_novograd_steps_match_formula_in_numpy(wrap, start, gradients, form):
    variables, inner = make_variables(start), NovoGrad(0.5, **form)
    optimizer, reference = wrap(inner), InNumPy(start, **form)
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.step(grads, 0.5)
        assert_as(inner, variables, reference)


def test_novograd_step_matches_hand_computed_values():
    w = keras.Variable([3.0, 4.0])
    optimizer = NovoGrad(
        0.5, beta_1=0.5, beta_2=0.75, epsilon=11.0, weight_decay_rate=0.25
    )
    # v is 25, its root with epsilon 6.
    optimizer.apply([tensor([3.0, -4.0])], [w])
    m = np.array([3 / 6 + 0.75, -4 / 6 + 1.0])
    assert_close([w], [[3.0, 4.0] - m / 2])
    assert array(optimizer.second_moments[0]) == 25
    # v is 18.75 + 0.25 * 25 = 25.
    optimizer.apply([tensor([-5.0, 0.0])], [w])
    assert array(optimizer.second_moments[0]) == 25


def test_novograd_steps_follow_schedule_and_changed_settings(wrap, start, gradients):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
    variables, inner = make_variables(start), NovoGrad(schedule)
    optimizer, reference = wrap(inner), InNumPy(start)
    for step, grads in enumerate(gradients):
        if step == 3:
            inner.beta_1 = reference.beta_1 = 0.5
        apply(optimizer, grads, variables)
        reference.step(grads, 0.5 * 0.5 ** (step / 2))
    assert_as(inner, variables, reference)


@forms
def test_subclass_without_changes_matches_novograd(wrap, start, gradients, form):
    """It has no rule: Keras updates one variable after the other."""

    class JustANewName(NovoGrad):
        pass

    variables, twins = make_variables(start), make_variables(start)
    optimizer, inner = wrap(NovoGrad(0.5, **form)), JustANewName(0.5, **form)
    subclass, reference = wrap(inner), InNumPy(start, **form)
    for grads in gradients:
        apply(optimizer, grads, variables)
        apply(subclass, grads, twins)
        reference.step(grads, 0.5)
    assert_close(twins, [array(v) for v in variables])
    assert_as(inner, twins, reference)


def test_novograd_has_momentum_and_scalar_second_moment_per_variable(start, gradients):
    variables, optimizer = make_variables(start), NovoGrad(0.5)
    optimizer.minimize(lambda: sum(ops.sum(v * v) for v in variables), variables)
    assert optimizer.get_slot_names() == ["m", "v"]
    m, v = ([optimizer.get_slot(w, name) for w in variables] for name in "mv")
    assert [tuple(slot.shape) for slot in m] == SHAPES
    assert [tuple(slot.shape) for slot in v] == [()] * 4
    assert [slot.name for slot in v] == [f"{name}_second_moment" for name in NAMES]
    # As tf.keras orders them, and without the learning rate.
    assert [id(w) for w in optimizer.weights[1:]] == [id(slot) for slot in m + v]
    assert len(optimizer.variables) == 2 + 2 * 4
    weights = optimizer.get_weights()
    twin = NovoGrad(0.5)
    twin.build(variables)
    twin.set_weights(weights)
    assert_close(twin.second_moments, [array(slot) for slot in v])


def test_variables_without_gradient_and_their_slots_stay_unchanged(
    wrap, start, snapshot
):
    variables, inner = make_variables(start), NovoGrad(0.5, weight_decay_rate=0.1)
    optimizer = wrap(inner)
    optimizer.build(variables)
    left_out = [variables[0], inner.momentums[0], inner.second_moments[0]]
    before = snapshot([*left_out, variables[1]])
    # A step for each but the first.
    grads = [None, *(ops.ones(s) for s in SHAPES[1:])]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply(grads, variables)
    after = snapshot([*left_out, variables[1]])
    assert after[:3] == before[:3]
    assert after[3] != before[3]


# --- Gradients of every kind --------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("epsilon", [1e-8, 0.0])
def test_first_nonzero_gradient_initializes_second_moment(wrap, compiled, epsilon):
    w, inner = keras.Variable([3.0, 4.0]), NovoGrad(0.5, beta_1=0.5, epsilon=epsilon)
    optimizer = wrap(inner)
    optimizer.build([w])
    step = compiled(lambda g: optimizer.apply([g], [w]), [w, *optimizer.variables])
    scale = 1.0 if optimizer is inner else SCALE
    for _ in range(2):
        step(tensor([0.0, 0.0]))
        assert array(w).tolist() == [3.0, 4.0]
        assert array(inner.second_moments[0]) == 0
    step(tensor([0.0, -100.0]) * scale)
    assert_close([w, inner.second_moments[0]], [[3.0, 4.5], 1e4])
    # Nothing but the momentum, and an average that falls.
    step(tensor([0.0, 0.0]))
    assert_close([w, inner.second_moments[0]], [[3.0, 4.75], 0.98e4])


def test_gradient_with_overflowing_norm_enters_neither_moment(wrap):
    w = keras.Variable([3.0, 4.0])
    inner = NovoGrad(0.5, beta_1=0.5)
    outer = wrap(inner)
    options = {"scaled": False} if outer is not inner else {}
    for gradient, expected in (
        ([1e25, -1e25], [3.0, 4.0]),
        ([0.0, 8.0], [3.0, 3.5]),
        ([1e25, -1e25], [3.0, 3.25]),
        ([0.0, 0.0], [3.0, 3.125]),
    ):
        outer.apply([tensor(gradient)], [w], **options)
        assert_close([w], [expected])
    # The last of them has let it fall; an inf would have stayed.
    assert_close(inner.second_moments, [64 * 0.98])
    assert int(inner.iterations) == 4


def test_gradient_norm_that_overflows_only_when_scaled_skips_no_step():
    # 2**70 squared overflows float32; unscaled, the norm does not.
    w, inner = keras.Variable([3.0, 4.0]), NovoGrad(0.5)
    optimizer = LossScaleOptimizer(inner, initial_scale=2.0**20)
    optimizer.apply([tensor([0.0, 2.0**70])], [w])
    assert_close([w, inner.second_moments[0]], [[3.0, 3.5], 2.0**100])
    assert bool(optimizer.last_step_applied)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float16_and_bfloat16_variables_step_in_float32(dtype):
    w = keras.Variable([3.0, 4.0], dtype=dtype)
    optimizer = NovoGrad(0.5, beta_1=0.5, weight_decay_rate=0.25)
    reference = InNumPy([[3.0, 4.0]], beta_1=0.5, weight_decay_rate=0.25)
    # The squares of these overflow float16.
    for gradient in ([1024.0, 512.0], [-4096.0, 0.5]):
        optimizer.apply([tensor(gradient, dtype)], [w])
        reference.step([gradient], 0.5)
    # What is left is the rounding of the weights and the momentum themselves.
    epsilon = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert_close([w], reference.weights, 3 * epsilon)
    assert_close(optimizer.second_moments, reference.v)
    dtypes = [optimizer.momentums[0].dtype, optimizer.second_moments[0].dtype]
    assert dtypes == [dtype, "float32"]


def test_float64_variables_step_in_float64(start, gradients):
    tensor(0.0, "float64")  # skips where there is none
    variables = make_variables(start, "float64")
    form = FORMS["averaged"]
    optimizer, reference = NovoGrad(0.5, **form), InNumPy(start, **form)
    for grads in gradients:
        optimizer.apply([tensor(g, "float64") for g in grads], variables)
        reference.step(grads, 0.5)
    assert_as(optimizer, variables, reference, 1e-13)


def test_sparse_gradients_step_like_dense_gradients(wrap, sparse_gradient):
    values = np.array([[8.0, 1.0], [16.0, 2.0], [24.0, 3.0]], "float32")
    # One row twice: the norm is of their sum.
    rows = [2, 0, 0]
    dense = np.zeros((4, 2), "float32")
    np.add.at(dense, rows, values)
    results = []
    for gradient in (sparse_gradient(values, rows, (4, 2)), tensor(dense)):
        table = keras.Variable(np.arange(1.0, 9.0).reshape(4, 2), name="table")
        inner = NovoGrad(0.5, weight_decay_rate=0.1)
        outer = wrap(inner)
        options = {"scaled": False} if outer is not inner else {}
        for _ in range(2):
            outer.apply([gradient], [table], **options)
        results.append([table, *inner.second_moments])
    assert_close(results[0][1:], [np.sum(dense**2)])
    assert_close(results[0], [array(v) for v in results[1]])


def test_variable_overwritten_by_gradient_takes_no_step(wrap):
    w, overwritten = keras.Variable([3.0, 4.0]), keras.Variable(1.0)
    overwritten.overwrite_with_gradient = True
    inner = NovoGrad(0.5)
    optimizer = wrap(inner)
    optimizer.build([w, overwritten])
    # Such a gradient is not scaled.
    gradient = tensor([0.0, 2.0 * (1.0 if optimizer is inner else SCALE)])
    optimizer.apply([gradient, tensor(7.0)], [w, overwritten])
    assert_close([w, overwritten], [[3.0, 3.5], 7.0])
    assert inner.second_moments[1] is None


# --- Who is not decayed ---------------------------------------------------------


def test_patterns_and_keras_method_exclude_variables_from_decay(wrap, start):
    """With gradients of zeros a variable moves by its decay alone."""
    variables = make_variables(start)
    inner = NovoGrad(
        0.5,
        beta_1=0.0,
        weight_decay_rate=0.5,
        exclude_from_weight_decay=["^bias$", "gam+a"],
    )
    optimizer = wrap(inner)
    optimizer.build(variables)

    def factors():
        before = [array(v) for v in variables]
        optimizer.apply([ops.zeros(s) for s in SHAPES], variables)
        ratios = [
            array(v).flat[0] / b.flat[0] for v, b in zip(variables, before, strict=True)
        ]
        return pytest.approx(ratios, rel=SHARE)

    assert factors() == [0.75, 1.0, 1.0, 0.75]
    if excludes_after_build:
        inner.exclude_from_weight_decay(var_names=["kernel"])
        assert factors() == [1.0, 1.0, 1.0, 0.75]


def test_exclusions_apply_to_keras_decoupled_weight_decay(start):
    variables = make_variables(start)
    optimizer = NovoGrad(
        0.5, weight_decay=0.5, exclude_from_weight_decay=["bias", "gamma"]
    )
    optimizer.apply([ops.zeros(s) for s in SHAPES], variables)
    expected = [w * f for w, f in zip(start, (0.75, 1.0, 1.0, 0.75), strict=True)]
    assert_close(variables, expected)


def test_masters_inherit_exclusions_of_float16_variables():
    variables = make_variables([[2.0], [2.0], [2.0], [2.0]], "float16")
    inner = NovoGrad(
        0.5, weight_decay_rate=0.5, exclude_from_weight_decay=["bias", "scale"]
    )
    inner.exclude_from_weight_decay(var_list=[variables[1]])
    optimizer = LossScaleOptimizer(inner)
    optimizer.apply([ops.zeros(1, dtype="float16")] * 4, variables)
    assert [float(array(v)[0]) for v in variables] == [1.5, 2.0, 2.0, 2.0]


# --- The keywords of every Keras optimizer --------------------------------------


def test_gradients_are_clipped_before_second_moment_is_computed(wrap):
    w, inner = keras.Variable([3.0, 4.0]), NovoGrad(0.5, clipnorm=5.0)
    apply(wrap(inner), [[30.0, 40.0]], [w])
    assert_close([w, inner.second_moments[0]], [[2.7, 3.6], 25.0])


def test_accumulated_gradients_take_one_step_of_their_mean(
    wrap, compiled_on_jax, start, gradients
):
    variables = make_variables(start)
    inner = NovoGrad(0.5, gradient_accumulation_steps=2)
    optimizer, reference = wrap(inner), InNumPy(start)
    optimizer.build(variables)
    step = compiled_on_jax(
        lambda grads: optimizer.apply(grads, variables),
        [*variables, *optimizer.variables],
    )
    scale = 1.0 if optimizer is inner else SCALE
    for first, second in zip(gradients[::2], gradients[1::2], strict=True):
        step([tensor(g * scale) for g in first])
        step([tensor(g * scale) for g in second])
        reference.step([(a + b) / 2 for a, b in zip(first, second, strict=True)], 0.5)
    assert_close(variables, reference.weights)


def test_ema_averages_weights_after_each_step(wrap, start, gradients):
    variables = make_variables(start)
    optimizer = wrap(NovoGrad(0.5, use_ema=True, ema_momentum=0.5))
    reference, averages = InNumPy(start), None
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.step(grads, 0.5)
        averages = [
            w if a is None else (a + w) / 2
            for a, w in zip(averages or [None] * 4, reference.weights, strict=True)
        ]
    optimizer.finalize_variable_values(variables)
    assert_close(variables, averages)


# --- Loss scaling ---------------------------------------------------------------


def one_side(compiled, start, settings, wrap):
    """A step of NovoGrad, its variables and slots, and the NovoGrad itself."""
    variables, inner = make_variables(start), NovoGrad(0.5, **settings)
    optimizer = wrap(inner)
    optimizer.build(variables)
    call = compiled(
        lambda grads: optimizer.apply(grads, variables),
        [*variables, *optimizer.variables],
    )
    return call, [*variables, *inner.momentums, *inner.second_moments], inner


def as_it_is(function, variables):
    return function


def in_a_fixed_scale(optimizer):
    return LossScaleOptimizer(optimizer, dynamic=False, initial_scale=SCALE)


@pytest.mark.exhaustive
@forms
def test_loss_scaled_steps_match_unscaled_steps_despite_skipped_steps(
    compiled, start, gradients, form, snapshot
):
    # A step is skipped before each that is applied: the first one has no moments yet.
    plain, state, _ = one_side(compiled, start, form, lambda o: o)
    scaled, state_inside, inner = one_side(compiled, start, form, in_a_fixed_scale)
    for number, grads in enumerate(gradients):
        if number == 1:
            # Zeros of both signs are among what must stay.
            for side in (state, state_inside):
                for v in side[1], side[5]:
                    v.assign(np.array([-0.0, 0.0, -0.0], "float32"))
        before = snapshot([*state_inside, *inner.variables])
        bad, where = (np.inf, -np.inf, np.nan)[number % 3], number % len(NAMES)
        poisoned = [np.array(g) for g in grads]
        poisoned[where].flat[-1] = bad
        scaled([tensor(g) for g in poisoned])
        assert snapshot([*state_inside, *inner.variables]) == before, (bad, where)
        plain([tensor(g) for g in grads])
        scaled([tensor(g * SCALE) for g in grads])
        assert_close(state_inside, [array(v) for v in state], 2e-6)
    assert int(inner.iterations) == len(gradients)


@forms
def test_eager_loss_scaled_steps_are_bitwise_equal_to_unscaled_steps(
    start, gradients, form, snapshot
):
    # A compiler contracts products and sums, here and there another way.
    plain, state, _ = one_side(as_it_is, start, form, lambda o: o)
    scaled, state_inside, _ = one_side(as_it_is, start, form, in_loss_scale_optimizer)
    for grads in gradients:
        plain([tensor(g) for g in grads])
        scaled([tensor(g * SCALE) for g in grads])
        assert snapshot(state_inside) == snapshot(state)


def test_stateless_steps_are_bitwise_equal_to_apply(wrap, start, gradients, snapshot):
    if keras.backend.backend() == "tensorflow":
        pytest.skip("Keras has no stateless_apply on TensorFlow")
    variables, inner = make_variables(start), NovoGrad(0.5, weight_decay_rate=0.1)
    optimizer = wrap(inner)
    optimizer.build(variables)
    factor = 1.0 if optimizer is inner else SCALE
    before = snapshot([*variables, *optimizer.variables])
    trained = [ops.copy(ops.convert_to_tensor(v)) for v in variables]
    state = [ops.copy(ops.convert_to_tensor(v)) for v in optimizer.variables]
    for grads in gradients:
        trained, state = optimizer.stateless_apply(
            state, [tensor(g * factor) for g in grads], trained
        )
    assert snapshot([*variables, *optimizer.variables]) == before
    for grads in gradients:
        apply(optimizer, grads, variables)
    assert snapshot(variables) == snapshot(trained)
    assert snapshot(optimizer.variables) == snapshot(state)


# --- Configs --------------------------------------------------------------------

CONFIGURED = {
    "by default": {},
    "numbers": dict(
        learning_rate=0.5,
        beta_1=0.75,
        beta_2=0.25,
        epsilon=0.125,
        weight_decay_rate=0.5,
        grad_averaging=True,
        name="mine",
    ),
    "list": dict(exclude_from_weight_decay=["bn", r"bias$"], clipnorm=1.0),
    "empty list": dict(exclude_from_weight_decay=[], weight_decay=0.5),
}


@pytest.mark.parametrize("settings", CONFIGURED.values(), ids=CONFIGURED)
def test_novograd_round_trips_through_config(settings):
    optimizer = NovoGrad(**settings)
    config = optimizer.get_config()
    assert {key: config[key] for key in settings} == settings
    serialized = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    for twin in (
        NovoGrad.from_config(optimizer.get_config()),
        keras.optimizers.deserialize(serialized),
        keras_lso.deserialize(serialized),
    ):
        assert type(twin) is NovoGrad
        assert twin.get_config() == config
    # What is done to a config does not show in the optimizer.
    if config["exclude_from_weight_decay"] is not None:
        config["exclude_from_weight_decay"].append("x")
        assert optimizer.get_config() != config
