"""Compiled steps on TensorFlow, and the mean of gradients over replicas."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_lso._backend.tensors import Tensor

HOW_TO_START = (
    "Make the model and the training op in a strategy's scope, `with "
    "strategy.scope():`, and call the op by `strategy.run(train_op, args)`, where "
    "`strategy = tf.distribute.MirroredStrategy()`, or "
    "`tf.distribute.MultiWorkerMirroredStrategy()` for several machines."
)


def compile_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles by `tf.function`.

    Under a strategy, the function around `strategy.run` compiles the step, since
    replicas cannot synchronise in a function of their own.
    """
    # One function for batches of any length.
    compiled = tf.function(step, autograph=False, reduce_retracing=True)

    def call(*args):
        return (step if tf.distribute.has_strategy() else compiled)(*args)

    return call


def processes_run() -> bool:
    """Whether a strategy runs its replicas, which may share a process."""
    return bool(tf.distribute.has_strategy())


def means_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """Returns the means over all replicas."""
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.MEAN, grads)
