"""Gradients that autograd leaves otherwise than their variables, in one process."""

import keras
import pytest

import keras_lso
from keras_lso._backend import backend
from keras_lso._backend.leaves import Leaves
from keras_lso._keras_internals import rules
from keras_lso._keras_internals.variables import held_by

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("shards are PyTorch's", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("batch", "model"))
    dist.destroy_process_group()


def laid_out(values, mesh, *placements):
    return DTensor.from_local(torch.tensor(values), mesh, placements)


def sharded_alike(grads, variables):
    return backend.replicas.sharded_alike(grads, variables, map(held_by, variables))


@pytest.fixture
def distributed(monkeypatch):
    """As under a `ModelParallel`, which an older Keras does not have on PyTorch."""
    monkeypatch.setattr(keras.distribution, "distribution", object)


def test_shard_of_matrix_has_no_step_of_muon(mesh):
    weight = laid_out([[1.0, 2.0]], mesh, Replicate(), Shard(0))
    tensors = Leaves([weight], [[weight], [None]], has_gaps=True), [weight]
    assert not backend.takes_update(rules.Muon, *tensors)
    assert backend.takes_update(rules.Adam, *tensors)


def test_gradients_are_laid_out_like_their_variables(mesh, distributed):
    sharded = Replicate(), Shard(0)
    variables = [
        keras.Variable([1.0, 2.0]),
        keras.Variable(torch.nn.Parameter(laid_out([1.0, 2.0], mesh, *sharded))),
        keras.Variable([1.0, 2.0]),
        keras.Variable([1.0, 2.0]),
    ]
    plain = torch.tensor([5.0, 6.0])
    grads = [
        laid_out([3.0, 4.0], mesh, Partial(), Replicate()),
        laid_out([3.0, 4.0], mesh, Partial(), Shard(0)),
        plain,
        None,
    ]
    whole, shard, same, none = sharded_alike(grads, variables)
    assert type(whole) is torch.Tensor and whole.tolist() == [3.0, 4.0]
    assert shard.placements == sharded and shard.to_local().tolist() == [3.0, 4.0]
    assert same is plain and none is None


def test_gradients_without_distribution_are_not_redistributed(mesh):
    grads = [laid_out([3.0, 4.0], mesh, Partial(), Replicate())]
    with pytest.raises(ValueError, match="and the variable itself holds a plain"):
        sharded_alike(grads, [keras.Variable([1.0, 2.0])])


def test_step_on_shards_is_no_part_of_graph(mesh):
    value = torch.nn.Parameter(laid_out([1.0, 2.0], mesh, Shard(0), Replicate()))
    weight = keras.Variable(value)
    optimizer = keras_lso.GuardedOptimizer(keras.optimizers.SGD(0.5))
    optimizer.build([weight])
    step = torch.compile(lambda g: optimizer.apply([g], [weight]), backend="eager")
    step(laid_out([2.0, 4.0], mesh, Shard(0), Replicate()))
    assert value.to_local().tolist() == [0.0, 0.0]
