"""Trains in a loop that keeps checkpoints, and goes on from the latest.

    python -m ...worker_tensorflow_checkpoint FOLDER KILL_AFTER RANK PORT PORT

The second process kills itself after so many steps, unless they are all.
"""

import functools
import os
import signal
import sys

import tensorflow as tf

from integration_tests.distributed import problem, tensorflow_cluster
from integration_tests.distributed.tensorflow_loop import (
    CHECKPOINTED,
    STEPS_WITH_CHECKPOINTS,
    Loop,
    batches_of,
)

folder, kill_after, *address = sys.argv[1:]
rank, *ports = [int(a) for a in address]
strategy = tensorflow_cluster.join(rank, *ports)

case, pattern = CHECKPOINTED
loop = Loop(case, strategy)
with strategy.scope():
    step = tf.Variable(0)
checkpoint = tf.train.Checkpoint(
    weights=loop.weights, optimizer=loop.optimizer, step=step
)
# All save, since TensorFlow may have to ask all, but only one writes what is kept.
kept = f"{folder}/checkpoints"
manager = tf.train.CheckpointManager(
    checkpoint, f"{folder}/of worker {rank}" if rank else kept, max_to_keep=2
)
latest = tf.train.latest_checkpoint(kept)
if latest is not None:
    checkpoint.restore(latest).assert_consumed()
print("START", int(step.numpy()))

batches = functools.partial(batches_of, pattern, 2)
while int(step.numpy()) < STEPS_WITH_CHECKPOINTS:
    recorded = loop.record(batches, steps=[int(step.numpy())])
    step.assign_add(1)
    if int(step.numpy()) == int(kill_after) and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if int(step.numpy()) % 10 == 0:
        manager.save()
for replica, states in enumerate(recorded, start=rank):
    problem.save(f"{folder}/last {replica}.npz", states)
