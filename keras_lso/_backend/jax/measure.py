"""One read of the gradients on JAX: on a CPU, an accelerator, several devices."""

import jax
import jax.numpy as jnp

from keras_lso._backend.framework import Framework
from keras_lso._backend.jax.axes import varying_axes
from keras_lso._backend.proofs import Proofs


def measure(framework, grads, *, are_alike=False, **asked):
    """See `Framework.measure`."""
    # The reference is better on an accelerator, where one read is the whole cost and
    # the host would take the branch, and on several devices, where XLA would gather a
    # tensor to pass it to a branch, but combines the reference's reductions to scalars
    # into one.
    values = [jnp.asarray(framework.elements_of(g)) for g in grads]
    proves = is_on_one_cpu() and not varying_axes(*values)
    read = _PROOFS.measure if proves else Framework.measure
    return read(framework, values, **asked)


def is_on_one_cpu():
    """Whether compiled code runs on the CPU, as one device."""
    return _is_on_cpu() and jax.device_count() == 1


def _is_on_cpu():
    return jax.default_backend() == "cpu"


class _Proofs(Proofs):
    cond = staticmethod(jax.lax.cond)

    def norm(self, values):
        # Without the barrier XLA would find that Adam takes the same squares, and write
        # them to memory for both: twice the time of the step.
        return jnp.sqrt(jnp.sum(jnp.square(jax.lax.optimization_barrier(values))))

    def is_proven(self, values):
        if values.dtype == "float16":
            # For a sum, XLA would write the values in float32: four times as slow.
            return jnp.isfinite(values).all()
        return jnp.isfinite(jnp.sum(jnp.square(values.astype("float32"))))


_PROOFS = _Proofs()
