"""Comparisons of the primitives behind masters of weights of 16 bits."""

import keras
import ml_dtypes
import numpy as np
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.codecs import CODECS
from keras_lso._keras_internals import rules
from keras_lso._keras_internals.variables import storage_of
from testing.comparisons.inputs import RANDOM, REFERENCE, tensor
from testing.comparisons.registry import compares
from testing.harness import bits
from testing.masters import leaves_of, numbers_of

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@compares("bitcast")
def same_bits(own, reference):
    values = tensor([1.0, -0.0, np.inf, np.nan, 1e-40])
    integers = ops.convert_to_tensor(np.int32([1, -1, 2**31 - 1, -(2**31)]))
    for bitcast in (own, reference):
        assert bits([bitcast(values, "int32")]) == bits([values])
        assert bits([bitcast(integers, "float32")]) == bits([integers])


@compares("computed_once")
def returns_values_as_they_are(own, reference):
    # What it is for: `tests/_backend/test_masters.py`.
    values = tensor([1.0, -0.0, np.inf, np.nan, 1e-40])
    for computed_once in (own, reference):
        for count in (0, 7):
            assert bits([computed_once(values, ops.array(count))]) == bits([values])


@compares("flat_indices")
def counts_the_elements(own, reference):
    for places in (own, reference):
        found = ops.convert_to_numpy(places(tensor(RANDOM[0])))
        assert found.dtype == np.int32
        assert found.tolist() == np.arange(12).reshape(3, 4).tolist()
        assert ops.convert_to_numpy(places(tensor(1.0))).tolist() == 0


@compares("memory_for", "without_memory")
def holds_what_is_assigned(own, reference):
    """Of both together, whichever this is called for."""
    other = keras.Variable([3.0])
    for framework in (backend, REFERENCE):
        placeholder = keras.Variable(RANDOM[0], dtype="float32")
        [placeholder._value] = framework.without_memory([placeholder._value])
        for factor in (1.0, 2.0):
            with framework.memory_for([placeholder]):
                placeholder.assign(tensor(RANDOM[1] * factor))
                other.assign([factor])
                kept = np.array(placeholder.numpy())
            np.testing.assert_array_equal(kept, np.float32(RANDOM[1] * factor))
            assert other.numpy().tolist() == [factor]


@compares("LENDS_MEMORY")
def says_what_there_is(own, reference):
    assert REFERENCE.LENDS_MEMORY is True


def same_numbers(own, reference):
    """A step that overwrites weights, or leaves their numbers as they are."""
    for kind in ("remainder", "remainder8", "stochastic"):
        for dtype in DTYPES:
            for finite in (True, False):
                for rule in (rules.Overwrite(), rules.SGD(tensor(0.0))):
                    told = kind, dtype, rule, finite
                    ours = stepped(own, backend.UPDATES_IN_PLACE, *told)
                    assert ours == stepped(reference, False, *told)


def stepped(step, in_place, kind, dtype, rule, finite):
    """Returns the bits of a scalar, a small and a large weight after a step."""
    storage = storage_of if in_place else list
    shapes = [(), (7,), (131, 130)]
    weights, kept, grads = [], [], []
    for i, shape in enumerate(shapes):
        weight, low = numbers_of(dtype, shape, seed=i, kind=kind)
        weights.append(keras.Variable(weight, dtype=dtype))
        kept.append(keras.Variable(low, dtype=low.dtype.name, trainable=False))
        grads.append(tensor(numbers_of("float32", shape, seed=9 + i)))
    has_aux = CODECS[kind].aux_dtype is not None
    leaves = leaves_of(
        storage(kept) if has_aux else [None] * len(kept), [], storage(weights), kind
    )
    iterations = keras.Variable(7, dtype="int32", trainable=False)
    leaves = leaves._replace(iterations=iterations)
    before, written = bits(weights + kept), weights + kept
    flag = ops.convert_to_tensor(finite)
    step([rule] * len(grads), leaves, grads, tensor(1.0), flag)
    after = bits(written)
    is_kept = not finite or isinstance(rule, rules.SGD)
    assert (after == before) is is_kept or kind == "stochastic"
    return after
