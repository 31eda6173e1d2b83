"""What the comparisons give to an override and to the default: tensors and rules."""

import keras
import numpy as np
from keras import ops

from keras_lso._backend.framework import Framework
from keras_lso._keras_internals import rules
from keras_lso._keras_internals.rules import registered_rule
from keras_lso.optimizers.novograd import NovoGradRule
from testing.optimizers import OPTIMIZERS, decaying
from testing.tensors import number, sparse_gradient

BACKEND = keras.backend.backend()
REFERENCE = Framework()


def tensor(values, dtype="float32"):
    return ops.convert_to_tensor(np.array(values, "float32"), dtype=dtype)


def equal(actual, expected):
    actual, expected = (ops.convert_to_numpy(v) for v in (actual, expected))
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


def close(actual, expected):
    # A dozen roundings, in another order.
    np.testing.assert_allclose(number(actual), number(expected), rtol=1e-6)


RANDOM = [np.random.default_rng(i).normal(size=(3, 4)) for i in range(4)]


def rules_of(make):
    """The rules of each group that the optimizers of a table step by."""
    for options in ({}, decaying(make)):
        optimizer = make(0.5, **options)
        optimizer.build([keras.Variable(np.ones((3, 4), "float32"))])
        rule = registered_rule(optimizer)
        yield from rule.of_groups(optimizer, tensor(0.5)).values()


RULES = [rule for make in OPTIMIZERS.values() for rule in rules_of(make)]
RULES += [rules.Average(tensor(0.75)), rules.Overwrite()]


WITH_SQUARES = rules.RMSprop, rules.Adagrad


def state_of(rule):
    """The variable of a rule, and its slots, of which the second is a scalar's."""
    is_scalar = isinstance(rule, NovoGradRule)
    # Sums of squares are positive.
    first = RANDOM[1] ** 2 if isinstance(rule, WITH_SQUARES) else RANDOM[1]
    slots = [first, np.float32(2.0) if is_scalar else RANDOM[2] ** 2]
    return [np.asarray(v, "float32") for v in (RANDOM[0], *slots[: len(rule.slots)])]


def sparse(values):
    """A sparse gradient of which a row comes twice."""
    return sparse_gradient(tensor(values), [2, 0, 2][: len(values)], (3, 4))
