"""`update` of LARS against its formula in NumPy float64."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.leaves import Leaves
from keras_lso.optimizers.lars import LARSRule
from testing.layer_wise import PATHS, InNumPyLARS
from testing.primitives import (
    MODEL_GARDEN,
    PAPER,
    implementations,
    in_each_way,
    storage,
    with_keywords,
)
from testing.tensors import tensor

# JAX has float64 only where x64 is on; `tensor` skips where it is not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
]

LEARNING_RATE = 0.5


def lars_rule(**settings):
    return LARSRule(learning_rate=tensor(LEARNING_RATE), **settings)


def lars_in_numpy(rule, g, w, v):
    """One step in float64: the new weights and momentum."""
    formula = InNumPyLARS([w], weight_decay_rate=rule.weight_decay)
    for name in ("momentum", "nesterov", "classic_momentum"):
        setattr(formula, name, getattr(rule, name))
    if (trust := rule.trust_ratio) is None:
        formula.not_adapted = PATHS
    else:
        formula.trust_ratio = "paper" if trust.paper else "model_garden"
        formula.eeta, formula.epsilon = trust.eeta, trust.epsilon
        formula.trust_clip = trust.upper == 1.0
    formula.m = [v]
    formula.step([g], LEARNING_RATE)
    return *formula.weights, *formula.m


# `update`, and the `measure` whose norms it takes, or None: it takes its own.
STEPS = {
    **{name: (update, None) for name, update in implementations("update").items()},
    **{
        f"{name}, measured": functions
        for name, functions in implementations("update", "measure").items()
    },
}
each_way_of_steps = in_each_way("way", STEPS)


class LARSSteps:
    """Variables, each with its slot and its rule, and a way of `STEPS`."""

    def __init__(self, way, weights, momentums, rules_):
        self.update, self.measure = way
        self.rules = rules_
        self.weights = [keras.Variable(w, dtype="float32") for w in weights]
        self.momentums = [keras.Variable(v, dtype="float32") for v in momentums]
        self.state = self.weights + self.momentums

    def step(self, grads, finite=None, inv_scale=None):
        """Returns what `measure` says, if it is asked."""
        found = norms = None
        if self.measure:
            found = self.measure(
                grads,
                inv_scale=1.0 if inv_scale is None else inv_scale,
                rules=self.rules,
                leaves=Leaves(self.weights, [self.momentums]),
            )
            norms = found.rule_norms
        self.update(self.rules, self.leaves(), grads, inv_scale, finite, norms)
        return finite if found is None else found.finite

    def leaves(self):
        columns = self.weights, self.momentums
        weights, momentums = (storage(self.update, column) for column in columns)
        return Leaves(weights, [momentums])

    def values(self):
        return [np.array(v.numpy()) for v in self.state]

    def assert_stepped_like_numpy(self, before, grads):
        count = len(self.weights)
        for i, (rule, g) in enumerate(zip(self.rules, grads, strict=True)):
            w, v = (before[j].astype("float64") for j in (i, count + i))
            expected = lars_in_numpy(rule, g, w, v)
            actual = [self.values()[j] for j in (i, count + i)]
            for a, e, old in zip(actual, expected, (w, v), strict=True):
                # A dozen roundings of 6e-8 of the largest number that takes part.
                largest = max(np.abs(x).max(initial=0) for x in (w, v, e, old))
                np.testing.assert_allclose(a, e, rtol=0, atol=1e-6 * largest)


CLASSIC = dict(momentum=0.9, weight_decay=0.1, trust_ratio=MODEL_GARDEN)
LARS_FORMS = {
    f"{name}{', nesterov' if nesterov else ''}": dict(nesterov=nesterov, **settings)
    for name, settings in {
        "classic": CLASSIC,
        "not decayed": {**CLASSIC, "weight_decay": 0.0},
        "without momentum": {**CLASSIC, "momentum": 0.0},
        "popular": {**CLASSIC, "classic_momentum": False},
        "paper": {**CLASSIC, "trust_ratio": PAPER},
        "excluded": {**CLASSIC, "weight_decay": 0.0, "trust_ratio": None},
    }.items()
    for nesterov in (False, True)
}


@each_way_of_steps
def test_large_gradient_moves_layer_with_tiny_weight_decay(way):
    # Divided by the decay, the gradient's norm would overflow.
    weights, gradient = np.array([3.0, 4.0]), np.array([6e12, -8e12])
    rule = lars_rule(momentum=0.9, weight_decay=1e-8, trust_ratio=MODEL_GARDEN)
    steps = LARSSteps(way, [weights], [np.zeros(2)], [rule])
    steps.step([tensor(gradient)])
    # By the ratio of 0.1 * 5 / 1e13.
    moved = LEARNING_RATE * 0.1 * 5 * np.array([0.6, -0.8])
    np.testing.assert_allclose(steps.values()[0], weights - moved, rtol=1e-6)


@in_each_way("way", implementations("update", "measure"))
def test_update_uses_measured_norms(way):
    # So that it reads the gradient no second time. To show it, they are of another.
    update, measure = way
    weights, gradient = np.array([3.0, 4.0]), np.array([6.0, -8.0])
    rule = lars_rule(momentum=0.0, weight_decay=0.0, trust_ratio=MODEL_GARDEN)
    steps = LARSSteps((update, None), [weights], [np.zeros(2)], [rule])
    found = measure(
        [tensor(4.0 * gradient)],
        rules=[rule],
        leaves=Leaves([tensor(weights)], [[tensor([0, 0])]]),
    )
    if found.rule_norms is None:
        pytest.skip("This `update` takes the norms itself")
    update([rule], steps.leaves(), [tensor(gradient)], norms=found.rule_norms)
    expected, _ = lars_in_numpy(rule, gradient, weights, np.zeros(2))
    moved = steps.values()[0] - weights
    np.testing.assert_allclose(moved, (expected - weights) / 4, rtol=1e-5)


@pytest.mark.exhaustive
@each_way_of_steps
def test_variables_of_all_sizes_are_updated_by_their_own_rules(way):
    # On PyTorch they go to the kernels in chunks of 2**18 elements and of one rule.
    random = np.random.default_rng(0)
    sizes = [3, 2**18 + 1, 0, 2**17, 5, 2**17, 2**17, 2]
    forms = [LARS_FORMS[name] for name in ("classic", "popular, nesterov", "excluded")]
    rules_ = [lars_rule(**form) for form in forms]
    steps = LARSSteps(
        way,
        [random.normal(size=s) for s in sizes],
        [random.normal(size=s) for s in sizes],
        [rules_[i % 3] for i in range(len(sizes))],
    )
    before = steps.values()
    grads = [random.normal(size=s).astype("float32") for s in sizes]
    steps.step([tensor(g) for g in grads])
    steps.assert_stepped_like_numpy(before, grads)


@pytest.mark.exhaustive
@each_way_of_steps
@pytest.mark.parametrize("form", ["classic", "not decayed", "popular", "paper"])
def test_trust_ratios_of_large_tensors_keep_float32_precision(way, form):
    # As many as the last layer of a ResNet-50 has. What is lost of the one norm must
    # not be lost of the other as well, so the gradient is of another kind.
    weights = np.random.default_rng(0).standard_normal(2**21, dtype="float32")
    gradient = np.ones(2**21, "float32")
    rule = lars_rule(**LARS_FORMS[form])
    steps = LARSSteps(way, [weights], [np.zeros(2**21)], [rule])
    steps.step([tensor(gradient)])
    expected, _ = lars_in_numpy(
        rule, *(np.asarray(x, "float64") for x in (gradient, weights)), np.zeros(2**21)
    )
    moved = np.linalg.norm(weights - steps.values()[0].astype("float64"))
    np.testing.assert_allclose(moved, np.linalg.norm(weights - expected), rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("inv_scale", [None, 2.0**-15, 2.0])
@pytest.mark.parametrize("is_measured", [False, True])
def test_finite_gradient_with_infinite_norm_has_zero_rate_and_is_no_overflow(
    compiled, is_measured, inv_scale
):
    # 1e25 is finite, its square is not: eeta * |w| / inf is 0.
    rule = lars_rule(momentum=0.5, weight_decay=0.0, trust_ratio=MODEL_GARDEN)
    measure = with_keywords(backend.measure) if is_measured else None
    way = backend.update, measure
    steps = LARSSteps(way, [np.array([3.0, 4.0])], [np.ones(2)], [rule])

    def step(grads, finite):
        return steps.step(
            grads, finite, None if inv_scale is None else tensor(inv_scale)
        )

    call = compiled(step, steps.state)
    found = call([tensor([1e25, -1e30])], ops.convert_to_tensor(True))
    assert bool(found)
    weights, momentum = steps.values()
    assert momentum.tolist() == [0.5, 0.5]
    assert weights.tolist() == [2.5, 3.5]
