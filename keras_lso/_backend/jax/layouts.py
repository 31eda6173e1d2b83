"""The memory order of gradients in compiled code on a CPU.

Under `mixed_float16` the gradient of a layer's kernel is the transpose of a product,
rounded before it is transposed. XLA fuses both into each operation that reads it, which
then reads memory in strides: three times as long. If the order is prescribed, one copy
serves all. XLA removes `jax.lax.optimization_barrier` on a CPU before it fuses.
"""

import jax
from jax.experimental import layout, sparse

# JAX before 0.7 has no layouts, or has other names: its `Layout` is its `Format`.
HAS_LAYOUTS = hasattr(layout, "with_layout_constraint") and (
    layout.Layout is not layout.Format
)


def in_row_major_order(grads):
    """Returns gradients in row-major order; None and sparse gradients stay."""
    return [_in_row_major_order(g) if _is_in_some_order(g) else g for g in grads]


def _is_in_some_order(grad):
    """Whether XLA chooses the order. An array outside `jax.jit` already has one."""
    is_traced = isinstance(grad, jax.core.Tracer) and not isinstance(grad, sparse.BCOO)
    return HAS_LAYOUTS and is_traced and grad.ndim > 1


def _in_row_major_order(grad):
    # `jax.export` rejects layouts. So a step that is exported for an accelerator, on a
    # machine without one, has none.
    return jax.lax.platform_dependent(grad, cpu=_constrained, default=lambda grad: grad)


def _constrained(grad):
    order = layout.Layout(major_to_minor=tuple(range(grad.ndim)))
    return layout.with_layout_constraint(grad, order)
