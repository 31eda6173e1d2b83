"""Every primitive in `keras.ops`: the reference for the other modules here.

It is written to be read, not to be fast.
"""

import collections
import contextlib
import math
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_lso.backend import masters, processes
from keras_lso.backend.rules import l2_norm
from keras_lso.backend.shards import max_over_shards, sum_over_shards

# Numbers of elements: what counts as small, and how many are put together.
_SMALL, _PACK = 2**14, 2**16


class Measurement(NamedTuple):
    """What one read of the gradients found; all of it device tensors.

    Attributes:
        finite: Boolean scalar. No gradient holds an inf or a NaN, nor will it once
            it is unscaled.
        norms: List of what `rule.norms` returns, one for each rule; None where
            there is no rule, or where the step has to measure it itself.
        amax: Float32 scalar, the largest magnitude of all, or None.
    """

    finite: Any
    norms: Any = None
    amax: Any = None


def measure(grads, amax=False, inv_scale=1.0, rules=None, state=None, are_alike=False):
    """Reads the gradients once.

    Args:
        grads: List of tensors of any float dtype, dense or sparse. No None.
        amax: Bool. Whether to return the largest magnitude. Defaults to `False`.
        inv_scale: Float32 scalar. What the gradients will be multiplied by; one
            above 1 can make a finite gradient overflow. Defaults to `1.0`.
        rules: List of formulas of `rules.py`, one a gradient, whose norms are
            wanted. A finite norm proves that its gradient is finite: they are the
            check as well. Defaults to `None`.
        state: List of tuples of tensors, `(variable, *slots)`, one a rule.
        are_alike: Bool. Whether `grads` are what `total` returned, and so the same on
            all replicas, which then need not be asked. Defaults to `False`.

    Returns:
        A `Measurement`. `finite` is what all replicas, processes and shards
        agree on, never one replica's word.
    """
    values = [in_float32(to_dense(g)) for g in grads]
    # An inf or a NaN stays one, whatever it is multiplied by.
    unscaled = [v * ops.cast(inv_scale, v.dtype) for v in values]
    finite = [ops.all(ops.isfinite(v)) for v in unscaled]
    has_others = ops.logical_not(ops.all(ops.stack(finite)))
    return Measurement(
        sum_over_shards(ops.cast(has_others, "float32")) == 0,
        rules and norms_of(rules, unscaled, state),
        max_over_shards(largest_magnitude(values)) if amax else None,
    )


def norms_of(rules, grads, state):
    """Returns the norms that each rule needs of its unscaled gradient."""
    return [
        rule.norms(g, *map(in_float32, tensors)) if rule.has_norms else None
        for rule, g, tensors in zip(rules, grads, state, strict=True)
    ]


def l2_norms(tensors):
    """Returns the L2 norms of tensors, dense or sparse, summed in float32 or wider."""
    return [l2_norm(in_float32(to_dense(t))) for t in tensors]


def total(grads, axis_name=None):
    """Returns the gradients of all replicas that apply them together.

    Args:
        grads: List of tensors, dense or sparse, or None.
        axis_name: See `LossScaleOptimizer.apply`. Defaults to `None`.

    Returns:
        List of tensors or None, the same on all replicas: on TensorFlow the sums, on
        JAX the means over the axis. Both are in float32 or wider, in which the sum of
        float16 numbers does not overflow.
    """
    return grads


def any_sharded(tensors):
    """Whether one of the tensors says that a process holds a shard of it only."""
    return False


def sharded_like(value, reference):
    """Returns `value`, sharded as `reference` is if that has the same shape.

    Args:
        value: Tensor, the same on all processes.
        reference: Tensor.
    """
    return value


def check_shards(grads, variables, tensors):
    """Refuses what would let the processes drift apart, before anything is changed.

    Args:
        grads: List of tensors or None, one for each variable.
        variables: List of variables.
        tensors: List of the tensors that they hold.

    Raises:
        ValueError: If a variable is sharded and its gradient is not, or otherwise; if
            its layer is sharded and the variable is not.
    """
    # AutoGraph cannot read a function that is nothing but words.
    return


def check_on_replicas(variables):
    """Refuses variables of which the replicas have no copies of their own.

    Args:
        variables: List of variables, all that a step may write.

    Raises:
        ValueError: If there are several replicas, and one was made outside of them.
    """
    return


def scalar(value, dtype):
    """Returns a number, or a scalar tensor, as a tensor of this dtype."""
    return ops.convert_to_tensor(value, dtype=dtype)


def without_host(function, near):
    """Calls a function of no arguments that returns a scalar tensor.

    A schedule, say, of Python's numbers and of tensors on a device. The numbers are not
    copied to the device, and where the function branches nothing is read from there.

    Args:
        function: Callable without arguments and without side effects, which may be
            called several times.
        near: Tensor on the device.
    """
    return function()


def in_float32(values):
    """Returns `values` in float32, or in float64 if that is what they are in."""
    values = ops.convert_to_tensor(values)
    is_double = keras.backend.standardize_dtype(values.dtype) == "float64"
    return values if is_double else ops.cast(values, "float32")


def times(values, factor):
    """Returns the product in float32, or in float64 if the values are in that."""
    values = in_float32(values)
    return values * ops.cast(factor, values.dtype)


def largest_magnitude(values):
    """Returns the largest magnitude in a list of dense tensors, in float32."""
    # `ops.max` refuses empty tensors.
    tops = [ops.max(ops.abs(v)) for v in values if 0 not in v.shape]
    if not tops:
        return ops.zeros((), dtype="float32")
    return ops.cast(ops.max(ops.stack(tops)), "float32")


def pack(values, size_of=lambda value: math.prod(value.shape)):
    """Returns the same elements in fewer tensors: small ones are put together.

    A compiler takes its time for each tensor that is looked at, and a runtime to start
    that. To copy what fits into a cache costs less than a thousand of them.

    Args:
        values: List of dense tensors.
        size_of: Callable of a tensor that returns the number of its elements, or None
            where that is not known yet. Defaults to what its shape says.
    """
    large, packs, end = [], collections.defaultdict(list), 0
    for value in values:
        size = size_of(value)
        if size is None or size > _SMALL:
            large.append(value)
            continue
        end += size
        # Each operation that does nothing costs time too.
        flat = value if len(value.shape) == 1 else ops.ravel(value)
        packs[value.dtype, end // _PACK].append(flat)
    return large + [ops.concatenate(p) if p[1:] else p[0] for p in packs.values()]


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
    """Unscales, skips and updates in one pass.

    Args:
        rules: For each variable a formula of `rules.py`, holding the step's
            coefficients.
        variables: List of `keras.Variable`s, the ones that are trained; where the
            backend `UPDATES_IN_PLACE`, of the tensors that they hold.
        slots: For each variable a tuple of such, in the order of `rule.slots`.
        grads: List of dense tensors. No None. They stay as they are.
        finite: Boolean scalar tensor. Where False, nothing changes, bit for bit.
            Defaults to `None`: the step is applied.
        inv_scale: Float32 scalar tensor. What the gradients are multiplied by.
            Defaults to `None`: they are not scaled.
        norms: What `measure` found, for rules that have norms. Defaults to
            `None`: nothing was measured.
        narrow: List with an item for each of `variables`, like them: the float16
            variable that it is the master of, or None. Where that holds something else
            than its master, rounded, the master starts from there; at the end it is
            the new master, rounded. Defaults to `None`: there are no masters.
    """

    def keep(new, old):
        return new if finite is None else ops.where(finite, new, old)

    norms = norms or [None] * len(rules)
    narrow = narrow or [None] * len(rules)
    for rule, variable, slot, grad, norm, low in zip(
        rules, variables, slots, grads, norms, narrow, strict=True
    ):
        grad = ops.cast(grad, "float32")
        if inv_scale is not None:
            grad = grad * inv_scale
        state = [variable, *slot]
        old = [ops.convert_to_tensor(v) for v in state]
        if low is not None:
            low_value = ops.convert_to_tensor(low)
            old[0] = keep(masters.restarted(old[0], low_value), old[0])
        if norm is None:
            new = rule(keep, grad, *old)
        else:
            new = rule(keep, grad, *old, norms=norm)
        for v, value in zip(state, new, strict=True):
            v.assign(value)
        if low is not None:
            low.assign(keep(masters.rounded(new[0], low_value.dtype), low_value))


def fused_step_takes(rule, variables, gradients):
    """The reference has no fast path."""
    return False


# Whether `fused_step` takes the tensors that variables hold, and changes those.
UPDATES_IN_PLACE = False


def run_if(finite, step, grads, state):
    """Runs `step(grads)` if `finite`, else leaves `state` as it was.

    Args:
        finite: Boolean scalar tensor.
        step: Callable of the gradients, which may write to `state` only.
        grads: List of tensors or None, handed to `step`.
        state: List of `keras.Variable`s, all that `step` may write.
    """
    # Copies: on PyTorch a step changes the variable's own tensor.
    before = [ops.copy(v) for v in state]
    step(grads)
    for v, old in zip(state, before, strict=True):
        v.assign(ops.where(finite, ops.convert_to_tensor(v), old))


def compute_gradients(loss_fn, variables, grad_loss=None, tape=None):
    """Returns a loss and its gradients.

    Args:
        loss_fn: Callable without arguments that returns the loss, a tensor of any
            shape (its sum is differentiated). What it assigns to variables stays
            assigned.
        variables: List of variables, or callable that returns it once `loss_fn`
            has run.
        grad_loss: Tensor of the loss's shape, by which its elements are weighted.
            Defaults to `None`: by 1.
        tape: A `tf.GradientTape`, which may have recorded a part of the loss already.
            Defaults to `None`: there is none outside TensorFlow.

    Returns:
        A tuple of the loss and the list of gradients, of which None where the loss
        does not depend on the variable.
    """
    _refuse_to_differentiate()


def differentiate(loss, variables, transform, grad_loss=None, tape=None):
    """Returns the gradients of a tensor, where the framework knows its history.

    Args:
        loss: Tensor.
        variables: List of variables.
        transform: Callable. It is `transform(loss)` that is differentiated.
        grad_loss: See `compute_gradients`. Defaults to `None`.
        tape: The `tf.GradientTape` that recorded the loss. Defaults to `None`:
            there is none outside TensorFlow.

    Returns:
        The list of gradients.
    """
    _refuse_to_differentiate()


# Whether `average_over_processes` may be a part of what `compile_step` compiles.
AVERAGES_IN_STEP = False


def count_processes():
    """Returns how many processes can average their gradients.

    Returns:
        Int: of processes, or on TensorFlow of replicas; 1 if an engine was started with
        one. None if none was started.
    """
    return None


def check_processes_run():
    """Refuses to go on where `count_processes` is None; says how to start some."""
    backend = keras.backend.backend()
    processes.check_run(
        count_processes(), f"The Keras backend {backend!r} has no processes."
    )


def average_over_processes(grads):
    """Returns the means of the gradients over all processes.

    All processes get the same bits. They must call it equally often, with gradients
    of the same variables in the same order.

    Args:
        grads: List of tensors, dense or sparse, of any float dtype, or None.

    Returns:
        List of tensors in float32, or in float64 if they were in that. An inf or a NaN
        of one process makes the mean one that is not finite. Where some processes have
        no gradient, theirs counts as zero; None where none has one.

    Raises:
        RuntimeError: On all processes, if their gradients are not of the same
            variables, and where none run.
    """
    check_processes_run()


def weights_of(loss, grad_loss):
    """Returns what the elements of the loss are weighted by, a tensor like it."""
    if grad_loss is None:
        return ops.ones_like(loss)
    weights = ops.cast(ops.convert_to_tensor(grad_loss), loss.dtype)
    check_shape_of_weights(loss.shape, weights.shape)
    return ops.broadcast_to(weights, loss.shape)


def check_shape_of_weights(loss_shape, shape):
    """Refuses a `grad_loss` that cannot be broadcast to the loss's shape."""
    loss_shape, shape = tuple(loss_shape), tuple(shape)
    is_shorter = len(shape) <= len(loss_shape)
    aligned = zip(reversed(shape), reversed(loss_shape), strict=False)
    if not is_shorter or any(size not in (1, of_loss) for size, of_loss in aligned):
        raise ValueError(
            f"Argument `grad_loss` must have the loss's shape, {loss_shape}. "
            f"Received one of shape {shape}."
        )


def _refuse_to_differentiate():
    raise NotImplementedError(
        f"The Keras backend {keras.backend.backend()!r} computes no gradients. Set "
        "KERAS_BACKEND to 'tensorflow', 'jax' or 'torch' to train."
    )


def refuse_tape(tape):
    """Refuses what only TensorFlow has."""
    if tape is not None:
        raise ValueError(
            "A `tape` is TensorFlow's: this Keras backend has none, and does not need "
            "it. Pass a `loss` without arguments to be called, and no `tape`. "
            f"Received: tape={tape!r}"
        )


def trained_variables(loss_fn, run=lambda fn: fn()):
    """Returns the trainable variables that `loss_fn` reads, in that order.

    It is run once, and what it assigns is forgotten. Variables that it creates are
    there afterwards: layers can create theirs so. For those that are made of a value
    it takes a run in earnest before.

    Args:
        loss_fn: Callable without arguments that returns the loss.
        run: Callable that runs it. Defaults to a plain call.

    Returns:
        List of variables.
    """
    try:
        with RecordingScope() as scope:
            run(loss_fn)
    except ValueError:
        loss_fn()
        with RecordingScope() as scope:
            run(loss_fn)
    return [v for v in scope.read.values() if v.trainable]


def compile_step(step):
    """Compiles a function of tensors that reads and assigns variables.

    Args:
        step: Callable of tensors (nested structures of them, None among them) that
            returns such a structure. It creates no variables.

    Returns:
        A callable like it. Variables have their new values when it returns.
    """
    return step


def outside_of_functions():
    """Returns a context in which what is computed is part of no compiled function.

    For the initial values of variables, which TensorFlow makes outside of it.
    """
    return contextlib.nullcontext()


def is_traced(values):
    """Whether a function of the caller is being traced right now."""
    return False


class RecordingScope(keras.StatelessScope):
    """A scope that remembers which variables were read in it, and which written.

    Args:
        state_mapping: List of tuples of a variable and the value that it has in the
            scope. Others have the value that they have outside.
    """

    def __init__(self, state_mapping=()):
        # What layers add to the loss; it would be dropped without a word.
        super().__init__(state_mapping, collect_losses=True)
        self.read, self.written = {}, {}

    def get_current_value(self, variable):
        """Returns what was written here, else what an outer scope holds."""
        self.read[id(variable)] = variable
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            return self.original_scope.get_current_value(variable)
        return value

    def add_update(self, update):
        self.written[id(update[0])] = update[0]
        super().add_update(update)


def is_variable(value):
    """Whether `value` is a variable that can be trained."""
    return isinstance(value, keras.Variable)


def check_replica_context(method):
    """Refuses to be called where no replica is: there are none here."""
    return


def register_list_class(cls):
    """Lets the framework's own functions on nested structures see a list in `cls`."""
    return


def with_positions(items):
    """Returns the items of a list with their positions, as `keras.tree` wants them."""
    return list(enumerate(items))


def as_gradient(value):
    """Returns a gradient as a tensor of a float dtype.

    Args:
        value: Tensor, dense or sparse, array or list of numbers; or None, which stays
            None. Integers become float32, as in Keras on TensorFlow and JAX.

    Raises:
        ValueError: If it is complex. A cast would drop the imaginary part.
    """
    return as_real(value, map_values)


def as_real(value, map_values):
    """Does what `as_gradient` does, by the `map_values` of a framework."""
    if value is None:
        return None
    tensor = value if ops.is_tensor(value) else ops.convert_to_tensor(value)
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if "float" in dtype:
        return tensor
    if "complex" in dtype:
        raise ValueError(
            "A gradient must be real: a variable of floats takes no imaginary part. "
            "Differentiate a real loss, or pass `keras.ops.real(gradient)`. Received: "
            f"a gradient of dtype {dtype} and shape {tuple(tensor.shape)}"
        )
    return map_values(in_float32, tensor)


def map_values(fn, grad):
    """Applies the elementwise `fn` to the values of a dense or sparse gradient."""
    return fn(grad)


def to_dense(grad):
    """Returns the gradient as a dense tensor; rows that come twice add up."""
    return ops.add(grad, ops.zeros(ops.shape(grad), dtype=grad.dtype))
