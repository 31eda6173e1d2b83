"""The named axes of `jax.shard_map`, `jax.pmap` and `jax.vmap`.

The type of a value in `jax.shard_map` has the axes over which it varies, as a shard.
With `check_vma=False`, and in `jax.pmap`, types do not have the axes. Averaged
gradients are then assumed to be equal on all devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import sparse

from keras_lso._backend.replicas import Replicas
from keras_lso._backend.tensors import Grads, Tensor, Variables, in_float32


def varying_axes(*values: Tensor) -> tuple:
    """Returns a tuple of the names of axes over which one of the values may vary."""
    # JAX before 0.6 has no such types.
    typeof = getattr(jax, "typeof", None)
    if typeof is None:
        return ()
    names: set = set()
    for value in values:
        kind = typeof(value.data if isinstance(value, sparse.BCOO) else value)
        # In JAX 0.10 the axes are in a separate attribute.
        kind = getattr(kind, "manual_axis_type", kind)
        names.update(getattr(kind, "varying", ()), getattr(kind, "vma", ()))
    return tuple(sorted(names, key=str))


def first_index(value: Tensor) -> Tensor:
    """Returns the place of a shard's first element, as if it were sharded by rows."""
    # The type of a shard does not tell along which dimension it is sharded.
    place = 0
    for axis in varying_axes(value):
        place = place * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)
    return place * value.size


class JAXReplicas(Replicas):
    REDUCES_GRADIENTS = True

    def check_axis_name(self, axis_name: Any) -> None:
        """Does nothing: `reduce_gradients` checks that the axis is bound."""

    def check_shards_state(self) -> None:
        """Does nothing: `build` checks that there is a distribution."""

    def reduce_gradients(self, grads: Grads, axis_name: Any = None) -> Grads:
        if axis_name is None:
            return grads
        _check_axis_is_bound(axis_name)
        return [g if g is None else _mean_over(axis_name, _reducible(g)) for g in grads]

    def over_shards(self, value: Tensor, maximum: bool = False) -> Tensor:
        """See `Replicas.over_shards`."""
        axes = varying_axes(value)
        if not axes:
            return value
        return jax.lax.pmax(value, axes) if maximum else jax.lax.psum(value, axes)

    def are_shards(self, grads: Grads, variables: Variables) -> bool:
        """See `Replicas.are_shards`; the gradients are averaged over the replicas."""
        shards = False
        for grad, variable in zip(grads, variables, strict=True):
            if grad is None:
                continue
            axes = varying_axes(grad)
            of_variable = varying_axes(jnp.asarray(variable.value))
            if axes != of_variable:
                raise ValueError(
                    f"The gradient of variable '{variable.path}' varies over the axes "
                    f"{axes} of a `jax.shard_map`, and the variable itself over "
                    f"{of_variable}. If it is the gradient of this device's batch "
                    "only, say `axis_name=...`, so that it is averaged. If the "
                    "variable is the same on all devices, hand it and the optimizer's "
                    "state in with `in_specs` that say so: `P()`."
                )
            shards = shards or bool(axes)
        return shards


def _reducible(grad: Tensor) -> Tensor:
    """Returns a gradient as it is averaged: dense, in float32 or wider."""
    return in_float32(grad.todense() if isinstance(grad, sparse.BCOO) else grad)


def _mean_over(axis_name: Any, grad: Tensor) -> Tensor:
    """Returns the mean, over an axis, of a gradient that is not yet averaged."""
    # None where types do not have the axes.
    axes = varying_axes(jax.lax.axis_index(axis_name))
    if set(axes) - set(varying_axes(grad)):
        raise ValueError(
            "A gradient is the same on all devices of the axis already: leave "
            "`axis_name` out. Inside `jax.shard_map`, JAX adds up the gradients of "
            "variables that all devices share (`in_specs=P()`) on its own. For "
            "their mean, differentiate the `jax.lax.pmean` of the loss; to average "
            "them here, differentiate by `jax.lax.pcast(variables, axis_name, "
            f"to='varying')`. Received: axis_name={axis_name!r}"
        )
    return jax.lax.pmean(grad, axis_name)


def _check_axis_is_bound(axis_name: Any) -> None:
    """Raises a `ValueError` for an axis that is not bound here."""
    try:
        # A constant needs no communication.
        jax.lax.psum(1, axis_name)
    except NameError as error:
        raise ValueError(
            "`axis_name` must name an axis of the `jax.shard_map` or `jax.pmap` that "
            "this is called in. Under `jax.jit` alone, and with `keras.distribution`, "
            "XLA averages the gradients on its own: leave it out. "
            f"Received: axis_name={axis_name!r}"
        ) from error
