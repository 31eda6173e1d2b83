"""One of two JAX processes of two devices that save by orbax, and go on from there.

    python -m integration_tests.distributed.worker_jax_fault RANK PORT FOLDER STOP

Before step STOP the second process kills itself, as if its machine were gone; none does
if STOP is -1. Who reaches the end writes the last state, as it holds it, to
`FOLDER/RANK.npz`.
"""

import os
import pathlib
import signal
import sys

import jax
import keras
import numpy as np
import orbax.checkpoint as ocp

rank, port, folder, stop = int(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])
# How processes on CPUs talk, which JAX 0.5 has to be told.
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)

from integration_tests.distributed import problem  # noqa: E402
from integration_tests.distributed.jax_meshes import CPUS, model_parallel  # noqa: E402
from integration_tests.distributed.jax_training import Training  # noqa: E402

STEPS = 100

# A row of the mesh has a device of each process.
distribution = model_parallel(np.reshape(CPUS, (2, 2)).T)
keras.distribution.set_distribution(distribution)
layout = distribution.get_data_layout((1, 1)).backend_layout
training = Training("LARS")
train_step = jax.jit(lambda state, batch: training.step(state, batch)[0])


def batch_at(step):
    arrays = problem.whole_batch("random", step, 2)
    return [
        jax.make_array_from_callback(array.shape, layout, array.__getitem__)
        for array in arrays
    ]


options = ocp.CheckpointManagerOptions(save_interval_steps=20, max_to_keep=2)
with ocp.CheckpointManager(pathlib.Path(folder) / "checkpoints", options=options) as m:
    state, start = training.state, 0
    if m.latest_step() is not None:
        start = m.latest_step()
        state = m.restore(start, args=ocp.args.StandardRestore(state))
    print("START", start)
    for step in range(start, STEPS):
        if step == stop and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state = train_step(state, batch_at(step))
        m.save(step + 1, args=ocp.args.StandardSave(state))

# All parts that this process holds, one after the other.
parts = [np.array(s.data) for v in jax.tree.leaves(state) for s in v.addressable_shards]
problem.save(f"{folder}/{rank}.npz", [parts])
jax.distributed.shutdown()
