"""Methods of tf.keras 2 are methods of our optimizers."""

import keras

import keras_lso


def test_tf_keras_methods_are_bound_to_optimizer():
    optimizer = keras_lso.LARS(0.1)
    variable = keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    assert optimizer.get_slot(variable, "momentum") is optimizer.momentums[0]
    assert optimizer.weights[-1] is optimizer.momentums[0]


def test_subclass_overrides_tf_keras_method_and_calls_super():
    class Named(keras_lso.NovoGrad):
        def get_slot_names(self):
            return [name.upper() for name in super().get_slot_names()]

    optimizer = Named()
    optimizer.build([keras.Variable([1.0])])
    assert optimizer.get_slot_names() == ["M", "V"]
