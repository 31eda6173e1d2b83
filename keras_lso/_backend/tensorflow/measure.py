"""One read of the gradients on TensorFlow: in graphs, under XLA, on replicas."""

import math

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from keras_lso._backend.framework import Measurement
from keras_lso._backend.tensors import (
    PROOF,
    PROOF_OF_FLOAT16,
    amax_of,
    in_float32,
    is_usual,
    joint_norm,
    norm_of_all,
    pack,
    rule_norms,
)


def measure(
    framework,
    grads,
    amax=False,
    inv_scale=1.0,
    rules=None,
    targets=None,
    are_alike=False,
    norm=False,
    clips=False,
    headroom=1.0,
):
    """See `Framework.measure`."""
    # A finite sum proves that all elements are finite, and so does a finite norm that a
    # rule takes. Without such a proof, or if unscaling enlarges the gradients, every
    # element is checked.
    values = [framework.elements_of(g) for g in grads]
    of_rules = plain = total = None
    factor = inv_scale * headroom
    are_in_float16 = all(v.dtype == tf.float16 for v in values)
    needs_norm = norm or (headroom > 1 and not are_in_float16)
    if needs_norm or clips:
        packs = [tf.cast(v, tf.float32) for v in _pack(values)]
        norm_of = l2_norm if norm or clips else _bound
        plain = norm_of_all(list(map(norm_of, packs)))
    if norm or clips:
        total = tf.cond(is_usual(plain), lambda: plain, lambda: joint_norm(packs))
        total *= inv_scale
    if rules and rules[0].has_norms and in_xla():
        unscaled = [in_float32(v) * inv_scale for v in values]
        of_rules = rule_norms(framework, rules, unscaled, targets)
    if clips:
        finite = tf.math.is_finite(tf.square(total * headroom))
    elif of_rules and not needs_norm:
        proofs = [
            tf.reduce_sum(v) if n is None else n[0]
            for v, n in zip(unscaled, of_rules, strict=True)
        ]
        finite = _check(values, factor, proofs)
    elif needs_norm:
        finite = tf.cond(
            plain * factor < PROOF,
            lambda: tf.constant(True),
            lambda: _all_finite(values, factor),
        )
    else:
        proofs = [_proof(v) for v in _pack(values)]
        limit = PROOF_OF_FLOAT16 if are_in_float16 else 1.0
        finite = _check(values, factor, proofs, limit)
    largest = amax_of(_pack(values)) if amax else None
    if not are_alike:
        finite = _agree(finite)
        largest = None if largest is None else _max_over_replicas(largest)
    return Measurement(finite, of_rules, largest, total)


def in_xla():
    """Whether the current graph is compiled by XLA."""
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def replica_context():
    """Returns the context of this replica if there are several, else None."""
    context = tf.distribute.get_replica_context()
    is_alone = context is None or context.num_replicas_in_sync == 1
    return None if is_alone else context


def l2_norm(values):
    """Returns the L2 norm of a tensor by one kernel, which writes no squares."""
    return tf.sqrt(2.0 * tf.nn.l2_loss(values))


def _bound(values):
    """Returns a norm that takes least time; no magnitude exceeds it."""
    # XLA adds up squares in twice the time.
    return tf.reduce_sum(tf.abs(values)) if in_xla() else l2_norm(values)


def _proof(values):
    """Returns a scalar. If it is finite, so are all values."""
    if values.dtype == tf.float16 and in_xla():
        # For a sum, XLA would write the values in float32, which takes longer.
        is_finite = tf.reduce_all(tf.math.is_finite(values))
        return tf.where(is_finite, 0.0, math.inf)
    return tf.reduce_sum(tf.cast(values, tf.float32))


def _check(values, factor, proofs, limit=1.0):
    """Whether all values are finite, as finite `proofs` prove below a limit."""
    return tf.cond(
        tf.reduce_all(tf.math.is_finite(tf.stack(proofs))) & (factor <= limit),
        lambda: tf.constant(True),
        lambda: _all_finite(values, factor),
    )


def _all_finite(values, factor):
    values = [in_float32(v) for v in _pack(values)]
    values = [v * tf.cast(factor, v.dtype) for v in values]
    # XLA takes ten times as long to compile `reduce_all`.
    bad = [tf.cast(~tf.math.is_finite(v), tf.float32) for v in values]
    return tf.equal(tf.add_n([tf.reduce_sum(b) for b in bad]), 0.0)


def _pack(values):
    """See `tensors.pack`. In a `tf.function` shapes may be unknown."""
    return pack(values, lambda v: v.shape.num_elements())


def _agree(finite):
    """Whether the gradients are finite on every replica."""
    context = replica_context()
    if context is None:
        return finite
    overflows = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, overflows), 0.0)


def _max_over_replicas(amax):
    context = replica_context()
    if context is None:
        return amax
    return tf.reduce_max(context.all_gather(amax[tf.newaxis], axis=0))
