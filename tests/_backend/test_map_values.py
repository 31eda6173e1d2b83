"""`map_values`: a function of the values of a gradient, dense or sparse."""

import numpy as np
from keras import ops

from keras_lso._backend import backend
from testing.primitives import REFERENCE
from testing.tensors import tensor


def test_map_values_applies_function_to_dense_gradient():
    doubled = backend.map_values(lambda values: values * 2.0, tensor([1.0, -3.0]))
    np.testing.assert_array_equal(ops.convert_to_numpy(doubled), [2.0, -6.0])


def test_map_values_applies_function_to_values_of_sparse_gradient(sparse_gradient):
    values = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "float32")
    gradient = sparse_gradient(values, [2, 0, 0], (3, 2))
    halved = backend.map_values(lambda values: values / 2.0, gradient)
    assert type(halved) is type(gradient)
    # PyTorch has one class for dense and sparse ones.
    assert getattr(halved, "layout", None) == getattr(gradient, "layout", None)
    dense = ops.convert_to_numpy(REFERENCE.to_dense(halved))
    np.testing.assert_array_equal(dense, [[4.0, 5.0], [0.0, 0.0], [0.5, 1.0]])
