"""Compiled steps on TensorFlow, and the mean of gradients over replicas."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_lso._backend import autodiff
from keras_lso._backend.types import Tensor

AVERAGES_IN_STEP = True
HOW_TO_START = (
    "Make the model and the training op in a strategy's scope, `with "
    "strategy.scope():`, and call the op by `strategy.run(train_op, args)`, where "
    "`strategy = tf.distribute.MirroredStrategy()`, or "
    "`tf.distribute.MultiWorkerMirroredStrategy()` for several machines."
)

trained_variables: Callable[..., list[keras.Variable]] = autodiff.trained_variables


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


def count_processes() -> int | None:
    """Returns the number of replicas, which may share a process; None if none run."""
    if not tf.distribute.has_strategy():
        return None
    return tf.distribute.get_strategy().num_replicas_in_sync


def means_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """Returns the means over all replicas."""
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError(
            "Gradients are averaged between replicas, and this is no replica. Call "
            "the training op by `strategy.run(train_op, args)`."
        )
    return context.all_reduce(tf.distribute.ReduceOp.MEAN, grads) if grads else []
