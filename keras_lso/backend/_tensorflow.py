"""The primitives on TensorFlow: `tf.function`s, XLA, and replicas."""

from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from keras_lso.backend import generic, rules
from keras_lso.backend.generic import Measurement

__all__ = [
    "compute_gradients",
    "fused_step",
    "fused_step_takes",
    "map_values",
    "measure",
    "run_if",
]

SUPPORTS_STATELESS = False


def measure(grads, norms=False, amax=False, inv_scale=1.0):
    """See `generic.measure`.

    A sum that is finite proves finite elements: an inf or a NaN never leaves it.
    One that is not proves nothing (large numbers add up to inf), nor does any if
    unscaling makes the gradients larger: only then every element is looked at. XLA
    takes half the time for it.
    """
    values = [_values(g) for g in grads]
    sums = tf.stack([tf.reduce_sum(tf.cast(v, tf.float32)) for v in values])
    proven = tf.reduce_all(tf.math.is_finite(sums)) & (inv_scale <= 1.0)
    finite = tf.cond(
        proven, lambda: tf.constant(True), lambda: _all_finite(values, inv_scale)
    )
    return Measurement(
        _agree(finite),
        [tf.norm(tf.cast(v, tf.float32)) for v in values] if norms else None,
        generic.largest_magnitude(values) if amax else None,
    )


def _all_finite(values, inv_scale):
    values = [generic.in_float32(v) for v in values]
    values = [v * tf.cast(inv_scale, v.dtype) for v in values]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])


def _agree(finite):
    """Whether the gradients are finite on every replica."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return finite
    overflows = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, overflows), 0.0)


def run_if(finite, step, grads, state):
    """See `generic.run_if`.

    A `tf.cond` runs only the branch it needs. Where optimizers reduce their
    gradients by `merge_call`, which no replica may do inside a `tf.cond`, the
    replicas meet first and the `tf.cond` stands around all of them.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError(
            "`apply()` must be called in a replica context. Call it inside a "
            "function that you pass to `strategy.run`."
        )
    if context.num_replicas_in_sync == 1:
        tf.cond(finite, lambda: _nothing(step(grads)), _nothing)
        return

    def on_all_replicas(strategy, finite, grads):
        tf.cond(
            strategy.experimental_local_results(finite)[0],
            lambda: _nothing(
                strategy.extended.call_for_each_replica(step, args=(grads,))
            ),
            _nothing,
        )

    context.merge_call(on_all_replicas, args=(finite, grads))


def _nothing(*_):
    """Both branches of a `tf.cond` must return alike."""
    return None


def fused_step(rule, variables, slots, grads, finite, inv_scale):
    """See `generic.fused_step`.

    Under XLA a masked update stays in place, where a `tf.cond` copies the state.
    Outside XLA, TensorFlow has one kernel a variable for each rule.
    """
    if _in_xla():
        generic.fused_step(rule, variables, slots, grads, finite, inv_scale)
        return
    kernel = _KERNELS[type(rule)]

    def step():
        for variable, slot, grad in zip(variables, slots, grads, strict=True):
            handles = [v.value.handle for v in (variable, *slot)]
            kernel(rule, tf.cast(grad, tf.float32), inv_scale, *handles)

    tf.cond(finite, step, _nothing)


def fused_step_takes(rule, variables, gradients):
    """Whether these are dense float32 variables that no replicas share."""
    return (
        rule in _KERNELS
        and tf.distribute.get_strategy().num_replicas_in_sync == 1
        and not any(isinstance(g, tf.IndexedSlices) for g in gradients)
        and all(v.dtype == "float32" for v in variables)
    )


def _in_xla():
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


# In the first two the scale goes into the learning rate: the gradient is not
# written a second time.


def _apply_sgd(rule, grad, inv_scale, w):
    rate = rule.learning_rate * inv_scale
    tf.raw_ops.ResourceApplyGradientDescent(var=w, alpha=rate, delta=grad)


def _apply_momentum(rule, grad, inv_scale, w, m):
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=w,
        accum=m,
        lr=rule.learning_rate * inv_scale,
        grad=grad,
        momentum=tf.cast(rule.momentum, tf.float32),
        use_nesterov=rule.nesterov,
    )


def _apply_adam(rule, grad, inv_scale, w, m, v):
    grad = grad * inv_scale

    def move(slot, target, share):
        old = tf.raw_ops.ReadVariableOp(resource=slot, dtype=tf.float32)
        step = (target - old) * share
        tf.raw_ops.AssignAddVariableOp(resource=slot, value=step)

    # The kernel could move the slots too, but it takes `1 - beta` in float32, which
    # is off by 1e-5 for a beta of 0.999. Betas of 1 leave them as they are.
    move(m, grad, 1 - rule.beta_1)
    move(v, tf.square(grad), 1 - rule.beta_2)
    tf.raw_ops.ResourceApplyAdam(
        var=w,
        m=m,
        v=v,
        # `alpha` holds the bias correction already.
        beta1_power=0.0,
        beta2_power=0.0,
        lr=rule.alpha,
        beta1=1.0,
        beta2=1.0,
        epsilon=rule.epsilon,
        grad=grad,
    )


_KERNELS: dict[type, Callable[..., None]] = {
    rules.SGD: _apply_sgd,
    rules.Momentum: _apply_momentum,
    rules.Adam: _apply_adam,
}


def compute_gradients(loss_fn, variables):
    """See `generic.compute_gradients`."""
    with tf.GradientTape() as tape:
        loss = loss_fn()
    return loss, tape.gradient(loss, [v.value for v in variables])


def map_values(fn, grad):
    """See `generic.map_values`."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(fn(grad.values), grad.indices, grad.dense_shape)
    return fn(grad)


def _values(grad):
    """The elements of a gradient; a sparse one may name an index twice."""
    if not isinstance(grad, tf.IndexedSlices):
        return tf.convert_to_tensor(grad)
    indices, positions = tf.unique(grad.indices)
    return tf.math.unsorted_segment_sum(grad.values, positions, tf.size(indices))
