"""What the package knows about Keras's optimizers: classes, configs, rules."""

import keras
import pytest
from keras import ops

import keras_lso
from keras_lso._keras_internals import rules
from keras_lso._keras_internals.optimizers import public_class, where_variables_are_made
from keras_lso._keras_internals.rules import fitting_rule
from keras_lso._keras_internals.state import config_of, public_config
from testing.optimizers import OPTIMIZERS, decaying, rule_of


class MySGD(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(-gradient, variable, learning_rate)


class MyAdamW(keras.optimizers.AdamW):
    """Changes nothing, but might."""


class MyLARS(keras_lso.LARS):
    """Changes nothing, but might."""


def test_public_class_preserves_user_subclass():
    cls = public_class(type(MySGD(0.1)))
    assert cls is not keras.optimizers.SGD
    assert issubclass(cls, MySGD)


@pytest.mark.parametrize(
    "name, expected", [("sgd_12", "sgd"), ("sgd", "sgd"), ("run_12", "run_12")]
)
def test_config_drops_only_name_suffix_added_by_keras(name, expected):
    config = config_of(keras.optimizers.SGD(0.5, name=name))
    assert config["config"]["name"] == expected


TORCH_CONFIG = {
    "module": "keras.src.backend.torch.optimizers.torch_adam",
    "class_name": "Adam",
    "config": {"learning_rate": 0.25},
    "registered_name": "Adam",
}
PUBLIC_CONFIG = {
    "module": "keras.optimizers",
    "class_name": "Adam",
    "config": {"learning_rate": 0.25},
    "registered_name": None,
}


def test_public_config_replaces_pytorch_classes_at_any_depth():
    nested = {"a": [{"b": (TORCH_CONFIG, 3)}], "c": None, "d": "torch"}
    assert public_config(nested) == {
        "a": [{"b": (PUBLIC_CONFIG, 3)}],
        "c": None,
        "d": "torch",
    }


def test_public_config_preserves_other_configs():
    config = keras.saving.serialize_keras_object(keras.layers.Dense(2, name="dense"))
    assert public_config(config) == config
    config = keras.saving.serialize_keras_object(MySGD(0.1))
    assert public_config(config)["class_name"] == "MySGD"
    assert public_config(config)["module"] == config["module"]


@pytest.fixture
def weights():
    return [keras.Variable([1.0, 2.0]), keras.Variable(3.0)]


def test_every_registered_rule_is_covered_by_step_tests():
    found = set(sum(rules._rules.values(), []))
    of_package = {r for r in found if r.__module__.startswith("keras_lso.")}
    assert {rule_of(make) for make in OPTIMIZERS.values()} == of_package


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_rules_of_one_update_have_what_their_class_declares(make):
    """An update asks their class or the first of them."""
    optimizer, rule = make(0.5, **decaying(make)), rule_of(make)
    optimizer.build([keras.Variable([1.0, 2.0])])
    of_groups = rule.of_groups(optimizer, ops.convert_to_tensor(0.5)).values()
    # Variables that are excluded from the decay have another.
    assert len(of_groups) > 1
    for of_group in of_groups:
        assert vars(of_group).keys().isdisjoint(["kernel", "has_norms", "finish"])
        if type(of_group) is rule:
            continue
        assert list(rule.slots)[: len(of_group.slots)] == list(of_group.slots)
        assert of_group.has_norms == rule.has_norms
        assert of_group.has_moments >= rule.has_moments
        assert of_group.mixes_matrices <= rule.mixes_matrices
        assert of_group.finish is rule.finish


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
# That each optimizer steps by its rule is in `test_fast_paths.py`.
RULES = {
    "weight decay": (lambda: keras.optimizers.SGD(0.5, weight_decay=0.1), rules.SGD),
    "schedule": (lambda: keras.optimizers.Adam(SCHEDULE), rules.Adam),
    "callable rate": (lambda: keras.optimizers.SGD(lambda: 0.5), rules.SGD),
    # These do more than a rule.
    "subclass": (lambda: MySGD(0.5), None),
    "subclass of ours": (lambda: MyLARS(0.5), None),
    "LARC": (lambda: keras_lso.LARC(keras.optimizers.SGD(0.5)), None),
    "another class": (lambda: keras.optimizers.Adadelta(0.5), None),
    "centered": (lambda: keras.optimizers.RMSprop(0.5, centered=True), None),
    "momentum": (lambda: keras.optimizers.RMSprop(0.5, momentum=0.5), None),
    "subclass of AdamW": (lambda: MyAdamW(0.5), None),
    "LAMB, Keras's decay": (lambda: keras_lso.LAMB(0.5, weight_decay=0.1), None),
    "LARS, Keras's decay": (lambda: keras_lso.LARS(0.5, weight_decay=0.1), None),
    "amsgrad": (lambda: keras.optimizers.Adam(0.5, amsgrad=True), None),
}


@pytest.mark.parametrize("make, rule", RULES.values(), ids=RULES)
def test_only_optimizer_that_does_no_more_than_a_rule_has_it(make, rule, weights):
    optimizer = make()
    optimizer.build(weights)
    assert fitting_rule(optimizer, weights) is rule


def test_fitting_rule_respects_clipping_set_after_build(weights):
    optimizer = keras.optimizers.Adam(0.5)
    optimizer.build(weights)
    optimizer.clipnorm = optimizer.clipvalue = 1.0
    assert fitting_rule(optimizer, weights) is None
    optimizer.clipnorm = None
    assert fitting_rule(optimizer, weights) is rules.Adam


def test_variable_with_constraint_has_no_rule(weights):
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(weights)
    weights[1].constraint = keras.constraints.NonNeg()
    assert fitting_rule(optimizer, weights) is None
    assert fitting_rule(optimizer, weights[:1]) is rules.SGD


def test_variable_overwritten_by_its_gradient_has_no_rule(weights):
    weights[1].overwrite_with_gradient = True
    optimizer = keras.optimizers.Adam(0.5)
    optimizer.build(weights)
    assert fitting_rule(optimizer, weights) is None
    assert fitting_rule(optimizer, weights[:1]) is rules.Adam


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="strategies are TensorFlow's"
)
def test_variables_are_created_in_strategy_scope_of_optimizer():
    import tensorflow as tf

    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        inside = keras.optimizers.SGD(0.5)
    with where_variables_are_made(inside):
        assert tf.distribute.get_strategy() is strategy
    with where_variables_are_made(keras.optimizers.SGD(0.5)):
        assert not tf.distribute.has_strategy()
