"""One of two processes that have shards of the weights, and skip outliers together.

    python -m integration_tests.distributed.worker_torch_spikes RANK FOLDER

Prints which steps were applied: with shards of FSDP2, and with whole weights and
gradients that the processes average, as `DistributedDataParallel` does.
"""

import json
import sys

import keras
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import keras_lso
from integration_tests.distributed import spikes, torch_training

rank, folder = int(sys.argv[1]), sys.argv[2]


def parameters(is_sharded):
    whole = torch.nn.ParameterList(
        torch.nn.Parameter(torch.ones(shape)) for shape in spikes.SHAPES
    )
    if is_sharded:
        fully_shard(torch.nn.Sequential(whole), mesh=init_device_mesh("cpu", (2,)))
    return [keras.Variable(p) for p in whole]


@torch.no_grad()
def run(is_sharded):
    variables = parameters(is_sharded)
    optimizer = keras_lso.GuardedOptimizer(
        keras.optimizers.Adam(0.01), spike_guard=keras_lso.SpikeGuard(**spikes.GUARD)
    )
    applied = []
    for step in range(24):
        grads = [torch.from_numpy(g) for g in spikes.gradients(step, rank)]
        for g in grads:
            torch.distributed.all_reduce(g)
            g.div_(2)
        if is_sharded:
            grads = [
                distribute_tensor(g, v.value.device_mesh, v.value.placements)
                for g, v in zip(grads, variables, strict=True)
            ]
        optimizer.apply(grads, variables)
        applied.append(bool(optimizer.last_step_applied))
    history = optimizer._spikes.variables
    values = [keras.ops.convert_to_numpy(v).tolist() for v in history]
    return [applied, int(optimizer.skipped_spikes), values]


with torch_training.process_group(rank, folder):
    print("AVERAGED", json.dumps(run(False)))
    print("SHARDS", json.dumps(run(True)))
