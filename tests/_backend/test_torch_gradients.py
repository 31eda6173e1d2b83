"""Gradients on PyTorch, where a tensor says itself whether autograd follows it."""

import keras
import pytest
from keras import ops

import keras_lso
from keras_lso._backend import backend

if keras.backend.backend() != "torch":
    pytest.skip("autograd is PyTorch's", allow_module_level=True)


@pytest.fixture
def frozen():
    variable = keras.Variable([2.0])
    variable.value.requires_grad_(False)
    return variable


def test_compute_gradients_refreezes_frozen_tensors(frozen):
    _, [grad] = backend.host.compute_gradients(lambda: ops.sum(frozen * 3.0), [frozen])
    assert grad.tolist() == [3.0]
    assert not frozen.value.requires_grad


def test_compute_gradients_refreezes_frozen_tensors_after_error(frozen):
    def loss():
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        backend.host.compute_gradients(loss, [frozen])
    assert not frozen.value.requires_grad


def test_differentiate_returns_none_for_frozen_tensors(frozen):
    first, last = keras.Variable([5.0]), keras.Variable([7.0])
    loss = ops.sum(first * 3.0 + frozen * 4.0 + last * 6.0)
    variables = [frozen, first, frozen, last]
    grads = backend.host.differentiate(loss, variables, lambda loss: loss)
    assert grads[0] is grads[2] is None
    assert [grad.tolist() for grad in grads[1::2]] == [[3.0], [6.0]]


@pytest.mark.parametrize("is_unscaled_in_place", [False, True])
def test_backward_pass_accumulates_into_applied_gradients(is_unscaled_in_place):
    """Why a step leaves them scaled: who unscales in place gets another weight.

    Each backward pass adds a gradient of 1 to `.grad`, which nobody clears: the second
    step is by 2, its sum.
    """
    weight = keras.Variable([8.0])
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=4.0
    )
    optimizer.build([weight])
    seen = []
    for _ in range(2):
        optimizer.scale_loss(ops.sum(weight)).backward()
        grad = weight.value.grad
        optimizer.apply([grad])
        seen.append(grad.item())
        if is_unscaled_in_place:
            grad.div_(4.0)
    # The second of these is the sum of a gradient and of four times another.
    assert seen == ([4.0, 5.0] if is_unscaled_in_place else [4.0, 8.0])
    assert weight.numpy() == (8 - 1 - 1.25 if is_unscaled_in_place else 8 - 1 - 2)
