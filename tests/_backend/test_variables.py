"""`is_variable`, and the replicas on which a method may be called."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso._backend import backend


def test_is_variable_tells_variables_from_other_objects():
    assert backend.is_variable(keras.Variable(1.0))
    assert backend.is_variable(keras.Variable(1, trainable=False, dtype="int32"))
    for other in (ops.ones(()), np.ones(()), 1.0, None, "w", keras.Variable):
        assert not backend.is_variable(other)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        assert backend.is_variable(tf.Variable(1.0))
        words = "`mine..` cannot be called in cross-replica context"
        scope = tf.distribute.MirroredStrategy(["CPU:0"]).scope()
        with scope, pytest.raises(RuntimeError, match=words):
            backend.replicas.check_replica_context("mine")
    backend.replicas.check_replica_context("mine")
