"""One read of the gradients on JAX: on a CPU, an accelerator, several devices."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import layout, sparse

from keras_lso._backend.finite_check import FiniteCheck
from keras_lso._backend.framework import (
    CHECK_ONLY,
    Framework,
    GradientStats,
    MeasureOptions,
)
from keras_lso._backend.jax.axes import varying_axes
from keras_lso._backend.tensors import Grads, Tensor, pack


def measure(
    framework: Framework, grads: list[Tensor], options: MeasureOptions = CHECK_ONLY
) -> GradientStats:
    """See `Framework.measure`."""
    # The reference is better on an accelerator, where one read is the whole cost and
    # the host would take the branch, and on several devices, where XLA would gather a
    # tensor to pass it to a branch, but combines the reference's reductions to scalars
    # into one.
    values = [jnp.asarray(framework.elements_of(g)) for g in grads]
    proves = is_on_one_cpu() and not varying_axes(*values)
    read = _CHECK.measure if proves else Framework.measure
    return read(framework, values, options)


def packed(values: list[Tensor]) -> list[Tensor]:
    """See `Framework.packed`. On an accelerator a kernel costs more than a copy."""
    # Of several devices XLA would gather the tensors.
    if _is_on_cpu() or jax.device_count() > 1:
        return values
    alone = set(map(id, values))
    # Without the barrier XLA would reduce each tensor of a pack.
    return [v if id(v) in alone else _barrier(v) for v in pack(values)]


@jax.custom_jvp
def _barrier(values: Tensor) -> Tensor:
    """Returns values that XLA computes here, once, for all that reads them."""
    return jax.lax.optimization_barrier(values)


# JAX 0.5 has no rule for the derivative of a barrier.
_barrier.defjvps(lambda tangent, result, values: tangent)


def is_on_one_cpu() -> bool:
    """Whether compiled code runs on the CPU, as one device."""
    return _is_on_cpu() and jax.device_count() == 1


def _is_on_cpu() -> bool:
    """Whether compiled code runs on a CPU."""
    return jax.default_backend() == "cpu"


class _JAXCheck(FiniteCheck):
    cond = staticmethod(jax.lax.cond)

    def norm(self, values: Tensor) -> Tensor:
        # Without the barrier XLA would find that Adam takes the same squares, and write
        # them to memory for both: twice the time of the step.
        return jnp.sqrt(jnp.sum(jnp.square(_barrier(values))))

    def is_proven(self, values: Tensor) -> Tensor:
        if values.dtype == "float16":
            # For a sum, XLA would write the values in float32: four times as slow.
            return jnp.isfinite(values).all()
        return jnp.isfinite(jnp.sum(jnp.square(values.astype("float32"))))


_CHECK = _JAXCheck()


# --- The memory order of gradients in compiled code on a CPU --------------------------

# Under `mixed_float16` the gradient of a layer's kernel is the transpose of a product,
# rounded before it is transposed. XLA fuses both into each operation that reads it,
# which then reads memory in strides: three times as long. If the order is prescribed,
# one copy serves all. XLA removes `jax.lax.optimization_barrier` on a CPU before it
# fuses.

# JAX before 0.7 has no layouts, or has other names: its `Layout` is its `Format`.
HAS_LAYOUTS = hasattr(layout, "with_layout_constraint") and (
    layout.Layout is not layout.Format
)


def in_row_major_order(grads: Grads) -> Grads:
    """Returns gradients in row-major order; None and sparse gradients stay."""
    return [_in_row_major_order(g) if _is_in_some_order(g) else g for g in grads]


def _is_in_some_order(grad: Any) -> bool:
    """Whether XLA chooses the order. An array outside `jax.jit` already has one."""
    is_traced = isinstance(grad, jax.core.Tracer) and not isinstance(grad, sparse.BCOO)
    return HAS_LAYOUTS and is_traced and grad.ndim > 1


def _in_row_major_order(grad: Tensor) -> Tensor:
    """Returns a gradient, on a CPU in row-major order."""
    # `jax.export` rejects layouts. So a step that is exported for an accelerator, on a
    # machine without one, has none.
    return jax.lax.platform_dependent(grad, cpu=_constrained, default=lambda grad: grad)


def _constrained(grad: Tensor) -> Tensor:
    """Returns a gradient whose order in memory is prescribed."""
    order = layout.Layout(major_to_minor=tuple(range(grad.ndim)))
    return layout.with_layout_constraint(grad, order)
