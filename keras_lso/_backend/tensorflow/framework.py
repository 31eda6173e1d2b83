"""The primitives on TensorFlow: `tf.function`s, XLA, and replicas."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from keras_lso._backend.framework import Framework
from keras_lso._backend.host import Host, Loss, Trained, check_shape_of_weights
from keras_lso._backend.leaves import Leaves
from keras_lso._backend.rule import Rule, RuleNorms
from keras_lso._backend.tensorflow import measure as tf_measure
from keras_lso._backend.tensorflow.measure import in_xla, is_on_cpus
from keras_lso._backend.tensorflow.replicas import (
    TensorFlowReplicas,
    are_on_each_replica,
    is_on_all_replicas,
    tf_variables,
)
from keras_lso._backend.tensors import Grads, StepFunction, Tensor, Variables, shown

# In a `tf.function` AutoGraph rewrites the source of each function that is not Keras's
# own. That takes several times as long as tracing it.
_not_converted = tf.autograph.experimental.do_not_convert


class TensorFlowHost(Host):
    OTHER_STEP = "its own step, in a branch"
    HOW_TO_SCALE = (
        "    with tf.GradientTape() as tape:\n"
        "        loss = ...\n"
        "        loss = optimizer.scale_loss(loss)"
    )

    def compute_gradients(
        self, loss_fn: Loss, variables: Trained, grad_loss: Any = None, tape: Any = None
    ) -> tuple[Tensor, Grads]:
        with tape or tf.GradientTape() as tape:
            if not callable(variables):
                # By default, a tape watches only trainable variables.
                tape.watch(tf_variables(variables))
            loss = tf.convert_to_tensor(loss_fn())
        if callable(variables):
            variables = variables()
        return loss, tape.gradient(
            loss, tf_variables(variables), _weights_of(loss, grad_loss)
        )

    def differentiate(
        self,
        loss: Tensor,
        variables: Any,
        transform: Callable[[Tensor], Tensor],
        grad_loss: Any = None,
        tape: Any = None,
    ) -> Grads:
        if tape is not None:
            return super().differentiate(loss, variables, transform, grad_loss, tape)
        if tf.executing_eagerly():
            raise ValueError(
                "`tape` is required when a Tensor loss is passed to `minimize`: "
                "the `tf.GradientTape` under which it was computed. Without one, a "
                "tensor can be differentiated in a `tf.function` only. Or pass a "
                "`loss` without arguments to be called. "
                f"Received: loss={shown(loss)}"
            )
        loss, variables = transform(loss), tf_variables(variables)
        return tf.gradients(loss, variables, _weights_of(loss, grad_loss))

    @contextlib.contextmanager
    def outside_of_functions(self, like: Any = None) -> Iterator[None]:
        scope = contextlib.nullcontext()
        if like is not None:
            [variable] = tf_variables([like])
            # TensorFlow keeps this name, since it ends with a slash or is empty.
            scope = tf.name_scope("".join(variable.name.rpartition("/")[:2]))
        with tf.init_scope(), scope:
            yield

    def shown(
        self, data: Any, show: Callable[[Any], None], steps_per_execution: int
    ) -> Iterable:
        """See `Host.shown`. Takes one batch, before a compiled function would."""
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if not steps_per_execution == replicas == 1:
            raise ValueError(
                "On TensorFlow `save_bad_batch` needs `steps_per_execution=1` and one "
                "replica: batches are taken in a compiled function otherwise. Leave "
                "out `save_bad_batch`. Received: "
                f"steps_per_execution={steps_per_execution}"
            )
        batch = next(data)
        show(batch)
        return iter(tf.data.Dataset.from_tensors(batch))

    def devices(self) -> list[str]:
        return [device.name for device in tf.config.list_logical_devices()]

    def hardware_of(self, value: tf.Tensor) -> str | None:
        """See `Host.hardware_of`. ROCm reports no compute capability."""
        device = tf.DeviceSpec.from_string(value.device)
        if device.device_type in ("CPU", "TPU"):
            return device.device_type.lower()
        if device.device_type != "GPU":
            return None
        gpu = tf.config.list_physical_devices("GPU")[device.device_index]
        details = tf.config.experimental.get_device_details(gpu)
        capability = details.get("compute_capability")
        return capability and "gpu:{}.{}".format(*capability)

    def casts_to_float16(self) -> str | None:
        name = "auto_mixed_precision"
        is_on = tf.config.optimizer.get_experimental_options().get(name)
        return f"TensorFlow's graph rewrite '{name}'" if is_on else None

    def has_values(self, value: Tensor) -> bool:
        return tf.executing_eagerly()


def _weights_of(loss: tf.Tensor, grad_loss: Any) -> tf.Tensor | None:
    """See `host.weights_of`. In a `tf.function` shapes may be unknown."""
    if grad_loss is None:
        return None
    weights = tf.cast(grad_loss, loss.dtype)
    if loss.shape.is_fully_defined() and weights.shape.is_fully_defined():
        check_shape_of_weights(loss.shape, weights.shape)
    return tf.broadcast_to(weights, tf.shape(loss))


class TensorFlow(Framework):
    replicas = TensorFlowReplicas()
    host = TensorFlowHost()
    LENDS_MEMORY = False

    do_not_convert = staticmethod(_not_converted)
    measure = _not_converted(tf_measure.measure)

    def norms(self, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(tf_measure.l2_norm, values))

    def value_if_on_host(self, tensor: Tensor) -> Any:
        """See `Framework.value_if_on_host`. Reads only on a CPU, outside functions."""
        # The device of a tensor in a graph is not known yet.
        if not tf.executing_eagerly():
            return None
        # Keras accepts a variable as a tensor.
        tensor = tf.convert_to_tensor(tensor)
        return tensor.numpy().item() if "CPU" in tensor.device else None

    def run_if(
        self, finite: Tensor, step: StepFunction, grads: Grads, state: Variables
    ) -> None:
        """See `Framework.run_if`."""
        # Optimizers write their variables in a `merge_call`, which synchronises the
        # replicas and is not allowed inside a `tf.cond`. So several replicas
        # synchronise first, and one `tf.cond` contains all of them. A single replica's
        # context merges immediately.
        context = tf.distribute.get_replica_context()
        if context.num_replicas_in_sync == 1:
            _run_if(finite, lambda: _step_alone(step, grads))
            return

        def on_all_replicas(
            strategy: tf.distribute.Strategy, finite: Tensor, grads: list
        ) -> None:
            on_each_replica = strategy.extended.call_for_each_replica
            [finite, *_] = strategy.experimental_local_results(finite)
            _run_if(finite, lambda: on_each_replica(step, args=(grads,)))

        context.merge_call(on_all_replicas, args=(finite, grads))

    def takes_update(
        self,
        rule: type[Rule],
        leaves: Leaves,
        gradients: list[Tensor],
        is_needed: bool = False,
    ) -> bool:
        """Whether these are float32 variables with a copy on each replica."""
        return (
            are_on_each_replica(leaves.variables)
            and not any(isinstance(g, tf.IndexedSlices) for g in gradients)
            and not any(g.dtype == tf.float64 for g in gradients)
            and leaves.are_float32
        )

    @_not_converted
    def update(
        self,
        rules: list[Rule],
        leaves: Leaves,
        grads: list[Tensor],
        factor: Tensor = None,
        flag: Tensor = None,
        norms: RuleNorms | None = None,
    ) -> None:
        """See `Framework.update`."""
        # A `tf.function` may not know the shape of a gradient.
        pairs = zip(grads, leaves.variables, strict=True)
        grads = [
            g if g.shape.is_fully_defined() else tf.ensure_shape(g, v.shape)
            for g, v in pairs
        ]
        update = super().update
        # Under XLA a masked update stays in place, and a `tf.cond` would copy the
        # state. A replica steps on its own copies, since gradients and flag are the
        # same on all.
        if flag is None or in_xla():
            update(rules, leaves, grads, factor, flag, norms)
        else:
            _run_if(flag, lambda: update(rules, leaves, grads, factor, None, norms))

    def value_of(self, variable: keras.Variable) -> Tensor:
        """See `Framework.value_of`. Keras's function would return the variable."""
        return tf.convert_to_tensor(*tf_variables([variable]))

    def assign_here(self, variable: keras.Variable, value: Tensor) -> None:
        """See `Framework.assign_here`. `variable.assign` waits for all replicas."""
        [variable] = tf_variables([variable])
        if is_on_all_replicas(variable):
            variable.assign(value)
        else:
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)

    def bitcast(self, values: Tensor, dtype: str) -> Tensor:
        return tf.bitcast(values, dtype)

    @_not_converted
    def computed_once(self, values: Tensor, count: Tensor) -> Tensor:
        """See `Framework.computed_once`. `jax/framework.py` tells why it is a loop."""
        if not (in_xla() and is_on_cpus()):
            return values
        values, _ = tf.while_loop(
            lambda values, count: count < 0,
            lambda values, count: (-values, count + 1),
            (values, count),
        )
        return values

    def without_memory(self, values: list) -> list:
        for variable in values:
            _release(variable)
        return values

    def memory_for(self, variables: Variables) -> AbstractContextManager:
        """See `Framework.memory_for`. The variables keep the memory from then on."""
        # Under XLA the shape of a variable's value cannot change.
        with tf.init_scope():
            for variable in tf_variables(variables):
                _allocate(variable)
        return contextlib.nullcontext()

    @_not_converted
    def run_masked(self, flag: Tensor, step: Callable[[], None]) -> None:
        if in_xla():
            step()
        else:
            _run_if(flag, step)

    def check_stateless_arguments(self, tensors: list) -> None:
        raise ValueError(
            "stateless_apply is not supported with the TensorFlow backend (as it is "
            "incompatible with tf.distribute). Call `optimizer.apply` instead."
        )

    def is_variable(self, value: Any) -> bool:
        """See `Framework.is_variable`. Keras accepts TensorFlow's own variables too."""
        return isinstance(value, keras.Variable | tf.Variable)

    def as_gradients(self, values: Sequence) -> Grads:
        """See `Framework.as_gradients`."""
        # The parts of a sparse gradient may be tuples in Keras, whose shape TensorFlow
        # does not know. They become tensors as well.
        return super().as_gradients(list(map(_with_tensors, values)))

    def map_values(self, fn: Callable[[Tensor], Tensor], grad: Tensor) -> Tensor:
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(fn(grad.values), grad.indices, grad.dense_shape)
        return fn(grad)

    def to_dense(self, grad: Tensor) -> Tensor:
        return tf.convert_to_tensor(grad)

    def elements_of(self, grad: Tensor) -> Tensor:
        if not isinstance(grad, tf.IndexedSlices):
            return tf.convert_to_tensor(grad)
        indices, rows = tf.unique(grad.indices)
        return tf.math.unsorted_segment_sum(grad.values, rows, tf.size(indices))


def _with_tensors(value: Any) -> Any:
    """Returns a sparse gradient whose parts are tensors, and any other as it is."""
    if not isinstance(value, tf.IndexedSlices):
        return value
    parts = value.values, value.indices, value.dense_shape
    return tf.IndexedSlices(
        *(p if p is None else tf.convert_to_tensor(p) for p in parts)
    )


def _step_alone(step: StepFunction, grads: list) -> None:
    """Steps as the only replica, in TensorFlow's default context."""
    # The context of a `MirroredStrategy` passes control to the thread that runs the
    # replicas, and rejects the graph of a `tf.cond`, the caller's or the optimizer's
    # own.
    if not tf.distribute.has_strategy():
        step(grads)
        return
    with tf.distribute.ReplicaContext(tf.distribute.get_strategy(), 0):
        step(grads)


def _run_if(flag: tf.Tensor, step: Callable[[], None]) -> None:
    """Runs `step()` in a branch, if `flag`."""

    def branch() -> None:
        step()  # Returns nothing, as the other branch does.

    tf.cond(flag, branch, lambda: None)


# --- The memory of placeholders for 16-bit weights ------------------------------------


def _release(variable: tf.Variable) -> None:
    """Frees the memory of a variable, whose `shape` stays the same."""
    with tf.init_scope():
        for handle in _handles(variable):
            # A kernel that reads the variable as it was finds too few elements.
            tf.raw_ops.AssignVariableOp(
                resource=handle, value=tf.zeros([0], variable.dtype)
            )


def _allocate(variable: tf.Variable) -> None:
    """Gives a variable its memory back, if it was freed. Call it eagerly."""
    for handle in _handles(variable):
        shape = tf.raw_ops.VariableShape(input=handle)
        if tuple(shape.numpy()) != tuple(variable.shape):
            zeros = tf.zeros(variable.shape, variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)


def _handles(variable: tf.Variable) -> list[tf.Tensor]:
    """Returns the handles of a variable's copies on the replicas."""
    copies = getattr(variable, "values", None)
    return [v.handle for v in (copies if isinstance(copies, tuple) else [variable])]
