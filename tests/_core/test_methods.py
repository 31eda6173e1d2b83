"""Methods of tf.keras are imported when they are looked up, and are methods then."""

import inspect

import keras
import pytest

import keras_lso
from keras_lso._core import methods as _methods
from keras_lso._core.methods import OfTFKeras
from keras_lso.compat.tf_keras import methods
from keras_lso.optimizers.base import OwnOptimizer
from testing.signatures import for_type_checkers

CLASSES = [keras_lso.LossScaleOptimizer, keras_lso.LARS, keras_lso.NovoGrad]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("name", ["add_slot", "get_slot", "get_updates", "set_weights"])
def test_tf_keras_method_of_class_is_original_function(cls, name):
    found = getattr(cls, name)
    assert found is getattr(methods, name)
    assert next(iter(inspect.signature(found).parameters)) == "self"
    assert inspect.getdoc(found)


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


def test_signatures_for_type_checkers_match_methods():
    known = vars(for_type_checkers(_methods)["Signatures"])
    taken = {
        name
        for cls in (keras_lso.LossScaleOptimizer, OwnOptimizer)
        for name, member in vars(cls).items()
        if isinstance(member, OfTFKeras) or vars(_methods).get(name) is member
    }
    assert taken == {name for name in known if not name.startswith("_")}
    for name in taken - {"weights"}:
        of_tf_keras = not hasattr(_methods, name)
        original = getattr(methods if of_tf_keras else _methods, name)
        assert _without_self(known[name]) == _without_self(original)


def _without_self(function):
    signature = inspect.signature(function)
    _, *parameters = signature.parameters.values()
    return signature.replace(parameters=parameters)
