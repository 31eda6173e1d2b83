"""Comparisons of differentiation, of compiled functions and of lists of variables."""

import contextlib

import keras
import pytest

from testing.comparisons.inputs import BACKEND, equal, tensor
from testing.comparisons.registry import compares


@compares("compute_gradients")
def differentiates(own, reference):
    a, unused = keras.Variable([3.0, 4.0]), keras.Variable(1.0)
    with pytest.raises(NotImplementedError):
        reference(lambda: a * a, [a])
    loss, grads = own(lambda: a * a, [a, unused], [1.0, -1.0])
    equal(loss, tensor([9.0, 16.0]))
    equal(grads[0], tensor([6.0, -8.0]))
    assert grads[1] is None


@compares("differentiate")
def differentiates_a_tensor(own, reference):
    a = keras.Variable([3.0, 4.0])
    arguments = [a], lambda loss: loss * 3.0
    with pytest.raises(NotImplementedError):
        reference(a * a, *arguments)
    if BACKEND == "jax":
        with pytest.raises(ValueError, match="cannot be differentiated"):
            own(a * a, *arguments)
        return
    tape = None
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tape = tf.GradientTape()
    with tape or contextlib.nullcontext():
        loss = a * a
    [gradient] = own(loss, *arguments, tape=tape)
    equal(gradient, tensor([18.0, 24.0]))


@compares("outside_of_functions")
def same_context(own, reference):
    for context in (own(), reference()):
        with context:
            equal(tensor(1.0) + 1.0, tensor(2.0))
    with keras.name_scope("block"):
        inside = keras.Variable(1.0, name="a")
    for like in (inside, keras.Variable(1.0, name="a")):
        with keras.name_scope("other"), own(like):
            copy = keras.Variable(2.0, name="a")
        # On TensorFlow it is the whole path.
        names = [getattr(v.value, "name", None) for v in (copy, like)]
        assert names[0] == names[1]
        with reference(like):
            pass


@compares("is_variable")
def same_kinds(own, reference):
    for value in (keras.Variable(1.0), tensor(1.0), 1.0, None):
        assert own(value) is reference(value)


@compares("register_list_class")
def registers_lists(own, reference):
    class Registered(list):
        pass

    reference(Registered)
    own(Registered)
    if BACKEND == "torch":
        keyed, _ = Registered("ab").torchtree_flatten_with_keys()
        assert [(str(key), item) for key, item in keyed] == [("[0]", "a"), ("[1]", "b")]
        return
    import jax

    assert jax.tree.leaves(Registered([1, 2])) == [1, 2]
