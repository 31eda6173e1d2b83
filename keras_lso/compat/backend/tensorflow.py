"""Compiled steps on TensorFlow, and the mean of gradients over replicas.

The replicas are those of tf.distribute, or Horovod's processes.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_lso._backend import autodiff, backend
from keras_lso._backend.tensors import in_float32, map_by_dtype
from keras_lso._backend.types import Tensor
from keras_lso.compat.backend import processes

AVERAGES_IN_STEP = True
HOW_TO_START = (
    "Make the model and the training op in a strategy's scope, `with "
    "strategy.scope():`, and call the op by `strategy.run(train_op, args)`, where "
    "`strategy = tf.distribute.MirroredStrategy()`, or "
    "`tf.distribute.MultiWorkerMirroredStrategy()` for several machines. "
    + processes.or_horovod("tensorflow")
)

trained_variables: Callable[..., list[keras.Variable]] = autodiff.trained_variables


def compile_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """See `compat.backend.compile_step`.

    Under a strategy, the function around `strategy.run` compiles the step, since
    replicas cannot synchronise in a function of their own.
    """
    # One function for batches of any length.
    compiled = tf.function(step, autograph=False, reduce_retracing=True)

    def call(*args):
        return (step if tf.distribute.has_strategy() else compiled)(*args)

    return call


def count_processes() -> int | None:
    """See `compat.backend.count_processes`. Several replicas may share a process."""
    if tf.distribute.has_strategy():
        return tf.distribute.get_strategy().num_replicas_in_sync
    hvd = processes.horovod("tensorflow")
    return hvd and hvd.size()


def average_over_processes(grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    """See `compat.backend.average_over_processes`. Sparse gradients stay sparse.

    A graph is fixed before it runs, so None does not count as zero. If another replica
    has the gradient, the graph raises an `InvalidArgumentError`, except under XLA,
    which has no errors.
    """
    grads = [g if g is None else backend.map_values(in_float32, g) for g in grads]
    if not tf.distribute.has_strategy():
        hvd = processes.horovod("tensorflow")
        grads = _checked(grads, hvd.allgather)
        return [g if g is None else hvd.allreduce(g) for g in grads]
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError(
            "Gradients are averaged between replicas, and this is no replica. Call "
            "the training op by `strategy.run(train_op, args)`."
        )
    if context.num_replicas_in_sync == 1:
        return grads
    gather = functools.partial(context.all_gather, axis=0)
    grads = _checked(grads, gather)
    # TensorFlow packs the tensors of a list into one, which must have one dtype.
    means = map_by_dtype(
        functools.partial(context.all_reduce, tf.distribute.ReduceOp.MEAN),
        [None if _is_sparse(g) else g for g in grads],
    )
    return [
        _sparse_mean(g, gather, context.num_replicas_in_sync) if _is_sparse(g) else m
        for m, g in zip(means, grads, strict=True)
    ]


def _sparse_mean(grad, gather, count):
    """Returns the rows of all replicas, each divided by the number of replicas."""
    return tf.IndexedSlices(
        gather(grad.values) / tf.cast(count, grad.dtype),
        gather(grad.indices),
        grad.dense_shape,
    )


def _checked(grads, gather):
    """Returns the gradients, and asserts that those of all replicas match."""
    mine = tf.constant([list(processes.digest([_describe(g) for g in grads]))])
    is_same = tf.reduce_all(tf.equal(gather(mine), mine))
    check = tf.debugging.Assert(
        is_same,
        [
            "The processes must have gradients of the same variables. This one has: "
            + ", ".join(_describe(g) for g in grads)
        ],
    )
    # `check` is None in eager mode, where the assertion has already run.
    with tf.control_dependencies([] if check is None else [check]):
        return [None if g is None else _identity(g) for g in grads]


def _describe(grad):
    if grad is None:
        return "None"
    if _is_sparse(grad):
        # The number of rows may differ.
        return f"sparse {grad.dtype.name} {grad.values.shape[1:]}"
    return f"{grad.dtype.name} {grad.shape}"


def _identity(grad):
    if not _is_sparse(grad):
        return tf.identity(grad)
    return tf.IndexedSlices(
        tf.identity(grad.values), tf.identity(grad.indices), grad.dense_shape
    )


def _is_sparse(grad):
    return isinstance(grad, tf.IndexedSlices)
