"""Trains on two replicas of which one at a time overflows; prints the state.

Run by `test_replicas.py` in a process of its own: logical devices must be set up
before TensorFlow starts.
"""

import json

import keras
import numpy as np
import tensorflow as tf

import keras_lso

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

with strategy.scope():
    weight = keras.Variable(np.array([1.0, -0.0], "float32"))
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.5), initial_scale=8.0
    )
    optimizer.build([weight])


@tf.function
def step(overflowing_replica):
    def on_each_replica(overflowing_replica):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        value = tf.where(tf.equal(replica, overflowing_replica), np.inf, 2.0)
        optimizer.apply([value * tf.constant([1.0, 2.0])], [weight])

    strategy.run(on_each_replica, args=(overflowing_replica,))


for overflowing_replica in [0, 1, -1, 1]:
    step(tf.constant(overflowing_replica))
    replicas = strategy.experimental_local_results(weight.value)
    state = {
        "weights": [replica.numpy().tolist() for replica in replicas],
        "scale": float(optimizer.loss_scale),
        "skipped": int(optimizer.skipped_steps),
        "applied": int(optimizer.iterations.numpy()),
    }
    print("STATE", json.dumps(state))
