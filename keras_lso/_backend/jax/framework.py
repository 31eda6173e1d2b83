"""The primitives on JAX: stateless under `jax.jit`, eager outside it."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.experimental import multihost_utils, sparse
from jax.interpreters import partial_eval
from keras import ops

from keras_lso._backend.framework import KERNELS, Framework
from keras_lso._backend.host import (
    Host,
    Loss,
    RecordingScope,
    Trained,
    refuse_tape,
    weights_of,
)
from keras_lso._backend.jax import axes as jax_axes
from keras_lso._backend.jax import measure as jax_measure
from keras_lso._backend.leaves import Leaves
from keras_lso._backend.rule import Rule
from keras_lso._backend.tensors import Grads, StepFunction, Tensor, Variables, shown


class JAXHost(Host):
    OTHER_STEP = "its own step, fused with the check"
    HOW_TO_SCALE = (
        "    # in the function that is differentiated, at the scale of this step\n"
        "    state = list(zip(optimizer.variables, optimizer_variables))\n"
        "    with keras.StatelessScope(state):\n"
        "        loss = optimizer.scale_loss(loss)"
    )

    def compute_gradients(
        self, loss_fn: Loss, variables: Trained, grad_loss: Any = None, tape: Any = None
    ) -> tuple[Tensor, Grads]:
        """See `Host.compute_gradients`."""
        # JAX differentiates with respect to arguments. So a `loss_fn` that creates
        # variables needs a first run.
        refuse_tape(tape)
        if callable(variables):
            self.trained_variables(loss_fn)
            variables = variables()
        scope: Any = None

        def stateless_loss(
            values: list[jax.Array],
        ) -> tuple[jax.Array, list[jax.Array]]:
            nonlocal scope
            state_mapping = list(zip(variables, values, strict=True))
            with RecordingScope(state_mapping) as scope:
                loss = ops.convert_to_tensor(loss_fn())
            return loss, [scope.state_mapping[key] for key in scope.written]

        values = [v.value for v in variables]
        loss, pull_back, new_values = jax.vjp(stateless_loss, values, has_aux=True)
        for variable, value in zip(scope.written.values(), new_values, strict=True):
            variable.assign(value)
        [grads] = pull_back(weights_of(loss, grad_loss))
        # JAX returns zeros if the loss does not depend on the variable.
        return loss, [
            g if id(v) in scope.read else None
            for g, v in zip(grads, variables, strict=True)
        ]

    def _run(self, loss_fn: Loss) -> None:
        # Abstract values are enough to record what is read.
        jax.eval_shape(lambda: ops.convert_to_tensor(loss_fn()))

    def differentiate(
        self,
        loss: Tensor,
        variables: Any,
        transform: Callable[[Tensor], Tensor],
        grad_loss: Any = None,
        tape: Any = None,
    ) -> Grads:
        refuse_tape(tape)
        raise ValueError(
            "On JAX a tensor does not know how it was computed, so it cannot be "
            "differentiated. Pass a `loss` without arguments to be called, such as "
            "`lambda: loss_fn(y, model(x))`. "
            f"Received: loss={shown(loss)}"
        )

    def to_host(self, value: jax.Array) -> Any:
        if not (value.is_fully_addressable or value.is_fully_replicated):
            value = multihost_utils.process_allgather(value, tiled=True)
        return super().to_host(value)

    def register_list_class(self, cls: type[list]) -> None:
        jax.tree_util.register_pytree_node(
            cls, lambda items: (list(items), None), lambda _, items: cls(items)
        )

    def devices(self) -> list[str]:
        return [f"{device.platform}:{device.id}" for device in jax.devices()]

    def hardware_of(self, value: jax.Array) -> str | None:
        """See `Host.hardware_of`. ROCm has names, such as `"gfx90a"`."""
        device = min(value.devices(), key=lambda device: device.id)
        if device.platform in ("cpu", "tpu"):
            return device.platform
        capability = str(getattr(device, "compute_capability", ""))
        return f"gpu:{capability}" if re.fullmatch(r"\d+\.\d+", capability) else None

    def is_constant(self, value: Any, result: Any) -> bool:
        # Eager differentiation computes no such tracer of a constant.
        is_traced = isinstance(result, partial_eval.DynamicJaxprTracer)
        return is_traced and not any_tracer(value)

    def has_values(self, value: Tensor) -> bool:
        return not any_tracer(value)

    def is_deleted(self, value: Tensor) -> bool:
        return not any_tracer(value) and value.is_deleted()


class JAX(Framework):
    replicas = jax_axes.JAXReplicas()
    host = JAXHost()

    packed = staticmethod(jax_measure.packed)
    measure = jax_measure.measure

    def takes_update(
        self,
        rule: type[Rule],
        leaves: Leaves,
        gradients: list[Tensor],
        is_needed: bool = False,
    ) -> bool:
        """Whether it is needed, or the rule's norms need not be computed twice."""
        # `run_if` is a select, which XLA fuses into any optimizer's update. So no other
        # rule is faster than the optimizer itself.
        return (
            (rule.has_norms or is_needed)
            and not any(isinstance(g, sparse.BCOO) for g in gradients)
            and not any(g.dtype == "float64" for g in gradients)
            and leaves.are_float32
        )

    def run_if(
        self, finite: Tensor, step: StepFunction, grads: Grads, state: Variables
    ) -> None:
        """See `Framework.run_if`."""
        # A `jax.lax.cond` would copy the state through its branches. Here the step
        # always runs, and each write is a select, which XLA fuses into the update. The
        # step reads back values that are already masked, so that all updates stay in
        # place.
        with _MaskedWrites(finite) as scope:
            step(grads)
        for variable in scope.written.values():
            variable.assign(scope.get_current_value(variable))

    def bitcast(self, values: Tensor, dtype: str) -> Tensor:
        return jax.lax.bitcast_convert_type(values, dtype)

    def computed_once(self, values: Tensor, count: Tensor) -> Tensor:
        """See `Framework.computed_once`. Eager code computes nothing twice."""
        return _computed_once(values, count) if any_tracer(values) else values

    def flat_indices(self, value: Tensor) -> Tensor:
        return super().flat_indices(value) + jax_axes.first_index(value)

    @contextlib.contextmanager
    def memory_for(self, variables: Variables) -> Iterator[None]:
        """See `Framework.memory_for`. A scope holds the values."""
        if not variables:
            yield
            return
        with _Placeholders(variables) as scope:
            yield
        for variable in scope.written.values():
            variable.assign(scope.get_current_value(variable))

    def without_memory(self, values: list) -> list:
        return [None] * len(values)

    def value_if_on_host(self, tensor: Tensor) -> Any:
        """See `Framework.value_if_on_host`. Reads on one CPU, outside `jax.jit`."""
        if any_tracer(tensor):
            return None
        devices = jnp.asarray(tensor).devices()
        is_near = {device.platform for device in devices} == {"cpu"}
        return tensor.item() if is_near and len(devices) == 1 else None

    def prepare_gradients(self, grads: Any) -> Grads:
        """See `Framework.prepare_gradients`. On one CPU, in row-major order."""
        if KERNELS == "generic" or not jax_measure.is_on_one_cpu():
            return grads
        return jax_measure.in_row_major_order(grads)

    def elements_of(self, grad: Tensor) -> Tensor:
        if isinstance(grad, sparse.BCOO):
            return grad.sum_duplicates(nse=grad.nse).data
        return grad

    def map_values(self, fn: Callable[[Tensor], Tensor], grad: Tensor) -> Tensor:
        if isinstance(grad, sparse.BCOO):
            return sparse.BCOO(
                (fn(grad.data), grad.indices),
                shape=grad.shape,
                # Under `jit` Keras's Adam squares a gradient only if it is marked as
                # having each row once.
                unique_indices=grad.unique_indices,
                indices_sorted=grad.indices_sorted,
            )
        return fn(grad)

    def to_dense(self, grad: Tensor) -> Tensor:
        return grad.todense() if isinstance(grad, sparse.BCOO) else grad


@jax.custom_jvp
def _computed_once(values: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the values, on a CPU through a loop."""
    return jax.lax.platform_dependent(
        values, count, cpu=_loop_without_turns, default=lambda values, count: values
    )


_computed_once.defjvps(lambda tangent, result, values, count: tangent, None)


def _loop_without_turns(values: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the values through a loop that takes no turn."""
    # On a CPU XLA computes a value again in the loop of each result that uses it, with
    # FMA or without. It removes `jax.lax.optimization_barrier` first. But a `while`
    # reads the value from memory, since XLA does not know that it takes no turn.
    return jax.lax.while_loop(
        lambda state: state[1] < 0,
        lambda state: (-state[0], state[1] + 1),
        (values, count),
    )[0]


class _MaskedWrites(RecordingScope):
    """A scope in which variables take new values only where `finite` is True."""

    def __init__(self, finite: jax.Array) -> None:
        super().__init__()
        self._finite = finite

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        variable, value = update
        super().add_update((variable, jnp.where(self._finite, value, variable.value)))


class _Placeholders(RecordingScope):
    """A scope that holds the values of some variables, and passes on the others."""

    def __init__(self, variables: Variables) -> None:
        super().__init__()
        self._variables = set(map(id, variables))

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        if id(update[0]) in self._variables:
            self.state_mapping[id(update[0])] = update[1]
        elif self.original_scope is None:
            super().add_update(update)
        else:
            # Immediately, so that the value is masked before it is read back.
            self.original_scope.add_update(update)


def any_tracer(values: Any) -> bool:
    """Whether one of the tensors in a structure is being traced."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values))
