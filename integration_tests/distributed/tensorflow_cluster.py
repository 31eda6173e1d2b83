"""The strategy of a worker: two replicas in its process, or one in each of two."""

import json
import os

import tensorflow as tf


def join(rank=None, *ports):
    """Returns the strategy; to be called before TensorFlow starts."""
    if rank is None:
        [cpu] = tf.config.list_physical_devices("CPU")
        devices = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, devices)
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    cluster = {"worker": [f"localhost:{port}" for port in ports]}
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy()
