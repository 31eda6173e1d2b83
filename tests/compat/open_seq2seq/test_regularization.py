"""`get_regularization_loss`: of a model, of a scope, and in a loss."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso.compat.open_seq2seq import get_regularization_loss, optimize_loss


def regularized(dtype="float32"):
    model = keras.Sequential()
    for name, value in (("first", 2.0), ("second", 300.0)):
        start, l2 = keras.initializers.Constant(value), keras.regularizers.L2(0.5)
        kernel = {"kernel_initializer": start, "kernel_regularizer": l2}
        model.add(keras.layers.Dense(1, name=name, dtype=dtype, **kernel))
    model.build((None, 1))
    return model


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_regularization_loss_is_float32(dtype):
    model = regularized(dtype)
    loss = get_regularization_loss(model)
    assert keras.backend.standardize_dtype(loss.dtype) == "float32"
    # 300 squared is inf in float16.
    assert float(loss) == 0.5 * 4 + 0.5 * 90000
    assert float(get_regularization_loss([model, model])) == float(loss)


def test_regularization_loss_in_loss_uses_model_and_scope():
    model, found = regularized(), {}
    scopes = [None, "sequential", model.layers[0].kernel.path]

    def loss(x):
        for scope in scopes:
            found[scope] = get_regularization_loss(scope)
        return ops.stack(list(found.values()))[2]

    model.layers[1].kernel.regularizer = None
    train_op = optimize_loss(loss, "SGD", None, lambda step: 0.25, model=model)
    value = train_op(np.float32([[1.0]]))
    assert float(value) == 2.0
    # kernel - 0.25 * kernel
    assert float(model.layers[0].kernel.numpy()[0, 0]) == 1.75 - 0.25
    assert float(get_regularization_loss(keras.layers.Dense(1))) == 0.0


@pytest.mark.parametrize("scope", [None, "encoder"])
def test_error_without_model_says_to_pass_model(scope):
    with pytest.raises(ValueError, match=r"get_regularization_loss\(model\)"):
        get_regularization_loss(scope)
