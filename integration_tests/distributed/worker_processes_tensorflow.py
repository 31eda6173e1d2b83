"""One of two processes of TensorFlow; prints the results of `compat.backend`.

    python -m integration_tests.distributed.worker_processes_tensorflow GRADIENTS \
        RANK PORT PORT

GRADIENTS is a JSON file: for each process a list of `[dtype, values]` or None.
"""

import functools
import json
import sys

import keras
import numpy as np
import tensorflow as tf

from integration_tests.distributed import tensorflow_cluster
from integration_tests.distributed.two_processes import BATCHES, bits, make_train_op
from keras_lso.compat import backend

path, *address = sys.argv[1:]
strategy = tensorflow_cluster.join(*map(int, address))

with open(path) as file:
    gradients = json.load(file)


def on_replicas(make):
    """Returns a value for each replica, `make(rank)`."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )


def tensor(gradient):
    dtype, values = gradient
    return tf.cast(tf.constant(np.array(values, "float64")), dtype)


def average(values, make_grads):
    """Returns for each replica here the means of `make_grads(values)`, a list."""

    def on_replica(values):
        values = tf.nest.map_structure(tf.identity, values)
        return backend.average_over_processes(make_grads(values))

    @functools.partial(tf.function, autograph=False)
    def run(values):
        return strategy.run(on_replica, args=(values,))

    means = [strategy.experimental_local_results(m) for m in run(values)]
    # It has one None, of all replicas.
    count = max(len(of_replicas) for of_replicas in means)
    means = [m * count if m == (None,) else m for m in means]
    return list(zip(*means, strict=True))


def message(fn, *args):
    try:
        fn(*args)
    except RuntimeError as error:
        return str(error)


positions = [i for i, g in enumerate(gradients[0]) if g is not None]
values = {
    str(i): on_replicas(lambda rank, i=i: tensor(gradients[rank][i])) for i in positions
}
means = average(
    values, lambda values: [values.get(str(i)) for i in range(len(gradients[0]))]
)

result = {"means": [[bits(m) for m in of_replica] for of_replica in means]}
with strategy.scope():
    weight = keras.Variable([1.0, 2.0])
    train_op = make_train_op(weight, var_list=[weight])


@functools.partial(tf.function, autograph=False)
def train(batch, skip_update):
    strategy.run(train_op, args=(batch,), kwargs={"skip_update": skip_update})


result["trained"] = []
for i, batches in enumerate(BATCHES):
    batch = on_replicas(lambda rank, batches=batches: tf.constant(batches[rank]))
    train(batch, skip_update=i % 2 == 0)
    local = strategy.experimental_local_results(weight.value)
    result["trained"].append([value.numpy().tolist() for value in local])
result["scale"] = float(train_op.optimizer.loss_scale)
with strategy.scope():
    result["outside of replicas"] = message(train_op, tf.ones(2))
result["outside of all"] = message(lambda: train_op(tf.ones(2), skip_update=False))
print("RESULT", json.dumps(result))
