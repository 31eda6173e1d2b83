"""The strategy of a worker: two replicas in its process, or one in each of two."""

import json
import os

import tensorflow as tf


def join(rank=None, *ports):
    """Returns the strategy; to be called before TensorFlow starts."""
    if rank is None:
        from integration_tests.distributed.two_replicas import strategy

        return strategy
    cluster = {"worker": [f"localhost:{port}" for port in ports]}
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy()
