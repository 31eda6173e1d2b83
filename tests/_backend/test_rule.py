"""Rules of one's own, which differ from the package's in every attribute of a rule."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso._backend.rule import Rule
from keras_lso._keras_internals import rules
from keras_lso._keras_internals.optimizers import variables_of
from testing.harness import WAYS, bits, steps_by_rule, take

BACKEND = keras.backend.backend()
SHAPES = [(3, 4), (4,), (2,), (5, 6)]
STEPS = 6


class Delayed(keras.optimizers.Optimizer):
    """Adagrad on the last three gradients, with a rate of each variable's own."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            names = ["last", "before", "total"]
            self.last, self.before, self.total = self.add_optimizer_variables(
                variables, names
            )
            scalar = {"shape": (), "initializer": "zeros", "dtype": "float32"}
            self.counts = [self.add_variable(**scalar) for _ in variables]
            self.applied = self.add_variable(**scalar)

    def update_step(self, gradient, variable, learning_rate):
        i = self._get_variable_index(variable)
        columns = self.last, self.before, self.total, self.counts
        old = [ops.copy(ops.convert_to_tensor(v[i])) for v in columns]
        last, before, total, count = old
        weight = ops.copy(ops.convert_to_tensor(variable))
        total = total + gradient * gradient
        step = (gradient + last * 0.5 + before * 0.25) / (ops.sqrt(total) + 1e-3)
        rate = learning_rate * (2.0 if len(variable.shape) == 2 else 1.0)
        if self.name == "by norms":
            rate = rate * ops.sqrt(ops.sum(weight * weight))
        for column, value in zip(
            columns, (gradient, last, total, count + 1), strict=True
        ):
            column[i].assign(value)
        variable.assign(weight - step * rate / (count + 1))


@dataclass(frozen=True)
class DelayedRule(Rule):
    """Does not say that it squares the gradient, as by default a rule does."""

    slots: ClassVar = {
        "last": "last",
        "before": "before",
        "total": "total",
        "count": "counts",
    }
    scalars: ClassVar = ("count",)
    has_moments: ClassVar = False
    learning_rate: Any

    @classmethod
    def is_rule_of(cls, optimizer):
        return cls.has_norms is (optimizer.name == "by norms")

    @classmethod
    def of_groups(cls, optimizer, learning_rate):
        rule = cls(learning_rate)
        return {1: rule, 2: replace(rule, learning_rate=learning_rate * 2.0)}

    @classmethod
    def groups_of(cls, optimizer, indices):
        variables = variables_of(optimizer)
        return [len(variables[i].shape) for i in indices]

    def finish(self, optimizer, finite):
        value = ops.cast(finite, "float32")
        optimizer.applied.assign(optimizer.applied + value)

    def factor(self, norms, w):
        return 1.0

    def __call__(self, xp, select, g, w, last, before, total, count, norms=None):
        direction = g + last * 0.5 + before * 0.25
        total = select(total + xp.square(g), total)
        step = direction / (xp.sqrt(total) + 1e-3)
        before = select(last, before)
        last = select(g, last)
        count = select(count + 1.0, count)
        rate = self.factor(norms, w) * self.learning_rate / count
        return select(w - step * rate, w), last, before, total, count


@dataclass(frozen=True)
class RuleByNorms(DelayedRule):
    has_norms: ClassVar = True

    def measured(self, xp, g, w, *slots):
        return (w,)

    def factor(self, norms, w):
        return norms(w)[0]


@pytest.fixture
def known(monkeypatch):
    """Makes rules known for the time of a test."""

    def register(*of_class):
        monkeypatch.setitem(rules._rules, Delayed, list(of_class))
        rules._rules_of.cache_clear()

    register(DelayedRule, RuleByNorms)
    yield register
    rules._rules_of.cache_clear()


FORMS = [*WAYS, "compiled"] if BACKEND == "torch" else WAYS


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """As `way`, and on PyTorch also with 16-bit weights in a compiled function."""
    take(request.param, monkeypatch)
    if request.param == "compiled":
        from keras_lso._backend.torch import compiled

        monkeypatch.setattr(compiled, "IS_ON", True)
    return request.param


def trained(wrap, dtype, shapes, **options):
    """Returns an optimizer and its weights after steps, of which one is skipped."""
    random = np.random.default_rng(0)
    start = [random.integers(-64, 64, size=s) / 32 for s in shapes]
    weights = [keras.Variable(w, dtype=dtype) for w in start]
    optimizer = wrap(Delayed(0.1, **options))
    optimizer.build(weights)
    for step in range(STEPS):
        grads = [random.normal(size=s).astype("float32") for s in shapes]
        if optimizer.__class__ is Delayed:
            optimizer.apply(list(map(ops.convert_to_tensor, grads)), weights)
            continue
        for factor in (np.float32(np.inf), np.float32(8.0))[step != 2 :]:
            before = bits([*weights, *optimizer.inner_optimizer.variables])
            tensors = [ops.convert_to_tensor(g * factor) for g in grads]
            optimizer.apply(tensors, weights, scaled=True, update_scale=False)
            if factor == np.inf:
                after = bits([*weights, *optimizer.inner_optimizer.variables])
                assert after == before
    return optimizer, weights


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["by itself", "by norms"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clipnorm": 1.0},
        {"global_clipnorm": 1.0},
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_momentum": 0.5},
    ],
    ids=str,
)
def test_rule_with_other_attributes_steps_like_its_optimizer(
    name, dtype, options, form, known
):
    # The compiled function takes one tensor with a number or a norm of its own.
    shapes = SHAPES[:1] if form == "compiled" else SHAPES
    options = {"shapes": shapes, "name": name, **options}
    _, expected = trained(lambda o: o, "float32", **options)
    settings = {"initial_scale": 8.0, "master_weights": "float32"}
    optimizer, weights = trained(
        lambda o: keras_lso.LossScaleOptimizer(o, **settings), dtype, **options
    )
    # On JAX only a rule with norms steps, and none adds up micro-batches or averages.
    is_by_rule = BACKEND != "jax" or name == "by norms"
    assert steps_by_rule(optimizer) is is_by_rule
    needs_all = {"gradient_accumulation_steps", "use_ema"} & options.keys()
    is_by_rule &= BACKEND != "jax" or not needs_all
    numbers = optimizer._masters.variables or weights
    for found, right in zip(numbers, expected, strict=True):
        found, right = map(ops.convert_to_numpy, (found, right))
        np.testing.assert_allclose(found, right, rtol=2e-6, atol=2e-6)
    window = options.get("gradient_accumulation_steps", 1)
    applied = float(ops.convert_to_numpy(optimizer.inner_optimizer.applied))
    assert applied == (STEPS // window if is_by_rule else 0)


def test_rule_that_does_not_say_whether_it_squares_skips_infinite_squares(known, way):
    weight = keras.Variable(np.ones(2, "float32"))
    optimizer = keras_lso.GuardedOptimizer(Delayed(0.1, name="by norms"))
    for size in (1.0, 1e20, 1.0):
        optimizer.apply([ops.full((2,), size)], [weight])
    assert int(optimizer.skipped_steps) == 1
    for variable in (weight, *optimizer.variables):
        assert np.isfinite(ops.convert_to_numpy(variable)).all()


@pytest.mark.skipif(BACKEND == "jax", reason="steps only by rules that take norms")
def test_rule_that_does_not_say_that_it_takes_norms_is_rejected(known, form):
    class Undeclared(RuleByNorms):
        has_norms = False
        is_rule_of = classmethod(lambda cls, optimizer: True)

    known(Undeclared)
    weights = [keras.Variable(np.ones(s), dtype="bfloat16") for s in SHAPES]
    optimizer = keras_lso.GuardedOptimizer(Delayed(0.1))
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        optimizer.apply([ops.ones(s) for s in SHAPES], weights)


@pytest.mark.skipif(BACKEND != "torch", reason="elsewhere the old value is there still")
def test_formula_that_uses_overwritten_value_is_rejected(known):
    class Late(DelayedRule):
        def __call__(self, xp, select, g, w, *slots, norms=None):
            last, *others = slots
            new = select(last * 0.5 + g, last)
            return select(w - (new - last), w), new, *others

    known(Late)
    weights = [keras.Variable(np.ones(s, "float32")) for s in SHAPES]
    optimizer = keras_lso.GuardedOptimizer(Delayed(0.1))
    with pytest.raises(RuntimeError, match="old value of a variable or slot"):
        optimizer.apply([ops.ones(s) for s in SHAPES], weights)
