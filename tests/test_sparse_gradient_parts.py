"""Sparse gradients made of tuples and lists, as Keras's own tests make them.

TensorFlow and JAX accept them. They have no shape until they are tensors.
"""

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import loss_scales

ROWS, SHAPE = (0, 2), (3, 2)
VALUES = np.array([[2.0, 4.0], [-6.0, 8.0]], "float32")
DENSE = np.array([[2.0, 4.0], [0.0, 0.0], [-6.0, 8.0]], "float32")


def of_tensorflow(values):
    import tensorflow as tf

    return tf.IndexedSlices(keras.ops.array(values), ROWS, SHAPE)


def of_lists(values):
    import tensorflow as tf

    return tf.IndexedSlices(values.tolist(), list(ROWS), list(SHAPE))


def of_jax(values):
    from jax.experimental import sparse

    return sparse.BCOO((keras.ops.array(values), ((0,), (2,))), shape=SHAPE)


MAKERS = {
    "tensorflow": {"tuples": of_tensorflow, "lists": of_lists},
    "jax": {"tuples": of_jax},
    "torch": {},
}[keras.backend.backend()]
if not MAKERS:
    pytest.skip("On PyTorch a sparse gradient is a tensor", allow_module_level=True)

OPTIMIZERS = {
    "SGD": lambda: keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=2
    ),
    "LogMax": lambda: keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), loss_scale=loss_scales.LogMaxLossScale()
    ),
    "LARC": lambda: keras_lso.LossScaleOptimizer(
        keras_lso.LARC(keras.optimizers.SGD(0.5)), initial_scale=2
    ),
    "LARS": lambda: keras_lso.LARS(0.5),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.5),
}


@pytest.fixture(params=MAKERS)
def make_sparse(request):
    return MAKERS[request.param]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_sparse_gradient_gives_same_step_as_dense_gradient(make, make_sparse):
    weights = []
    for gradient in (make_sparse(VALUES), keras.ops.array(DENSE)):
        variable = keras.Variable(np.ones(SHAPE, "float32"))
        make().apply([gradient], [variable])
        weights.append(keras.ops.convert_to_numpy(variable))
    assert (weights[0] != 1.0).any()
    # Norms add the squares up in another order: an ulp or two.
    np.testing.assert_allclose(*weights, rtol=3e-7)


def test_sparse_gradient_of_other_shape_is_rejected(make_sparse):
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    variable = keras.Variable(np.ones((3, 5), "float32"))
    with pytest.raises(ValueError, match="must have the shape of its variable"):
        optimizer.apply([make_sparse(VALUES)], [variable])
    assert (keras.ops.convert_to_numpy(variable) == 1.0).all()
