"""Trains on two replicas, some of which overflow; writes their states.

Then prints the results of unusual gradients: too large only as a sum, sparse, missing,
and new values in place of gradients (float8 scales).

    python -m integration_tests.distributed.worker_tensorflow_loop FOLDER
    python -m integration_tests.distributed.worker_tensorflow_loop FOLDER RANK PORT PORT
"""

import functools
import json
import sys

import keras
import numpy as np
import tensorflow as tf

import keras_lso
from integration_tests.distributed import problem, tensorflow_cluster
from integration_tests.distributed.tensorflow_loop import (
    CASES,
    OF_ONE_PROCESS,
    PATTERNS_OF,
    Loop,
    batches_of,
)

folder, *address = sys.argv[1:]
rank, *ports = [int(a) for a in address] or [None]
strategy = tensorflow_cluster.join(rank, *ports)

result = {"collectives": {}}
for case in CASES:
    if case in OF_ONE_PROCESS and rank is not None:
        continue
    loop = Loop(case, strategy)
    batches = [tf.constant(b) for b in batches_of("none", 2, 0)]
    result["collectives"][case] = loop.count_collectives(batches)
    for pattern in PATTERNS_OF[case]:
        loop.restart()
        recorded = loop.record(functools.partial(batches_of, pattern, 2))
        for replica, states in enumerate(recorded, start=rank or 0):
            problem.save(f"{folder}/{case} {pattern} {replica}.npz", states)


def apply_to(variables, optimizer, make_grads, step=0):
    """Takes one step; returns the variables' values and the applied steps, local."""

    @functools.partial(tf.function, autograph=False)
    def apply():
        def on_replica():
            context = tf.distribute.get_replica_context()
            grads = make_grads(context.replica_id_in_sync_group, step)
            optimizer.apply(grads, variables, scaled=False)

        strategy.run(on_replica)

    apply()
    local = [strategy.experimental_local_results(v.value) for v in variables]
    values = [
        [v.numpy().tolist() for v in of_replica]
        for of_replica in zip(*local, strict=True)
    ]
    return [values, int(optimizer.iterations.numpy())]


def make(*values, **arguments):
    with strategy.scope():
        variables = [
            keras.Variable(np.array(v, "float32"), aggregation="mean") for v in values
        ]
        optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.5, **arguments))
        optimizer.build(variables)
    return variables, optimizer


def constant(gradients):
    return lambda replica, step: [tf.gather(gradients, replica)]


for name, dtype, gradients in (
    ("sum overflows", "float32", [[3e38, 1.0], [3e38, 1.0]]),
    ("sum of float16", "float16", [[6e4, 0.0], [6e4, 0.0]]),
):
    make_grads = constant(np.array(gradients, dtype))
    result[name] = apply_to(*make([1.0, -0.0]), make_grads)

# Rows that come twice, on one replica and on both; and a variable without gradient.
variables, optimizer = make(np.ones((3, 2)), [5.0], momentum=0.5)


def sparse(replica, step):
    values = np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], "float32")
    if step == 1:
        values[1, 0, 1] = np.nan
    indices = tf.gather([[2, 2], [0, 2]], replica)
    return [
        tf.IndexedSlices(tf.gather(values, replica), indices, tf.constant([3, 2])),
        None,
    ]


for step in range(3):
    result[f"sparse {step}"] = apply_to(variables, optimizer, sparse, step)

# As the scales of float8 are; this variable takes the mean of the replicas' values.
variables, optimizer = make([1.0, 1.0], 2.0)
variables[1].overwrite_with_gradient = True


def overwriting(replica, step):
    new_values = tf.constant([[4.0, 6.0], [4.0, np.inf], [np.nan, 4.0]][step])
    return [tf.ones(2), tf.gather(new_values, replica)]


for step in range(3):
    result[f"overwriting {step}"] = apply_to(variables, optimizer, overwriting, step)
print("RESULT", json.dumps(result))
