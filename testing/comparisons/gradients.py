"""Comparisons of the functions of gradients and of other tensors."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops

from testing.comparisons.inputs import (
    BACKEND,
    RANDOM,
    REFERENCE,
    close,
    equal,
    sparse,
    tensor,
)
from testing.comparisons.registry import compares


@compares("do_not_convert", "in_graphs")
def same_function(own, reference):
    def twice(value):
        """Its text."""
        return 2 * value

    for decorated in map(own, (twice, reference(twice))):
        assert (decorated(3), decorated.__doc__) == (6, "Its text.")
        assert list(inspect.signature(decorated).parameters) == ["value"]


@compares("l2_norms")
def same_norms(own, reference):
    # The narrowest first: it decides nothing about the others.
    values = [tensor(RANDOM[0], dtype) for dtype in ("float16", "float32", "bfloat16")]
    for actual, expected in zip(own(values), reference(values), strict=True):
        assert keras.backend.standardize_dtype(actual.dtype) == "float32"
        close(actual, expected)


@compares("norms")
def same_norms_of_dense(own, reference):
    values = tensor(RANDOM[0]), tensor(0.5), ops.zeros((3,))
    for actual, expected in zip(own(*values), reference(*values), strict=True):
        close(actual, expected)


@compares("clipped")
def same_clipped_gradients(own, reference):
    # Zeros, whose norm is no divisor, and short ones, which stay as they are.
    values = [RANDOM[0], RANDOM[1] * 1e-3, np.zeros(3), np.array(-4.0)]
    for dtype in ("float32", "float16"):
        grads = [tensor(v, dtype) for v in values]
        for limits in ({"norm": 0.5}, {"value": 0.25}):
            for factor in (tensor(0.5), 1.0):
                ours, theirs = (f(grads, factor, **limits) for f in (own, reference))
                for actual, expected in zip(ours, theirs, strict=True):
                    actual, expected = map(ops.convert_to_numpy, (actual, expected))
                    assert actual.dtype == "float32"
                    np.testing.assert_allclose(actual, expected, rtol=1e-6)
        for grad, value in zip(grads, values, strict=True):
            equal(grad, tensor(value, dtype))


@compares("unscaled")
def same_unscaled_gradients(own, reference):
    values = [RANDOM[0], RANDOM[1], np.array(-4.0)]
    for dtype in ("float32", "float16", "bfloat16"):
        grads = [tensor(v, dtype) for v in values]
        for factor in (tensor(0.5), 1.0):
            for a, e in zip(own(grads, factor), reference(grads, factor), strict=True):
                assert keras.backend.standardize_dtype(a.dtype) == "float32"
                equal(a, e)
        for grad, value in zip(grads, values, strict=True):
            equal(grad, tensor(value, dtype))
    mixed = [tensor(values[0], "float16"), tensor(values[1])]
    for a, e in zip(own(mixed, tensor(3.0)), reference(mixed, 3.0), strict=True):
        equal(a, e)
    assert own([], tensor(0.5)) == []


@compares("in_float16")
def same_float32_values_of_float16(own, reference):
    values = tensor([1.0, 1.0005, -0.0, -1e-9, 3e-8, 65519.0, -7e4, np.inf, np.nan])
    equal(own(values), reference(values))


@compares("as_gradients")
def same_gradients(own, reference):
    values = [tensor([1.5]), tensor([1.5], "float16"), [1, 2], np.array([3.0]), None]
    *ours, none = own(values)
    *theirs, nothing = reference(values)
    assert none is nothing is None
    for actual, expected in zip(ours, theirs, strict=True):
        equal(actual, expected)
    for as_gradients in (own, reference):
        with pytest.raises(ValueError, match="must be real"):
            as_gradients([ops.convert_to_tensor(np.array([1j], "complex64"))])


@compares("map_values")
def same_values_mapped(own, reference):
    doubled = own(lambda v: v * 2, sparse(RANDOM[0]))
    expected = reference(lambda v: v * 2, REFERENCE.to_dense(sparse(RANDOM[0])))
    equal(REFERENCE.to_dense(doubled), expected)


@compares("prepare_gradients")
def as_the_optimizers_take_them(own, reference):
    dense = tensor(RANDOM[0])
    if BACKEND == "jax":
        same_in_the_order_of_the_variables(own, dense)
        return
    for grads in ([dense, None], [sparse(RANDOM[0]), dense]):
        assert reference(grads) is grads
        for grad, expected in zip(own(grads), grads, strict=True):
            if expected is None or expected is dense:
                assert grad is expected
            else:
                equal(grad, REFERENCE.to_dense(expected))
                assert type(grad) is type(dense)
                assert grad.layout == dense.layout


def same_in_the_order_of_the_variables(own, dense):
    import jax

    rows = sparse(RANDOM[0])
    for grads in ([dense, None], [rows, dense]):
        assert all(a is b for a, b in zip(own(grads), grads, strict=True))
    # Compiled: of a transpose, of a vector, of rows and of nothing.
    step = jax.jit(lambda g, rows: own([g.T, g[0], rows, None]))
    transposed, vector, same_rows, nothing = step(dense, rows)
    equal(transposed, dense.T)
    equal(vector, dense[0])
    equal(REFERENCE.to_dense(same_rows), REFERENCE.to_dense(rows))
    assert type(same_rows) is type(rows)
    assert nothing is None


@compares("detached_copy")
def copies_without_a_history(own, reference):
    followed = keras.Variable(RANDOM[0]).value * 2.0
    for value in followed, tensor(RANDOM[0]):
        copy = own(value)
        equal(copy.detach(), reference(value).detach())
        assert copy.data_ptr() != value.data_ptr()
        assert copy.is_leaf
        assert not copy.requires_grad
    # A loop may differentiate with respect to it.
    assert own(keras.Variable(RANDOM[0]).value).requires_grad


@compares("check_stateless_arguments")
def refuses_what_has_a_history(own, reference):
    if keras.backend.backend() == "tensorflow":
        with pytest.raises(ValueError, match="stateless_apply is not supported"):
            own([])
        return
    import torch

    followed = keras.Variable(RANDOM[0]).value * 2.0
    reference([followed])
    own([None, followed.detach(), sparse(RANDOM[0])])
    with pytest.raises(ValueError, match="cannot differentiate through a step"):
        own([None, followed])
    with torch.no_grad():
        own([followed])


@compares("to_dense")
def same_dense(own, reference):
    for values in (RANDOM[0], RANDOM[1]):
        np.testing.assert_allclose(
            *(ops.convert_to_numpy(f(sparse(values))) for f in (own, reference)),
            rtol=1e-6,
        )


@compares("elements_of")
def same_elements(own, reference):
    equal(own(tensor(RANDOM[0])), reference(tensor(RANDOM[0])))
    for values in (RANDOM[0], RANDOM[1][:2]):
        # In another order, and without zeros.
        actual, expected = (
            np.sort(ops.convert_to_numpy(f(sparse(values))).ravel())
            for f in (own, reference)
        )
        actual, expected = actual[actual != 0], expected[expected != 0]
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@compares("scalar")
def same_scalar(own, reference):
    for value in (1, 2.5, True, tensor(3.0)):
        for dtype in ("float32", "int32", "bool"):
            equal(own(value, dtype), reference(value, dtype))


@compares("without_host")
def same_result(own, reference):
    steps = ops.convert_to_tensor(3, dtype="int32")

    def schedule():
        return ops.where(steps > 2, ops.cast(steps, "float32") * 0.5, 7.0)

    equal(own(schedule, near=steps), reference(schedule, near=steps))


@compares("memory_of")
def is_that_of_all_views(own, reference):
    value, other = tensor(RANDOM[0]), tensor(RANDOM[0])
    assert reference(value) == reference(value) != reference(other)
    assert reference(value)[1] is None
    views = value, value.detach(), value.view(-1), value.data
    assert len({own(view)[0] for view in views}) == 1
    assert len({own(v)[0] for v in (value, other, value[:1], sparse(RANDOM[0]))}) == 4
    assert own(None) == reference(None)
    before = own(value)
    value.add_(1.0)
    assert own(value)[0] == before[0]
    assert own(value)[1] != before[1]
    assert own(np.ones(2))[1] is None


@compares("is_variable")
def same_kinds(own, reference):
    for value in (keras.Variable(1.0), tensor(1.0), 1.0, None):
        assert own(value) is reference(value)
