"""One of two processes of JAX or PyTorch; prints the results of `compat.backend`.

    python -m integration_tests.distributed.worker_processes RANK FOLDER PORT GRADIENTS

GRADIENTS is a JSON file: for each process a list of `[dtype, values]` or None.
"""

import json
import sys

import keras
import numpy as np
from keras import ops

from integration_tests.distributed.two_processes import BATCHES, bits, make_train_op
from keras_lso.compat import backend

rank, folder, port, path = int(sys.argv[1]), *sys.argv[2:]

if keras.backend.backend() == "jax":
    import jax

    # How processes on CPUs communicate: JAX 0.5 has another default.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
else:
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )


def tensor(gradient):
    if gradient is None:
        return None
    dtype, values = gradient
    return ops.convert_to_tensor(np.array(values, "float64"), dtype=dtype)


with open(path) as file:
    grads = [tensor(g) for g in json.load(file)[rank]]
result = {"means": [bits(m) for m in backend.average_over_processes(grads)]}
if keras.backend.backend() == "jax":
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    over_all = NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec("x"))
    whole = jax.make_array_from_process_local_data(over_all, np.float32([rank]))
    mean, local = backend.average_over_processes([whole, ops.ones((2,)) * rank])
    own = mean.addressable_data(0)
    result["spans processes"] = [own.tolist(), local.tolist()]

weight = keras.Variable([1.0, 2.0])
train_op = make_train_op(weight)
result["trained"] = []
for batches in BATCHES:
    train_op(np.float32(batches[rank]))
    result["trained"].append(ops.convert_to_numpy(weight).tolist())
result["scale"] = float(train_op.optimizer.loss_scale)
print("RESULT", json.dumps(result))

# Threads that wait for the other process would be cut off at the end of this one.
if keras.backend.backend() == "jax":
    jax.distributed.shutdown()
else:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
