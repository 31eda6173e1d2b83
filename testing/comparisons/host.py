"""Comparisons of what code on the host asks, and of flags."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

from testing.comparisons.inputs import BACKEND, RANDOM, equal, tensor
from testing.comparisons.registry import compares


@compares("host.compute_gradients")
def differentiates(own, reference):
    a, unused = keras.Variable([3.0, 4.0]), keras.Variable(1.0)
    with pytest.raises(NotImplementedError):
        reference(lambda: a * a, [a])
    loss, grads = own(lambda: a * a, [a, unused], [1.0, -1.0])
    equal(loss, tensor([9.0, 16.0]))
    equal(grads[0], tensor([6.0, -8.0]))
    assert grads[1] is None


@compares("host.trained_variables")
def finds_the_variables_that_are_read(own, reference):
    a, b, frozen = (keras.Variable(1.0, trainable=t) for t in (True, True, False))

    def loss():
        frozen.assign(2.0)
        return b * frozen

    assert own(loss) == reference(loss) == [b]
    assert (a.numpy(), frozen.numpy()) == (1.0, 1.0)


@compares("host.differentiate")
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


@compares("host.outside_of_functions")
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


@compares("host.register_list_class")
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


@compares("host.shown")
def shows_the_batch_that_comes_next(own, reference):
    batch = tensor(np.ones((2, 3))), {"a": tensor(np.zeros(4))}
    shown = []
    both = [function(iter([batch]), shown.append, 1) for function in (own, reference)]
    taken = [next(iter(batches)) for batches in both]
    assert len(shown) == 2
    for found in (*shown, *taken):
        flat = keras.tree.flatten(found)
        for value, right in zip(flat, keras.tree.flatten(batch), strict=True):
            np.testing.assert_array_equal(value, right)
    assert next(iter(reference(iter([batch]), shown.append, 5))) is batch
    with pytest.raises(ValueError, match="steps_per_execution=5"):
        own(iter([batch]), shown.append, 5)


@compares("host.to_host")
def copies_to_the_host(own, reference):
    value = tensor(RANDOM[0])
    first, second = own(value), own(value)
    np.testing.assert_array_equal(first, reference(value))
    first += 1.0
    np.testing.assert_array_equal(second, reference(value))
    np.testing.assert_array_equal(ops.convert_to_numpy(value), second)


@compares("host.devices")
def names_devices(own, reference):
    assert reference() == []
    assert own()
    assert all(isinstance(name, str) for name in own())


@compares("host.hardware_of")
def is_the_cpu_for_what_is_there(own, reference):
    for value in (tensor([1.0]), keras.Variable([1.0]).value):
        assert own(value) == reference(value) == "cpu"


@compares("host.is_constant")
def finds_no_constant_where_nothing_is_traced(own, reference):
    # Where something is: `tests/_core/test_step_scaling.py`.
    value = tensor([1.0])
    assert own(value, value) is reference(value, value) is False


@compares("host.has_values")
def says_where_numbers_can_be_read(own, reference):
    assert own(tensor([1.0])) is reference(tensor([1.0])) is True
    found = []

    def traced(x):
        found.append(own(x))
        return x

    ops.vectorized_map(traced, tensor([1.0, 2.0]))
    assert set(found) == {False}


@compares("host.casts_to_float16")
def finds_no_setting_where_none_was_made(own, reference):
    # Those that there are: `tests/test_float16_warnings.py`.
    assert own() is reference() is None


@compares("host.is_deleted")
def says_that_a_donated_array_is_gone(own, reference):
    value = tensor([1.0])
    assert own(value) is reference(value) is False
    value.delete()
    assert own(value)


@compares("host.reference_to")
def refers_weakly(actual, expected):
    # Under `torch.compile`: `tests/_backend/test_torch_graphs.py`.
    value = ops.convert_to_tensor([1.0, 2.0])
    for reference in (actual(value), expected(value)):
        assert reference() is value


@compares("host.preserve_random_state")
def restores_random_numbers(own, reference):
    import torch

    with own():
        inside = torch.rand(())
    assert torch.rand(()) == inside
    with reference():
        outside = torch.rand(())
    assert torch.rand(()) != outside


@compares(
    "host.COMPILES_LOOPS",
    "UPDATES_IN_PLACE",
    "STEPS_WRITE_TENSORS",
    "replicas.REDUCES_GRADIENTS",
    "replicas.INSTEAD_OF_SHARD_STATE",
    "host.OTHER_STEP",
    "host.HOW_TO_SCALE",
)
def differs(own, reference):
    assert type(own) is type(reference)
    assert own != reference
