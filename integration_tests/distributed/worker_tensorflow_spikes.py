"""Two replicas of which one has an outlier skip the step together.

Prints which steps each applied, and whether they are alike.
"""

import json

import numpy as np
import tensorflow as tf

from integration_tests.distributed import spikes
from integration_tests.distributed.two_replicas import strategy


def given(step):
    """Returns what each replica has as its gradients."""
    return [
        strategy.experimental_distribute_values_from_function(
            lambda context, j=j: tf.constant(
                spikes.gradients(step, context.replica_id_in_sync_group)[j]
            )
        )
        for j in range(len(spikes.SHAPES))
    ]


def run(decorate):
    with strategy.scope():
        optimizer, variables = spikes.make()

    def on_each_replica(*grads):
        optimizer.apply(list(grads), variables)

    step = decorate(lambda grads: strategy.run(on_each_replica, args=grads))
    applied = []
    for i in range(24):
        step(given(i))
        applied.append(bool(optimizer.last_step_applied))
    values = [
        [r.numpy() for r in strategy.experimental_local_results(v.value)]
        for v in [*variables, *optimizer.variables]
    ]
    are_alike = all(np.array_equal(*pair) for pair in values)
    return [applied, are_alike, int(optimizer.skipped_spikes)]


for decorate in (tf.function, lambda step: step):
    print("APPLIED", json.dumps(run(decorate)))
