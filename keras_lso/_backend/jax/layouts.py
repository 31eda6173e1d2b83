"""In which order a gradient lies in memory, in compiled code on a CPU.

Under `mixed_float16` the gradient of a layer's kernel is the transpose of a product,
and rounded to float16 in between, so that XLA cannot make the product in the order of
the kernel. It fuses transpose and rounding into each kernel that reads the gradient:
the check and the update of each slot then go through memory in strides, which takes
three times as long. If the order of a gradient is prescribed, one copy serves all of
them, and a gradient that has that order already is not copied. XLA removes barriers on
a CPU before it fuses, so that `jax.lax.optimization_barrier` prevents nothing.
"""

import jax
from jax.experimental import layout, sparse

# JAX before 0.7 has none, or by another name: `Layout` is its `Format` then.
HAS_LAYOUTS = hasattr(layout, "with_layout_constraint") and (
    layout.Layout is not layout.Format
)


def in_row_major_order(grads):
    """Returns gradients in the order of their variables; None and sparse ones stay."""
    return [_in_row_major_order(g) if _is_in_some_order(g) else g for g in grads]


def _is_in_some_order(grad):
    """Whether XLA chooses the order, which an array outside `jax.jit` has."""
    is_traced = isinstance(grad, jax.core.Tracer) and not isinstance(grad, sparse.BCOO)
    return HAS_LAYOUTS and is_traced and grad.ndim > 1


def _in_row_major_order(grad):
    # A step that a machine without an accelerator exports for one has no layouts, which
    # `jax.export` refuses.
    return jax.lax.platform_dependent(grad, cpu=_constrained, default=lambda grad: grad)


def _constrained(grad):
    order = layout.Layout(major_to_minor=tuple(range(grad.ndim)))
    return layout.with_layout_constraint(grad, order)
