"""One read of the gradients on TensorFlow: in graphs, under XLA, on replicas."""

from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.ops import control_flow_util

from keras_lso._backend.finite_check import Branch, FiniteCheck
from keras_lso._backend.framework import (
    CHECK_ONLY,
    Framework,
    GradientStats,
    MeasureOptions,
)
from keras_lso._backend.tensors import Tensor


def measure(
    framework: Framework, grads: list[Tensor], options: MeasureOptions = CHECK_ONLY
) -> GradientStats:
    """See `Framework.measure`."""
    values = [framework.elements_of(g) for g in grads]
    rules = options.rules
    if not (rules and rules[0].has_norms and in_xla()):
        options = options._replace(rules=None)
    stats = _CHECK.measure(framework, values, options)
    context = replica_context()
    if context is None or options.are_alike:
        return stats
    finite = _agree(context, stats.finite)
    return stats._replace(finite=finite, amax=_largest(context, stats.amax))


def in_xla() -> bool:
    """Whether the current graph is compiled by XLA."""
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def is_on_cpus() -> bool:
    """Whether there is no other device."""
    return all(d.device_type == "CPU" for d in tf.config.list_logical_devices())


def replica_context() -> tf.distribute.ReplicaContext | None:
    """Returns the context of this replica if there are several, else None."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return context


def l2_norm(values: tf.Tensor) -> tf.Tensor:
    """Returns the L2 norm of a tensor by one kernel, which writes no squares."""
    return tf.sqrt(2.0 * tf.nn.l2_loss(values))


def _sum_of_magnitudes(values: tf.Tensor) -> tf.Tensor:
    """Returns the sum of the magnitudes of a tensor, for a step that XLA compiles."""
    # On a CPU XLA writes magnitudes to memory before it adds them up, which takes four
    # times as long as a sum that takes them itself, in vectors of eight. A GPU would
    # leave most of its threads idle.
    size = values.shape.num_elements()
    if size is None or size % 8 or not is_on_cpus():
        return tf.reduce_sum(tf.abs(values))
    number = tf.TensorSpec((), values.dtype)
    add = _add_magnitudes.get_concrete_function(number, number)
    rows, zero = tf.reshape(values, (-1, 8)), tf.zeros((), values.dtype)
    return tf.reduce_sum(gen_xla_ops.xla_reduce(rows, zero, [0], add))


@tf.function(autograph=False)
def _add_magnitudes(total: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Returns the sum of the magnitudes of two numbers."""
    return tf.abs(total) + tf.abs(other)


class _TensorFlowCheck(FiniteCheck):
    norm = staticmethod(l2_norm)

    def cond(
        self, flag: Tensor, if_true: Branch, if_false: Branch, *operands: Any
    ) -> Tensor:
        branches = (lambda: if_true(*operands)), (lambda: if_false(*operands))
        return tf.cond(flag, *branches)

    def bound(self, values: Tensor) -> Tensor:
        return _sum_of_magnitudes(values) if in_xla() else l2_norm(values)

    def is_proven(self, values: Tensor) -> Tensor:
        if values.dtype == tf.float16 and in_xla():
            # For a sum, XLA would write the values in float32, which takes longer.
            return tf.reduce_all(tf.math.is_finite(values))
        return tf.math.is_finite(tf.reduce_sum(tf.cast(values, tf.float32)))


_CHECK = _TensorFlowCheck()


def _agree(context: tf.distribute.ReplicaContext, finite: tf.Tensor) -> tf.Tensor:
    """Whether the gradients are finite on every replica."""
    overflows = tf.cast(tf.logical_not(finite), tf.float32)
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, overflows)
    return tf.equal(total, 0.0)


def _largest(
    context: tf.distribute.ReplicaContext, amax: tf.Tensor | None
) -> tf.Tensor | None:
    """Returns the largest magnitude on all replicas; None if it was not asked for."""
    if amax is None:
        return None
    return tf.reduce_max(context.all_gather(amax[tf.newaxis], axis=0))
