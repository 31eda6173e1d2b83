"""`LAMB`: its arguments, its formula, whom it excludes, bounds, configs, loss scaling.

The reference is the formula in NumPy float64. The Model Garden's and optax's own code
are references in the integration tests. `test_lars*.py` has what LAMB shares with LARS.
"""

import inspect
import json

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LAMB, LossScaleOptimizer
from testing.optimizer_steps import SCALE, apply
from testing.tensors import tensor

# Float32 rounds by 6e-8; a step is some ten roundings of the largest number in it, and
# the norm of the weights feeds them back.
SHARE = 2e-6
NAMES = ["kernel", "gamma", "bias", "scale"]
SHAPES = [(3, 4), (4,), (2,), ()]


def array(value):
    return np.array(ops.convert_to_numpy(value))


def make_variables(values, dtype="float32"):
    return [
        keras.Variable(value, dtype=dtype, name=name)
        for name, value in zip(NAMES, values, strict=False)
    ]


@pytest.fixture
def start():
    random = np.random.default_rng(1)
    values = [random.standard_normal(s).astype("float32") for s in SHAPES]
    return [*values[:2], np.zeros_like(values[2]), values[3]]


@pytest.fixture
def gradients():
    """Of six steps."""
    random = np.random.default_rng(2)
    return [
        [random.standard_normal(s).astype("float32") for s in SHAPES] for _ in range(6)
    ]


class InNumPy:
    """`LAMB` in float64, as the docstring of the class has it."""

    def __init__(
        self,
        weights,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        weight_decay_rate=0.0,
        bias_correction=True,
        min_trust_ratio=None,
        max_trust_ratio=None,
        exclude_from_weight_decay=(),
        exclude_from_layer_adaptation=None,
    ):
        self.weights = [np.asarray(w, "float64") for w in weights]
        self.m = [np.zeros_like(w) for w in self.weights]
        self.v = [np.zeros_like(w) for w in self.weights]
        # 1 - 0.999 in float32 is off by 5e-5, and so are the velocities.
        self.betas = float(np.float32(beta_1)), float(np.float32(beta_2))
        self.epsilon, self.decay = epsilon, weight_decay_rate
        self.bias_correction, self.t = bias_correction, 0
        self.bounds = min_trust_ratio or 0.0, max_trust_ratio or np.inf
        self.not_decayed = exclude_from_weight_decay
        self.not_adapted = exclude_from_layer_adaptation
        if self.not_adapted is None:
            self.not_adapted = exclude_from_weight_decay

    def step(self, grads, learning_rate):
        self.t += 1
        beta_1, beta_2 = self.betas
        for i, (g, w) in enumerate(zip(grads, self.weights, strict=True)):
            g = np.asarray(g, "float64")
            m = self.m[i] = beta_1 * self.m[i] + (1 - beta_1) * g
            v = self.v[i] = beta_2 * self.v[i] + (1 - beta_2) * g**2
            if self.bias_correction:
                m, v = m / (1 - beta_1**self.t), v / (1 - beta_2**self.t)
            d = m / (np.sqrt(v) + self.epsilon)
            d = d + self.decay * w * (NAMES[i] not in self.not_decayed)
            norms = np.linalg.norm(w), np.linalg.norm(d)
            ratio = 1.0
            if all(norms) and NAMES[i] not in self.not_adapted:
                ratio = np.clip(norms[0] / norms[1], *self.bounds)
            self.weights[i] = w - learning_rate * ratio * d


def assert_close(actual, expected, share=SHARE):
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        tolerance = share * np.abs(e).max(initial=0)
        a = array(ops.cast(a, "float32"))
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance, err_msg=str(i))


# --- Arguments ----------------------------------------------------------------


def test_lamb_signature_has_model_garden_arguments_and_four_keywords():
    parameters = inspect.signature(LAMB).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    # As lists: the order counts as well.
    assert [(p.name, p.default) for p in positional] == [
        ("learning_rate", 0.001),
        ("beta_1", 0.9),
        ("beta_2", 0.999),
        ("epsilon", 1e-6),
        ("weight_decay_rate", 0.0),
        ("exclude_from_weight_decay", None),
        ("exclude_from_layer_adaptation", None),
        ("name", "LAMB"),
    ]
    assert [(p.name, p.default) for p in keywords] == [
        ("bias_correction", True),
        ("min_trust_ratio", None),
        ("max_trust_ratio", None),
        ("exclude_1d", False),
    ]


@pytest.mark.parametrize(
    "settings, parts",
    [
        ({"beta_1": 1.0}, ["`beta_1`", "below 1", "1.0"]),
        ({"beta_2": -0.5}, ["`beta_2`", "-0.5"]),
        ({"beta_2": "0.5"}, ["`beta_2`", "'0.5'"]),
        ({"beta_1": False}, ["`beta_1`", "False"]),
        # In float32 it is 1, and the bias correction a division by 0.
        ({"beta_2": 1 - 1e-8}, ["`beta_2`", "below 1 in float32", "0.99999999"]),
        ({"epsilon": -1.0}, ["`epsilon`", "zero or more", "-1.0"]),
        ({"weight_decay_rate": np.inf}, ["`weight_decay_rate`", "finite", "inf"]),
        ({"learning_rate": -1}, ["`learning_rate`", "zero or more"]),
        ({"bias_correction": 1}, ["`bias_correction`", "True or False"]),
        ({"min_trust_ratio": -1.0}, ["`min_trust_ratio`", "zero or more"]),
        ({"max_trust_ratio": "10"}, ["`max_trust_ratio`", "'10'"]),
        (
            {"min_trust_ratio": 2.0, "max_trust_ratio": 1.0},
            ["must not exceed", "min_trust_ratio=2.0", "max_trust_ratio=1.0"],
        ),
        ({"exclude_from_weight_decay": "bias"}, ["must be a list", "'bias'"]),
        ({"exclude_1d": None}, ["`exclude_1d`", "True or False"]),
        ({"learning_rate": 0.5, "lr": 0.25}, ["Give one of them", "lr=0.25"]),
        (
            {"weight_decay_rate": 0.25, "weight_decay": 0.5},
            ["Give one of them", "weight_decay_rate=0.25", "LAMB as published"],
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_lamb_rejects_invalid_arguments_with_specific_errors(settings, parts):
    with pytest.raises((ValueError, TypeError)) as error:
        LAMB(**settings)
    assert all(part in str(error.value) for part in parts), str(error.value)


# --- The formula --------------------------------------------------------------

FORMS = {
    "by default": {},
    "decay": dict(weight_decay_rate=0.1),
    "no bias correction": dict(bias_correction=False, weight_decay_rate=0.1),
    "betas of zero": dict(beta_1=0.0, beta_2=0.0, epsilon=0.5),
    "bounded": dict(min_trust_ratio=0.5, max_trust_ratio=0.75),
    "excluded": dict(
        weight_decay_rate=0.1, exclude_from_weight_decay=["gamma", "bias"]
    ),
    "excluded from decay alone": dict(
        weight_decay_rate=0.1,
        exclude_from_weight_decay=["gamma"],
        exclude_from_layer_adaptation=[],
    ),
    "excluded from adaptation alone": dict(
        weight_decay_rate=0.1, exclude_from_layer_adaptation=["kernel"]
    ),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_lamb_steps_match_formula_in_numpy(wrap, start, gradients, form):
    variables, inner = make_variables(start), LAMB(0.1, **form)
    optimizer, reference = wrap(inner), InNumPy(start, **form)
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.step(grads, 0.1)
        assert_close(variables, reference.weights)
        assert_close(inner.momentums, reference.m)
        assert_close(inner.velocities, reference.v)


def test_lamb_step_matches_hand_computed_values():
    # Without bias correction m is 4 and v 16; d is 4 / (4 + 4) + 0.5 * (3, 4).
    w = keras.Variable([3.0, 4.0])
    optimizer = LAMB(0.5, 0.5, 0.75, 4.0, 0.5, bias_correction=False)
    apply(optimizer, [[8.0, 8.0]], [w])
    d = np.array([2.0, 2.5])
    assert_close([w], [[3.0, 4.0] - 0.5 * 5.0 / np.linalg.norm(d) * d])
    assert array(optimizer.momentums[0]).tolist() == [4.0, 4.0]
    assert array(optimizer.velocities[0]).tolist() == [16.0, 16.0]
    assert [v.name for v in optimizer.variables[2:]] == [
        f"{w.name}_momentum",
        f"{w.name}_velocity",
    ]


@pytest.mark.parametrize("zero", ["weights", "gradients", "both"])
def test_trust_ratio_is_one_where_norm_is_zero(wrap, zero):
    """Whatever the bounds, as in DeepSpeed, which has them."""
    w = np.zeros(2) if zero != "gradients" else np.array([3.0, 4.0])
    g = np.zeros(2) if zero != "weights" else np.array([8.0, -8.0])
    inner = LAMB(0.5, 0.5, 0.75, 4.0, bias_correction=False, min_trust_ratio=3.0)
    variable = keras.Variable(w, dtype="float32")
    apply(wrap(inner), [g], [variable])
    assert array(variable).tolist() == (w - 0.5 * g / 16).tolist()


@pytest.mark.parametrize("bounds, ratio", [((None, 2.0), 2.0), ((6.0, None), 6.0)])
def test_trust_ratio_is_clipped_to_bounds(wrap, bounds, ratio):
    # |w| is 5, |d| is 1.
    w = keras.Variable([3.0, 4.0])
    lower, upper = bounds
    inner = LAMB(0.125, min_trust_ratio=lower, max_trust_ratio=upper)
    apply(wrap(inner), [[2.0, 0.0]], [w])
    assert_close([w], [[3.0 - 0.125 * ratio, 4.0]])


def test_epsilon_zero_is_replaced_by_keras_default():
    assert LAMB(epsilon=0).epsilon == keras.config.epsilon()


def test_exclude_1d_excludes_vectors_and_scalars_from_decay_and_adaptation(
    wrap, start, gradients
):
    form = dict(weight_decay_rate=0.1)
    excluded = {"exclude_from_weight_decay": NAMES[1:]}
    variables, reference = make_variables(start), InNumPy(start, **form, **excluded)
    optimizer = wrap(LAMB(0.1, exclude_1d=True, **form))
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.step(grads, 0.1)
    assert_close(variables, reference.weights)


def test_lamb_steps_follow_schedule_with_decay_and_changed_settings(
    wrap, start, gradients
):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    variables, inner = make_variables(start), LAMB(schedule, decay=0.5)
    optimizer, reference = wrap(inner), InNumPy(start)
    for step, grads in enumerate(gradients):
        if step == 3:
            inner.beta_1, inner.weight_decay_rate = 0.5, 0.25
            reference.betas, reference.decay = (0.5, reference.betas[1]), 0.25
        apply(optimizer, grads, variables)
        reference.step(grads, 0.1 * 0.5 ** (step / 2) / (1 + 0.5 * step))
    assert_close(variables, reference.weights)


def test_subclass_without_changes_matches_formula(wrap, start, gradients):
    """It has no rule: Keras updates one variable after the other."""

    class JustANewName(LAMB):
        pass

    variables, reference = make_variables(start), InNumPy(start, weight_decay_rate=0.1)
    optimizer = wrap(JustANewName(0.1, weight_decay_rate=0.1))
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.step(grads, 0.1)
    assert_close(variables, reference.weights)


@pytest.mark.full
def test_compiled_lamb_steps_match_formula(compiled, start, gradients):
    variables, inner = make_variables(start), LAMB(0.1, weight_decay_rate=0.1)
    optimizer = LossScaleOptimizer(inner, initial_scale=SCALE)
    optimizer.build(variables)

    def step(grads):
        optimizer.apply(grads, variables)

    call = compiled(step, [*variables, *optimizer.variables])
    reference = InNumPy(start, weight_decay_rate=0.1)
    for grads in gradients:
        call([tensor(g * SCALE) for g in grads])
        reference.step(grads, 0.1)
    assert_close(variables, reference.weights)


# --- Loss scaling, and gradients of every kind --------------------------------


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_overflow_changes_no_state_and_is_not_counted_as_step(start, gradients, bad):
    variables, inner = make_variables(start), LAMB(0.1, weight_decay_rate=0.1)
    optimizer = LossScaleOptimizer(inner, initial_scale=SCALE)
    optimizer.build(variables)
    reference = InNumPy(start, weight_decay_rate=0.1)
    for number, grads in enumerate(gradients):
        if number in (0, 3):
            before = [array(v).tobytes() for v in [*variables, *inner.variables]]
            poisoned = [g.copy() for g in grads]
            poisoned[number % 2].flat[-1] = bad
            apply(optimizer, poisoned, variables)
            after = [array(v).tobytes() for v in [*variables, *inner.variables]]
            assert after == before
            optimizer.dynamic_scale.assign(SCALE)
        apply(optimizer, grads, variables)
        # The bias correction counts applied steps only.
        reference.step(grads, 0.1)
    assert int(optimizer.skipped_steps) == 2
    assert_close(variables, reference.weights)


def test_float16_variables_are_updated_through_float32_masters(start, gradients):
    variables = make_variables(start, "float16")
    inner = LAMB(0.1, weight_decay_rate=0.1, exclude_1d=True)
    optimizer = LossScaleOptimizer(inner, initial_scale=SCALE)
    reference = InNumPy(
        [array(v) for v in variables],
        weight_decay_rate=0.1,
        exclude_from_weight_decay=NAMES[1:],
    )
    for grads in gradients:
        grads = [g.astype("float16") for g in grads]
        given = [tensor(g * np.float16(SCALE), "float16") for g in grads]
        optimizer.apply(given, variables)
        reference.step(grads, 0.1)
    assert {v.dtype for v in [*inner.momentums, *inner.velocities]} == {"float32"}
    # What is left is the rounding of the weights themselves.
    assert_close(variables, reference.weights, 2.0**-11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float16_and_bfloat16_variables_step_in_float32(dtype):
    [w] = make_variables([[3.0, 4.0]], dtype)
    optimizer, reference = LAMB(0.1, epsilon=0.5), InNumPy([[3.0, 4.0]], epsilon=0.5)
    for gradient in ([1.0, 2.0], [-4.0, 0.5]):
        optimizer.apply([tensor(gradient, dtype)], [w])
        reference.step([gradient], 0.1)
        epsilon = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        assert_close([w], reference.weights, 3 * epsilon)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_float64_variables_step_in_float64(start, gradients):
    variables = make_variables(start, "float64")
    if keras.backend.standardize_dtype(variables[0].value.dtype) != "float64":
        pytest.skip("This backend has no float64 here (JAX: x64 is off)")
    # The rate, a float32, is no more than that.
    optimizer, reference = LAMB(0.125), InNumPy(start)
    reference.betas = 0.9, 0.999
    for grads in gradients:
        optimizer.apply([tensor(g, "float64") for g in grads], variables)
        reference.step(grads, 0.125)
    for v, expected in zip(variables, reference.weights, strict=True):
        np.testing.assert_allclose(array(v), expected, rtol=1e-11)


def test_sparse_gradients_step_like_dense_gradients(wrap, sparse_gradient):
    values = np.array([[8.0, 1.0], [16.0, 2.0], [24.0, 3.0]], "float32")
    rows = [2, 0, 0]
    dense = np.zeros((4, 2), "float32")
    np.add.at(dense, rows, values)
    start = np.arange(1.0, 9.0, dtype="float32").reshape(4, 2)
    tables = []
    for gradient in (sparse_gradient(values, rows, (4, 2)), tensor(dense)):
        table = keras.Variable(start)
        optimizer = wrap(LAMB(0.1, weight_decay_rate=0.1))
        for _ in range(2):
            optimizer.apply([gradient], [table])
        tables.append(array(table))
    assert_close(tables[:1], tables[1:])
    # Rows without a gradient move too: by their momentum, and by their decay.
    assert (tables[0] != start).all()


def test_trust_ratios_predict_next_step(start, gradients):
    variables, optimizer = make_variables(start), LAMB(0.1, exclude_1d=True)
    optimizer.build(variables)
    for number, grads in enumerate(gradients[:2]):
        ratios = optimizer.trust_ratios([tensor(g) for g in grads])
        assert list(ratios) == ["kernel"]
        before = array(variables[0])
        apply(optimizer, grads, variables)
        step = np.linalg.norm(before - array(variables[0]))
        # A step is as long as the rate times |w|, and |d| what it is then divided by.
        moments = InNumPy(start)
        for g in gradients[: 1 + number]:
            moments.step(g, 0.0)
        m = moments.m[0] / (1 - moments.betas[0] ** moments.t)
        v = moments.v[0] / (1 - moments.betas[1] ** moments.t)
        d = np.linalg.norm(m / (np.sqrt(v) + 1e-6))
        assert float(ratios["kernel"]) == pytest.approx(step / 0.1 / d, rel=1e-5)


# --- Configs ------------------------------------------------------------------


def test_lamb_round_trips_through_config():
    settings = dict(
        learning_rate=0.5,
        beta_1=0.25,
        beta_2=0.75,
        epsilon=0.125,
        weight_decay_rate=0.5,
        exclude_from_weight_decay=["bias"],
        exclude_from_layer_adaptation=[],
        name="mine",
        bias_correction=False,
        min_trust_ratio=0.5,
        max_trust_ratio=2.0,
        exclude_1d=True,
        decay=0.25,
        clipnorm=2.0,
    )
    optimizer = LAMB(**settings)
    config = optimizer.get_config()
    assert {key: config[key] for key in settings} == settings
    for twin in (
        LAMB.from_config(json.loads(json.dumps(config))),
        keras_lso.deserialize(keras.optimizers.serialize(optimizer)),
    ):
        assert type(twin) is LAMB
        assert twin.get_config() == config


def test_keras_weight_decay_round_trips_through_config():
    config = LAMB(weight_decay=0.25).get_config()
    twin = LAMB.from_config(config)
    assert (twin.weight_decay, twin.weight_decay_rate) == (0.25, 0.0)


def test_from_config_accepts_weight_decay_none():
    config = keras.optimizers.Lamb(0.5).get_config()
    assert config["weight_decay"] is None
    read = LAMB.from_config(config)
    assert (read.weight_decay, read.weight_decay_rate) == (None, 0.0)
    assert float(read.learning_rate) == 0.5
