"""Faults of the JAX backend: masks, donated buffers, axes and processes."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="what a skipped step has written is assigned",
        file="keras_lso/backend/_jax.py",
        old="jnp.where(self._finite, value, variable.value)",
        new="value",
        tests="tests/backend/test_primitives.py::test_a_step_is_run_whole_or_leaves_every_bit",
        backend="jax",
    ),
    Fault(
        name="a float64 gradient is cut to float32",
        file="keras_lso/backend/_jax.py",
        old='        and not any(g.dtype == "float64" for g in gradients)\n',
        new="",
        tests="tests/backend/test_compiled_jax.py::test_no_kernel_takes_a_float64_gradient",
        backend="jax",
    ),
    Fault(
        name="what the loss does not depend on has a gradient of zeros",
        file="keras_lso/backend/_jax.py",
        old="        g if id(v) in scope.read else None\n",
        new="        g\n",
        tests="tests/backend/test_primitives.py::test_what_the_loss_does_not_depend_on_has_no_gradient",
        backend="jax",
    ),
    Fault(
        name="a buffer that is somebody else's is donated",
        file="keras_lso/backend/_jax.py",
        old="own.append(jnp.copy(value) if buffer in seen else value)",
        new="own.append(value)",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_what_is_donated_is_nobody_elses",
        backend="jax",
    ),
    Fault(
        name="a step is compiled again within the caller's jit",
        file="keras_lso/backend/_jax.py",
        old="        _refuse_tracers(leaves)\n",
        new="",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_in_a_jax_jit_of_the_callers_it_is_refused",
        backend="jax",
    ),
    Fault(
        name="the rows of a sparse gradient change places",
        file="keras_lso/backend/_jax.py",
        old="sparse.BCOO((fn(grad.data), grad.indices), shape=grad.shape)",
        new="sparse.BCOO((fn(grad.data), grad.indices[::-1]), shape=grad.shape)",
        tests="tests/backend/test_primitives.py::test_a_function_is_mapped_over_the_values_of_a_sparse_gradient",
        backend="jax",
    ),
]
