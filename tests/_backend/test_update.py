"""`update` against the Keras optimizer's own step, and what it takes.

Whole steps are compared in `tests/test_fast_paths.py`.
"""

from functools import partial

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LAMB, LARS, NovoGrad
from keras_lso._backend import backend
from keras_lso._backend.leaves import Leaf, Leaves
from keras_lso._core.rule_update import RuleStep, RuleUpdate, StepLeaves
from keras_lso._keras_internals import rules
from keras_lso._keras_internals.optimizers import iteration_variable
from keras_lso._keras_internals.rules import fitting_rule, slot_lists_of
from keras_lso._keras_internals.variables import storage_of
from keras_lso.optimizers.lamb import LAMBRule
from keras_lso.optimizers.lars import LARSRule
from testing import optimizers as table
from testing.keras_versions import takes_muon
from testing.primitives import implementations, in_each_way, storage
from testing.tensors import numpy, tensor

# JAX has float64 only where x64 is on; `tensor` skips where it is not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
]


each_update = in_each_way("update", implementations("update"))

# What the table has at one rate, with other hyperparameters as well.
MORE = {
    "adam": partial(keras.optimizers.Adam, 0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-5),
    "adam with a schedule": partial(
        keras.optimizers.Adam, keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
    "nadam": partial(keras.optimizers.Nadam, 0.01, beta_1=0.8, beta_2=0.95),
    "adamax": partial(keras.optimizers.Adamax, 0.01, beta_1=0.8, beta_2=0.95),
    "lion": partial(keras.optimizers.Lion, 0.01, beta_1=0.8, beta_2=0.95),
    "rmsprop": partial(keras.optimizers.RMSprop, 0.1, rho=0.8, epsilon=1e-5),
    "lars with a schedule and decay": partial(
        LARS, keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5), decay=0.5
    ),
    "lamb, bounded": partial(
        LAMB, 0.1, 0.8, 0.95, bias_correction=False, min_trust_ratio=0.25
    ),
}
if takes_muon:
    # Of both parts, what is not the default.
    MORE["muon, other parts"] = partial(
        keras.optimizers.Muon,
        0.01,
        weight_decay=None,
        adam_weight_decay=0.1,
        adam_lr_ratio=0.25,
        nesterov=False,
        rms_rate=None,
    )


def has_rule_with(make, argument, value):
    """Whether an optimizer steps by a rule with this value of an argument of its."""
    if not hasattr(make(0.5), argument):
        return False
    try:
        return rules.registered_rule(make(**{"learning_rate": 0.5, argument: value}))
    except ValueError:  # Its class refuses the value.
        return False


# The least and the largest value that each may have.
LIMITS = {"epsilon": [0.0], "learning_rate": [0.0]}
LIMITS |= dict.fromkeys(("beta_1", "beta_2", "momentum", "rho"), [0.0, 1.0])
# Few of them are as sensitive to the rate as their norms are.
RATES = {"keras lamb": 0.01, **dict.fromkeys(table.OURS, 0.5), "lamb": 0.1}
OPTIMIZERS = {
    **MORE,
    **{
        f"{name} at {rate}{', with decay' if options else ''}": partial(
            make, rate, **options
        )
        for name, make in table.OPTIMIZERS.items()
        for rate in [RATES.get(name, 0.01)]
        for options in ({}, table.decaying(make))
    },
    **{
        f"{name}, {argument}={value}": partial(
            make, **{"learning_rate": RATES.get(name, 0.01), argument: value}
        )
        for name, make in table.OPTIMIZERS.items()
        for argument, values in LIMITS.items()
        for value in values
        if has_rule_with(make, argument, value)
    },
}
if keras.backend.backend() == "jax":
    # No other rule has a fused step there: XLA fuses the optimizer's own.
    OPTIMIZERS = {
        n: make for n, make in OPTIMIZERS.items() if n.startswith(("la", "novo"))
    }


# Subclasses, which Keras updates variable by variable.
STEP_BY_STEP = {cls: type("StepByStep", (cls,), {}) for cls in (LARS, LAMB, NovoGrad)}


def plain_optimizer(make):
    """The optimizer itself, whose steps no kernel takes."""
    optimizer = make()
    twin = STEP_BY_STEP.get(type(optimizer))
    return twin.from_config(optimizer.get_config()) if twin else optimizer


LAMBS = LAMBRule, rules.Lamb


class FusedOptimizer:
    """A Keras optimizer whose steps are taken by `update`."""

    def __init__(self, make, weights, update):
        self.update = update
        self.weights = [keras.Variable(w) for w in weights]
        self.optimizer = make()
        self.optimizer.build(self.weights)
        self.state = self.weights + self.optimizer.variables
        initial = map(ops.convert_to_numpy, self.state)
        self.largest = np.array([np.abs(v).max(initial=0) for v in initial])
        self.rule = fitting_rule(self.optimizer, self.weights)

    def step(self, grads, finite, inv_scale):
        update = RuleUpdate(self.rule, self.optimizer, self.weights)
        step = RuleStep(update, grads, StepLeaves(update.weights.stored()))
        step.make_rules()
        lists = slot_lists_of(self.rule, self.optimizer)
        leaves = Leaves.of([Leaf(v) for v in self.weights], lists)
        leaves = leaves.mapped(partial(storage, self.update))
        self.update(step.rules, leaves, grads, inv_scale, finite)
        if self.rule.finish:
            step.rules[0].finish(self.optimizer, finite)
        iteration = iteration_variable(self.optimizer)
        iteration.assign_add(ops.cast(finite, iteration.dtype))

    def assert_close_to(self, weights, optimizer):
        """Equal to a share of the largest magnitude that each tensor has had."""
        actual = [ops.convert_to_numpy(v) for v in self.state]
        magnitudes = [np.abs(a).max(initial=0) for a in actual]
        self.largest = np.maximum(self.largest, magnitudes)
        # Weights: some eight roundings of 1.2e-7 each. Slots: 1 - beta_2 is 0.001 to
        # Keras and 1 - float32(0.999) to a kernel in float32. These are 1.3e-5 apart,
        # and the velocities are proportional to it. Nadam's formula has the latter, but
        # on PyTorch Keras has the former; its steps are divided by the root of them.
        # LAMB's rate is of the norm of the weights, which feeds their errors back. Each
        # of Muon's five iterations may multiply an error by 3.4.
        of_weights = dict.fromkeys([rules.Nadam, rules.Muon], 1e-5)
        of_weights |= dict.fromkeys(LAMBS, 2e-6)
        of_weights = of_weights.get(self.rule, 1e-6)
        shares = [of_weights] * len(weights) + [2e-5] * len(optimizer.variables)
        expected = [*weights, *optimizer.variables]
        for a, e, tolerance in zip(
            actual, expected, shares * self.largest, strict=True
        ):
            e = ops.convert_to_numpy(e)
            np.testing.assert_allclose(a, e, rtol=0, atol=tolerance)


OF_THE_FRAMEWORK = implementations("update")
if len(OF_THE_FRAMEWORK) > 1:
    # Keras itself has another formula for PyTorch: its `1 - beta` is not rounded.
    del OF_THE_FRAMEWORK["reference"]


TO_THE_BIT = [keras.optimizers.Lion]
if backend.UPDATES_IN_PLACE:
    # The kernels do there what Keras does, in its order; XLA and TensorFlow's do not.
    TO_THE_BIT += [keras.optimizers.RMSprop, keras.optimizers.Adagrad]
    TO_THE_BIT += [keras.optimizers.Nadam, keras.optimizers.Adamax]


@pytest.mark.parametrize("make", TO_THE_BIT)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@in_each_way("update", OF_THE_FRAMEWORK)
def test_updates_are_bitwise_equal_to_keras(update, dtype, make, snapshot):
    random = np.random.default_rng(0)
    # What packs small tensors and what does not.
    weights = [random.normal(size=s).astype("float32") for s in [(), (3, 5), (40_001,)]]
    fused = FusedOptimizer(make, weights, update)
    plain, plain_weights = make(), list(map(keras.Variable, weights))
    scale = 2.0**8
    for finite in [True, True, False, True]:
        grads = [
            np.asarray(random.normal(size=w.shape) * scale, dtype) for w in weights
        ]
        grads[0] = grads[0] if finite else np.asarray(np.nan, dtype)
        given = [ops.convert_to_tensor(g) for g in grads]
        fused.step(given, ops.convert_to_tensor(finite), tensor(1.0 / scale))
        if finite:
            unscaled = [g.astype("float32") / np.float32(scale) for g in grads]
            plain.apply([ops.convert_to_tensor(g) for g in unscaled], plain_weights)
        assert snapshot(fused.state) == snapshot([*plain_weights, *plain.variables])


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@each_update
def test_fifty_updates_from_zero_weights_match_keras_optimizer(
    make, update, compiled_once
):
    # A weight that starts at zero is nothing but its steps: their relative errors
    # are its own. All gradients have the same sign, so that none of them cancel.
    random = np.random.default_rng(0)
    weights = [np.zeros((3, 4), "float32"), np.zeros(4, "float32")]
    fused = FusedOptimizer(make, weights, update)
    plain, plain_weights = plain_optimizer(make), [keras.Variable(w) for w in weights]
    plain.build(plain_weights)

    def step_both(*grads):
        fused.step(list(grads), ops.convert_to_tensor(True), tensor(1.0))
        plain.apply(list(grads), plain_weights)

    state = fused.state + plain_weights + plain.variables
    step_both = compiled_once(step_both, state)
    for _ in range(50):
        grads = [random.uniform(0.5, 1.5, size=w.shape) for w in weights]
        step_both(*(tensor(g) for g in grads))
    fused.assert_close_to(plain_weights, plain)


@pytest.mark.exhaustive
@each_update
@pytest.mark.parametrize("learning_rate", [1e-3, 0.3, 0.0])
def test_many_small_weight_decays_accumulate_without_bias(
    update, learning_rate, compiled_once
):
    # No gradient: the weights do nothing but decay.
    def make():
        return keras.optimizers.AdamW(learning_rate, weight_decay=0.0041)

    weights = np.linspace(-1.0, 1.0, 1001, dtype="float32")
    fused = FusedOptimizer(make, [weights], update)
    step = compiled_once(fused.step, fused.state)
    for _ in range(300):
        step([tensor(np.zeros(1001))], ops.convert_to_tensor(True), tensor(1.0))
    decay = float(np.float32(learning_rate) * np.float32(0.0041))
    expected = weights.astype("float64") * (1.0 - decay) ** 300
    error = numpy(fused.weights[0]) - expected
    # Each step rounds each weight by up to 3e-8, a weight often to the same side.
    assert np.abs(error).max() <= 300 * 3e-8
    # On average over the weights that is nothing, unless the factor itself is rounded.
    is_large = np.abs(expected) > 0.5
    relative = np.divide(error, expected, where=is_large, out=np.zeros_like(error))
    assert abs(np.mean(relative)) <= 3e-7


def takes(variables, grads):
    leaves = Leaves(storage_of(variables), [])
    return backend.takes_update(LARSRule, leaves, grads)


def test_update_accepts_float32_but_not_16_bit_variables():
    variables = [keras.Variable([1.0, 2.0]), keras.Variable(3.0)]
    grads = [tensor([1.0, 2.0]), tensor(3.0)]
    assert takes(variables, grads)
    for dtype in ("float16", "bfloat16"):
        narrow = keras.Variable([1.0, 2.0], dtype=dtype)
        narrow_grads = [tensor([1.0, 2.0], dtype), grads[1]]
        assert not takes([narrow, variables[1]], narrow_grads)


def test_update_does_not_accept_sparse_or_float64_gradient(sparse_gradient):
    variables = [keras.Variable(np.ones((3, 1), "float32"))]
    if keras.backend.backend() != "torch":  # There `prepare_gradients` makes it dense.
        grads = [sparse_gradient(np.ones((1, 1), "float32"), [2], (3, 1))]
        assert not takes(variables, grads)
    assert not takes([keras.Variable(3.0)], [tensor(3.0, "float64")])
