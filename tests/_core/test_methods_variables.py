"""`variables`: a list, and a call."""

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import ops, tree

from keras_lso import LARS, LossScaleOptimizer
from keras_lso._core.methods import VariableList

BACKEND = keras.backend.backend()
MAKERS = {
    "LossScaleOptimizer": lambda: LossScaleOptimizer(keras.optimizers.Adam(0.5)),
    "LARS": lambda: LARS(0.5),
}


@pytest.fixture(params=MAKERS)
def optimizer(request):
    optimizer = MAKERS[request.param]()
    optimizer.build([keras.Variable([1.0, 2.0]), keras.Variable(3.0)])
    return optimizer


def same(a, b):
    return [id(v) for v in a] == [id(v) for v in b]


def test_variables_property_behaves_like_list(optimizer):
    variables = optimizer.variables
    plain = list(variables)
    assert isinstance(variables, list)
    assert same(variables, plain)
    assert len(variables) == len(plain) > 3
    assert variables[1] is plain[1] and variables[-1] is plain[-1]
    assert repr(variables) == repr(plain)
    # A list finds a variable by identity first; Keras's variables compare by value.
    assert plain[0] in variables
    assert VariableList([1, 2]) == [1, 2]


def test_slices_sums_and_copies_of_variables_are_plain_lists(optimizer):
    variables = optimizer.variables
    for made in (
        variables[:2],
        variables[::-1],
        variables + [1],
        [1] + variables,
        variables * 2,
        variables.copy(),
        sorted(variables, key=id),
        [*variables],
    ):
        assert type(made) is list


def test_calling_variables_returns_weights_without_learning_rate(optimizer):
    called = optimizer.variables()
    assert type(called) is list
    assert same(called, optimizer.weights)
    assert called[0] is optimizer.iterations
    assert [v for v in called if "learning_rate" in v.name] == []
    assert len(called) < len(optimizer.variables)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_calling_variables_before_build_returns_only_iterations(make):
    optimizer = make()
    assert same(optimizer.variables(), [optimizer.iterations])


def test_variable_list_returns_own_items_unless_callable_is_given():
    assert VariableList()() == []
    assert VariableList([1, 2])() == [1, 2]
    assert VariableList([1, 2], called=lambda: [3])() == [3]


def by_pickle(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("clone", [copy.deepcopy, by_pickle], ids=["deep", "pickle"])
def test_cloned_variable_list_returns_cloned_variables_when_called(optimizer, clone):
    variables = optimizer.variables
    twin = clone(variables)
    for a, b in zip(twin, variables, strict=True):
        assert a is not b
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert len(twin()) == len(variables())
    assert {id(v) for v in twin()} <= {id(v) for v in twin}


def test_keras_tree_flattens_variable_list_like_plain_list(optimizer):
    variables, plain = optimizer.variables, list(optimizer.variables)
    assert tree.is_nested(variables)
    assert same(tree.flatten(variables), plain)
    assert same(tree.flatten({"a": variables, "b": (plain[0],)}), [*plain, plain[0]])
    paths = [path for path, _ in tree.flatten_with_path({"a": variables})]
    assert paths == [path for path, _ in tree.flatten_with_path({"a": plain})]


on_jax = pytest.mark.skipif(BACKEND != "jax", reason="JAX only")
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow only")
on_torch = pytest.mark.skipif(BACKEND != "torch", reason="PyTorch only")


@on_jax
def test_jax_tree_flattens_variable_list_like_plain_list(optimizer):
    import jax

    variables = optimizer.variables
    assert same(jax.tree.leaves({"a": variables}), list(variables))
    values = jax.tree.map(lambda v: v.value, variables)
    doubled = jax.jit(lambda values: [2 * v for v in values])(values)
    for a, v in zip(doubled, variables, strict=True):
        np.testing.assert_array_equal(a, 2 * v.numpy())
    returned = jax.jit(lambda values: values)(values)
    assert isinstance(returned, list) and len(returned) == len(variables)


@on_tensorflow
def test_tensorflow_nest_flattens_variable_list_like_plain_list(optimizer):
    import tensorflow as tf

    variables = optimizer.variables
    assert same(tf.nest.flatten({"a": variables}), list(variables))
    numbers = list(range(len(variables)))
    assert tf.nest.map_structure(lambda v, n: n, variables, numbers) == numbers
    values = VariableList([tf.constant(1.0), tf.constant(2.0)])
    assert float(tf.function(lambda v: v[0] + v[1])(values)) == 3.0
    assert isinstance(tf.function(lambda v: v)(values), list)


@on_torch
def test_torch_pytree_flattens_variable_list_like_plain_list(optimizer):
    from torch.utils import _pytree

    variables = optimizer.variables
    leaves, spec = _pytree.tree_flatten({"a": variables})
    assert same(leaves, list(variables))
    assert same(_pytree.tree_unflatten(leaves, spec)["a"], list(variables))
    [(path, _)] = _pytree.tree_flatten_with_path({"a": variables[:1]})[0]
    assert str(path[-1]) == "[0]"


@pytest.mark.skipif(
    BACKEND == "tensorflow", reason="Keras has no stateless_apply there"
)
@pytest.mark.parametrize("name", MAKERS)
def test_stateless_apply_returns_list_type_of_given_state(name):
    optimizer, trained = MAKERS[name](), keras.Variable([1.0, 2.0])
    optimizer.build([trained])
    grads = [ops.ones(2)]
    as_mapped = tree.map_structure(lambda v: v.value, optimizer.variables)
    for own in (as_mapped, list(as_mapped)):
        _, new = optimizer.stateless_apply(own, grads, [trained.value])
        assert type(new) is type(own)
        tree.assert_same_structure(own, new)
