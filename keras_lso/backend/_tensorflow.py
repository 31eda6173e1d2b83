"""The primitives on TensorFlow: `tf.function`s, XLA, and replicas."""

import functools
import math

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from keras_lso.backend import generic, masters, processes, rules
from keras_lso.backend._tf_kernels import KERNELS, norm_of
from keras_lso.backend._tf_processes import (
    AVERAGES_IN_STEP,
    average_over_processes,
    check_processes_run,
    count_processes,
)
from keras_lso.backend.generic import (
    UPDATES_IN_PLACE,
    Measurement,
    register_list_class,
    scalar,
    trained_variables,
    with_positions,
    without_host,
)

__all__ = [
    "AVERAGES_IN_STEP",
    "UPDATES_IN_PLACE",
    "as_gradient",
    "average_over_processes",
    "check_on_replicas",
    "check_processes_run",
    "check_replica_context",
    "compile_step",
    "compute_gradients",
    "count_processes",
    "differentiate",
    "fused_step",
    "fused_step_takes",
    "is_traced",
    "is_variable",
    "l2_norms",
    "map_values",
    "measure",
    "outside_of_functions",
    "register_list_class",
    "run_if",
    "scalar",
    "to_dense",
    "total",
    "trained_variables",
    "with_positions",
    "without_host",
]

SUPPORTS_STATELESS = False


# AutoGraph would rewrite each function that is called in a `tf.function` of the user's,
# which takes longer than tracing it. Not so `run_if`: the inner optimizer may need it.
_not_converted = tf.autograph.experimental.do_not_convert


@_not_converted
def measure(grads, amax=False, inv_scale=1.0, rules=None, state=None, are_alike=False):
    """See `generic.measure`.

    A sum that is finite proves finite elements: an inf or a NaN never leaves it. So
    does a norm, if the rules want any. One that is not proves nothing (large numbers
    add up to inf), nor does any if unscaling makes the gradients larger: only then
    every element is looked at. XLA takes half the time for it.
    """
    values = [_values(g) for g in grads]
    if not rules or not rules[0].has_norms:
        proofs = [_proof(v) for v in _pack(values)]
        finite, norms = _check(values, inv_scale, proofs), None
    elif _in_xla():
        unscaled = [generic.in_float32(v) * inv_scale for v in values]
        norms = generic.norms_of(rules, unscaled, state)
        proofs = [
            tf.reduce_sum(v) if n is None else n[0]
            for v, n in zip(unscaled, norms, strict=True)
        ]
        finite = _check(values, inv_scale, proofs)
    else:
        finite, norms = _check_by_norms(values, inv_scale)
    top = generic.largest_magnitude(_pack(values)) if amax else None
    if not are_alike:
        finite, top = _agree(finite), top if top is None else _largest(top)
    return Measurement(finite, norms, top)


def _proof(values):
    """Returns a scalar which, if it is finite, proves that all are."""
    if values.dtype == tf.float16 and _in_xla():
        # XLA writes them in float32 before it adds them up, which takes longer.
        is_finite = tf.reduce_all(tf.math.is_finite(values))
        return tf.where(is_finite, 0.0, math.inf)
    return tf.reduce_sum(tf.cast(values, tf.float32))


def _check(values, inv_scale, proofs):
    """Whether all are finite, which they are if the `proofs` are."""
    return tf.cond(
        _are_proven(proofs, inv_scale),
        lambda: tf.constant(True),
        lambda: _all_finite(values, inv_scale),
    )


def _check_by_norms(values, inv_scale):
    """Does the same by the norms; returns the unscaled gradients' norms as well."""
    values = [tf.cast(v, tf.float32) for v in values]
    proofs = tf.stack([norm_of(v) for v in values])
    finite, norms = tf.cond(
        _are_proven(proofs, inv_scale),
        lambda: (tf.constant(True), proofs * inv_scale),
        lambda: (
            _all_finite(values, inv_scale),
            tf.stack([norm_of(v * inv_scale) for v in values]),
        ),
    )
    return finite, tf.unstack(norms, len(values))


def _are_proven(proofs, inv_scale):
    return tf.reduce_all(tf.math.is_finite(tf.stack(proofs))) & (inv_scale <= 1.0)


def _all_finite(values, inv_scale):
    values = [generic.in_float32(v) for v in _pack(values)]
    values = [v * tf.cast(inv_scale, v.dtype) for v in values]
    # A sum, since XLA takes ten times as long to compile `reduce_all`.
    bad = [tf.cast(~tf.math.is_finite(v), tf.float32) for v in values]
    return tf.equal(tf.add_n([tf.reduce_sum(b) for b in bad]), 0.0)


def _pack(values):
    """See `generic.pack`; in a `tf.function` shapes may be unknown."""
    return generic.pack(values, lambda v: v.shape.num_elements())


def _agree(finite):
    """Whether the gradients are finite on every replica."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return finite
    overflows = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, overflows), 0.0)


def _largest(amax):
    """Returns the largest magnitude on all replicas."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return amax
    return tf.reduce_max(context.all_gather(amax[tf.newaxis], axis=0))


def total(grads, axis_name=None):
    """See `generic.total`."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return grads
    # TensorFlow packs the tensors of a list into one, which must have one dtype.
    return processes.map_by_dtype(
        functools.partial(context.all_reduce, tf.distribute.ReduceOp.SUM),
        [g if g is None else map_values(generic.in_float32, g) for g in grads],
    )


def run_if(finite, step, grads, state):
    """See `generic.run_if`.

    A `tf.cond` runs only the branch it needs. Optimizers write their variables by
    `merge_call`, for which the replicas meet, and this they may not do inside a
    `tf.cond`. So several meet first, and the `tf.cond` stands around all of them. One
    replica has nobody to wait for: inside it steps in a context that merges at once.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        tf.cond(finite, lambda: _nothing(_step_alone(step, grads)), _nothing)
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


def _step_alone(step, grads):
    """Steps as the only replica, in TensorFlow's context for one.

    A `MirroredStrategy` has another, in which `merge_call` hands over to the thread
    that runs the replicas, even if there is one only, and which is refused in a graph
    that this thread has not seen: that of a `tf.cond`, of the caller's or the
    optimizer's own (accumulation, averages). Without a strategy it is there already.
    """
    if not tf.distribute.has_strategy():
        step(grads)
        return
    with tf.distribute.ReplicaContext(tf.distribute.get_strategy(), 0):
        step(grads)


def _nothing(*_):
    """Both branches of a `tf.cond` must return alike."""
    return None


@_not_converted
def fused_step(
    rules,
    variables,
    slots,
    grads,
    finite=None,
    inv_scale=None,
    norms=None,
    narrow=None,
):
    """See `generic.fused_step`.

    Under XLA a masked update stays in place, where a `tf.cond` copies the state.
    Outside XLA, TensorFlow has one kernel a variable for each rule. A replica steps on
    its own copies of the variables: gradients and flag are the same on all replicas.
    """
    if _in_xla():
        generic.fused_step(
            rules, variables, slots, grads, finite, inv_scale, norms, narrow
        )
        return
    inv_scale = 1.0 if inv_scale is None else inv_scale
    norms = norms or [None] * len(rules)

    pairs = masters.pairs_of(variables, narrow)

    def step():
        _restart(pairs)
        for rule, variable, slot, grad, norm in zip(
            rules, variables, slots, grads, norms, strict=True
        ):
            state = [v.value.handle for v in (variable, *slot)]
            kernel = KERNELS[type(rule)]
            kernel(rule, tf.cast(grad, tf.float32), inv_scale, norm, *state)
        for master, low in pairs:
            _assign_here(low, masters.rounded(master, low.dtype))

    if finite is None:
        step()
    else:
        tf.cond(finite, step, _nothing)


def _restart(pairs):
    """Lets the masters of variables that were assigned from outside restart there."""
    if not pairs:
        return

    def restart():
        for master, low in pairs:
            value = tf.convert_to_tensor(low)
            restarted = masters.restarted(tf.convert_to_tensor(master), value)
            _assign_here(master, restarted)

    # Without looking for what is too large for float16.
    are_in_step = [
        tf.reduce_all(tf.equal(tf.cast(master, low.dtype), low))
        for master, low in pairs
    ]
    tf.cond(tf.reduce_all(are_in_step), _nothing, restart)


def _assign_here(variable, value):
    """Assigns to this replica's copy alone: `variable.assign` would wait for all."""
    [variable] = _tf_variables([variable])
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def fused_step_takes(rule, variables, gradients):
    """Whether these are float32 variables, of which each replica has its copy."""
    return (
        rule in KERNELS
        and _are_on_each_replica(variables)
        and not any(isinstance(g, tf.IndexedSlices) for g in gradients)
        and not any(g.dtype == tf.float64 for g in gradients)
        and all(v.dtype == "float32" for v in variables)
    )


# Those that keep a copy of each variable on each replica. A step that does the same to
# every copy needs no exchange beside the gradients'.
_MIRRORED = tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy


def _are_on_each_replica(variables):
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1:
        return True
    return (
        isinstance(strategy, _MIRRORED)
        and not _in_xla()
        and all(isinstance(v.value, tf.distribute.DistributedValues) for v in variables)
    )


def check_on_replicas(variables):
    """See `generic.check_on_replicas`."""
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1 or not isinstance(strategy, _MIRRORED):
        return
    for v, behind in zip(variables, _tf_variables(variables), strict=True):
        if not isinstance(behind, tf.distribute.DistributedValues):
            path = getattr(v, "path", v.name)  # TensorFlow's own have none.
            raise ValueError(
                f"The variable {path!r} was not made in the strategy's scope: all "
                "replicas would write to the same one, each its own step. Make the "
                "model and the optimizer inside of `with strategy.scope():`, and call "
                "`optimizer.build(model.trainable_variables)` there."
            )


def _in_xla():
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def compile_step(step):
    """See `generic.compile_step`.

    Replicas meet in a step, even a single one, which they cannot do in a function of
    their own. The one around `strategy.run` compiles it.
    """
    # A new function for each length of a batch would be too many.
    compiled = tf.function(step, autograph=False, reduce_retracing=True)

    def call(*args):
        return (step if tf.distribute.has_strategy() else compiled)(*args)

    return call


def outside_of_functions():
    """See `generic.outside_of_functions`."""
    return tf.init_scope()


def is_traced(values):
    """See `generic.is_traced`."""
    return not tf.executing_eagerly()


def compute_gradients(loss_fn, variables, grad_loss=None, tape=None):
    """See `generic.compute_gradients`."""
    with tape or tf.GradientTape() as tape:
        if not callable(variables):
            # It follows those that are trainable, and no others, by itself.
            tape.watch(_tf_variables(variables))
        loss = tf.convert_to_tensor(loss_fn())
    if callable(variables):
        variables = variables()
    return loss, tape.gradient(
        loss, _tf_variables(variables), _weights_of(loss, grad_loss)
    )


def differentiate(loss, variables, transform, grad_loss=None, tape=None):
    """See `generic.differentiate`."""
    variables = _tf_variables(variables)
    if tape is None:
        if tf.executing_eagerly():
            raise ValueError(
                "`tape` is required when a Tensor loss is passed to `minimize`: the "
                "`tf.GradientTape` under which it was computed. Without one, a tensor "
                "can be differentiated in a `tf.function` only. Or pass a `loss` "
                f"without arguments to be called. Received: loss={loss!r}"
            )
        loss = transform(loss)
        return tf.gradients(loss, variables, _weights_of(loss, grad_loss))
    with tape:
        loss = transform(loss)
    return tape.gradient(loss, variables, _weights_of(loss, grad_loss))


def _weights_of(loss, grad_loss):
    """See `generic.weights_of`; in a `tf.function` shapes may be unknown."""
    if grad_loss is None:
        return None
    weights = tf.cast(grad_loss, loss.dtype)
    if loss.shape.is_fully_defined() and weights.shape.is_fully_defined():
        generic.check_shape_of_weights(loss.shape, weights.shape)
    return tf.broadcast_to(weights, tf.shape(loss))


def _tf_variables(variables):
    return [v.value if isinstance(v, keras.Variable) else v for v in variables]


def is_variable(value):
    """See `generic.is_variable`: Keras takes TensorFlow's own as well."""
    return isinstance(value, keras.Variable | tf.Variable)


def check_replica_context(method):
    """See `generic.check_replica_context`."""
    if tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            f"`{method}()` cannot be called in cross-replica context. Use "
            "`tf.distribute.Strategy.run` to enter replica context."
        )


def as_gradient(value):
    """See `generic.as_gradient`.

    The parts of a sparse gradient are made tensors as well: Keras takes tuples there,
    of which TensorFlow cannot tell the shape.
    """
    if isinstance(value, tf.IndexedSlices):
        parts = value.values, value.indices, value.dense_shape
        value = tf.IndexedSlices(
            *(p if p is None else tf.convert_to_tensor(p) for p in parts)
        )
    return generic.as_real(value, map_values)


def map_values(fn, grad):
    """See `generic.map_values`."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(fn(grad.values), grad.indices, grad.dense_shape)
    return fn(grad)


def l2_norms(tensors):
    """See `generic.l2_norms`."""
    return [rules.l2_norm(generic.in_float32(_values(t))) for t in tensors]


def to_dense(grad):
    """See `generic.to_dense`."""
    return tf.convert_to_tensor(grad)


def _values(grad):
    """The elements of a gradient; a sparse one may name an index twice."""
    if not isinstance(grad, tf.IndexedSlices):
        return tf.convert_to_tensor(grad)
    indices, positions = tf.unique(grad.indices)
    return tf.math.unsorted_segment_sum(grad.values, positions, tf.size(indices))
