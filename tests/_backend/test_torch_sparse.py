"""Sparse gradients on PyTorch: a step makes of them what it makes of dense ones."""

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import LossScaleOptimizer
from testing.harness import bits

if keras.backend.backend() != "torch":
    pytest.skip("`torch.nn.Embedding(sparse=True)` has them", allow_module_level=True)

import torch

from keras_lso._backend import backend

# Row 1 comes twice, others not at all.
ROWS, SHAPE = [1, 4, 1], (6, 3)

KINDS = {
    "SGD": (keras.optimizers.SGD, {}),
    "momentum": (keras.optimizers.SGD, {"momentum": 0.9}),
    "Adam": (keras.optimizers.Adam, {}),
    "amsgrad": (keras.optimizers.Adam, {"amsgrad": True}),
    "Adadelta": (keras.optimizers.Adadelta, {}),
    "Adafactor": (keras.optimizers.Adafactor, {}),
    "Ftrl": (keras.optimizers.Ftrl, {}),
    "RMSprop": (keras.optimizers.RMSprop, {"centered": True}),
    "LARS": (keras_lso.LARS, {"weight_decay_rate": 0.1}),
    "LAMB": (keras_lso.LAMB, {}),
    "NovoGrad": (keras_lso.NovoGrad, {}),
    "clipnorm": (keras.optimizers.Adam, {"clipnorm": 0.5}),
    "clipvalue": (keras.optimizers.Adam, {"clipvalue": 0.5}),
    "global_clipnorm": (keras.optimizers.SGD, {"global_clipnorm": 0.5}),
    "accumulation": (keras.optimizers.SGD, {"gradient_accumulation_steps": 2}),
    "averages": (keras.optimizers.Adam, {"use_ema": True}),
}


def sparse(values, rows=ROWS, dtype=torch.float32, is_coalesced=False):
    values = torch.as_tensor(np.asarray(values, "float32")).to(dtype)
    grad = torch.sparse_coo_tensor(torch.tensor([rows]), values, SHAPE)
    return grad.coalesce() if is_coalesced else grad


def gradients(optimizer, step, is_sparse, dtype=torch.float32):
    """A sparse and a dense one, scaled, as a backward pass makes them."""
    random = np.random.default_rng(step)
    scale = float(getattr(optimizer, "loss_scale", 1.0))
    values = random.normal(size=(3, 3)) * scale
    first = sparse(values, dtype=dtype, is_coalesced=bool(step % 2))
    second = torch.tensor(random.normal(size=(2, 4)) * scale, dtype=torch.float32)
    return [first if is_sparse else first.to_dense(), second]


def steps_of(make, is_sparse, dtype="float32", unscales=False):
    """The variables and all of the state after a few steps, as arrays."""
    random = np.random.default_rng(0)
    shapes = SHAPE, (2, 4)
    variables = [keras.Variable(random.normal(size=s), dtype=dtype) for s in shapes]
    optimizer = make()
    optimizer.build(variables)
    for step in range(4):
        optimizer.scale_loss(torch.ones(()))
        grads = gradients(optimizer, step, is_sparse)
        if unscales:
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply(grads, variables)
    return [np.array(v.numpy()) for v in [*variables, *optimizer.variables]]


def assert_same_as_dense(make, **options):
    pairs = zip(
        steps_of(make, True, **options), steps_of(make, False, **options), strict=True
    )
    for actual, expected in pairs:
        # A row that comes twice is summed in the one order or in the other.
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-7)


def guarded_adam():
    return LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=64.0)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients_step_like_dense_gradients(kind, way):
    make, options = KINDS[kind]
    assert_same_as_dense(
        lambda: LossScaleOptimizer(make(0.1, **options), initial_scale=64.0)
    )


@pytest.mark.parametrize("kind", ["LARS", "LAMB", "NovoGrad"])
def test_unwrapped_optimizers_step_sparse_gradients_like_dense_gradients(kind):
    make, options = KINDS[kind]
    for more in {}, {"clipvalue": 0.5}, {"gradient_accumulation_steps": 2}:
        assert_same_as_dense(lambda more=more: make(0.1, **options, **more))


def test_sparse_gradients_are_unscaled_and_stay_sparse():
    assert_same_as_dense(guarded_adam, unscales=True)
    [grad] = guarded_adam().get_unscaled_gradients([sparse(np.full((3, 3), 64.0))])
    assert grad.layout == torch.sparse_coo
    assert grad.to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 0.0, 1.0, 0.0]


def test_sparse_embedding_is_trained_from_scaled_loss():
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    torch.nn.init.ones_(embedding.weight)
    variable = keras.Variable(embedding.weight)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
    optimizer.scale_loss(embedding(torch.tensor([1, 1, 4])).sum()).backward()
    assert variable.value.grad.layout == torch.sparse_coo
    optimizer.apply([variable.value.grad], [variable])
    found = embedding.weight.detach()[[0, 1, 4], 0]
    np.testing.assert_allclose(found, [1.0, 0.8, 0.9], rtol=1e-6)


def test_duplicate_rows_whose_sum_overflows_skip_step(way):
    variable = keras.Variable(np.ones(SHAPE), dtype="float32")
    optimizer = LossScaleOptimizer(
        keras.optimizers.Adam(0.1), initial_scale=64.0, master_weights=False
    )
    optimizer.build([variable])
    before = bits([variable, *optimizer.inner_optimizer.variables])
    cases = [(3e38, torch.float32), (4e4, torch.float16), (np.inf, torch.float32)]
    for number, (value, dtype) in enumerate(cases, start=1):
        grad = sparse(np.full((3, 3), value), dtype=dtype)
        assert number == 3 or grad._values().isfinite().all()
        optimizer.apply([grad], [variable], scaled=True)
        assert bits([variable, *optimizer.inner_optimizer.variables]) == before
        assert int(optimizer.skipped_steps) == number
    # Once each, they do not. (Adam would square larger ones.)
    once = sparse(np.full((2, 3), 1e19), [1, 4])
    optimizer.apply([once], [variable], scaled=True)
    assert int(optimizer.skipped_steps) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_duplicate_rows_of_16_bits_are_summed_in_float32(dtype):
    """In float16 2048 and 1 are 2048, and in bfloat16 256 and 1 are 256."""
    values = np.float32([[2048.0], [256.0], [1.0], [1.0]])
    indices, shape = torch.tensor([[0, 1, 0, 1]]), (2, 1)
    sums = np.float32([[2049.0], [257.0]])

    def gradient():
        return torch.sparse_coo_tensor(indices, torch.tensor(values).to(dtype), shape)

    variable = keras.Variable(np.zeros(shape, "float32"))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1024.0)
    optimizer.apply([gradient()], [variable], scaled=True)
    np.testing.assert_array_equal(variable.numpy(), -sums / 1024)
    [unscaled] = optimizer.get_unscaled_gradients([gradient()])
    np.testing.assert_array_equal(backend.to_dense(unscaled), sums / 1024)
    variable.assign(np.zeros(shape))
    optimizer.apply([unscaled], [variable])
    np.testing.assert_array_equal(variable.numpy(), -sums / 1024)
    assert int(optimizer.skipped_steps) == 0


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_csr_and_csc_gradients_step_like_dense_gradients(layout):
    dense = torch.tensor(np.arange(18.0, dtype="float32").reshape(SHAPE))
    ends = []
    for grad in (dense, dense.to_sparse(layout=layout)):
        variable, optimizer = keras.Variable(np.ones(SHAPE, "float32")), guarded_adam()
        optimizer.apply([grad], [variable], scaled=True)
        optimizer.apply(optimizer.get_unscaled_gradients([grad]), [variable])
        ends.append(variable.numpy().tolist())
    assert ends[0] == ends[1]


def test_step_leaves_sparse_gradient_of_caller_unchanged():
    variable = keras.Variable(np.ones(SHAPE), dtype="float32")
    optimizer = guarded_adam()
    grad = sparse(np.ones((3, 3)))
    for _ in range(2):
        optimizer.apply([grad], [variable], scaled=True)
    assert grad.layout == torch.sparse_coo
    assert not grad.is_coalesced()
    assert grad._values().tolist() == np.ones((3, 3)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sparse_gradient_between_strided_dense_gradients_steps_like_dense(dtype):
    """It is no more contiguous than a sparse one, and of the same shape and dtype."""
    dense = torch.tensor(np.arange(1.0, 19.0).reshape(SHAPE), dtype=dtype)
    strided = torch.stack([dense, dense], -1)[..., 0]
    both = [(strided, strided), (dense.to_sparse(), dense), (strided, strided)]
    ends = []
    for column in 0, 1:
        variables = [keras.Variable(np.ones(SHAPE, "float32")) for _ in "ab"]
        optimizer = guarded_adam()
        optimizer.build(variables)
        for pair in both:
            optimizer.apply([dense, pair[column]], variables, scaled=True)
        ends.append(bits(variables))
    assert ends[0] == ends[1]
