"""Gradients on PyTorch, where a tensor says itself whether autograd follows it."""

import keras
import pytest
from keras import ops

from keras_lso._backend import backend

if keras.backend.backend() != "torch":
    pytest.skip("autograd is PyTorch's", allow_module_level=True)


@pytest.fixture
def frozen():
    variable = keras.Variable([2.0])
    variable.value.requires_grad_(False)
    return variable


def test_frozen_tensors_are_frozen_again(frozen):
    _, [grad] = backend.compute_gradients(lambda: ops.sum(frozen * 3.0), [frozen])
    assert grad.tolist() == [3.0]
    assert not frozen.value.requires_grad


def test_frozen_tensors_are_frozen_again_after_an_error(frozen):
    def loss():
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        backend.compute_gradients(loss, [frozen])
    assert not frozen.value.requires_grad


def test_frozen_tensors_among_others_have_no_gradient(frozen):
    first, last = keras.Variable([5.0]), keras.Variable([7.0])
    loss = ops.sum(first * 3.0 + frozen * 4.0 + last * 6.0)
    variables = [frozen, first, frozen, last]
    grads = backend.differentiate(loss, variables, lambda loss: loss)
    assert grads[0] is grads[2] is None
    assert [grad.tolist() for grad in grads[1::2]] == [[3.0], [6.0]]
