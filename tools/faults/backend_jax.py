"""Faults of the JAX backend: masks, donated buffers, and the compiled program."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="each kernel transposes a gradient of mixed precision by itself",
        file="keras_lso/_backend/jax/framework.py",
        old="return jax_layouts.in_row_major_order(grads)",
        new="return grads",
        tests="tests/_backend/test_compiled_jax.py::test_a_gradient_is_transposed_once_for_all_that_read_it",
        backend="jax",
    ),
    Fault(
        name="a gradient is put into the order that XLA chose for its product",
        file="keras_lso/_backend/jax/layouts.py",
        old="tuple(range(grad.ndim))",
        new="tuple(reversed(range(grad.ndim)))",
        tests="tests/_backend/test_compiled_jax.py::test_a_gradient_is_transposed_once_for_all_that_read_it",
        backend="jax",
    ),
    Fault(
        name="what a skipped step has written is assigned",
        file="keras_lso/_backend/jax/framework.py",
        old="jnp.where(self._finite, value, variable.value)",
        new="value",
        tests="tests/_backend/test_run_if.py::test_a_step_is_run_whole_or_leaves_every_bit",
        backend="jax",
    ),
    Fault(
        name="a float64 gradient is cut to float32",
        file="keras_lso/_backend/jax/framework.py",
        old='and not any(g.dtype == "float64" for g in gradients)',
        new="",
        tests="tests/_backend/test_compiled_jax.py::test_no_kernel_takes_a_float64_gradient",
        backend="jax",
    ),
    Fault(
        name="a buffer that is somebody else's is donated",
        file="keras_lso/compat/backend/jax.py",
        old="jnp.copy(value) if buffer in seen else value",
        new="value",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_what_is_donated_is_nobody_elses",
        backend="jax",
    ),
    Fault(
        name="a step that was compiled for another batch is run",
        file="keras_lso/compat/backend/jax.py",
        old="tuple((x.shape, x.dtype) for x in leaves",
        new="len(leaves",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_batches_of_two_lengths_may_read_two_variables",
        backend="jax",
    ),
    Fault(
        name="rows that overflow only when added up are finite to JAX",
        file="keras_lso/_backend/jax/framework.py",
        old="sum_duplicates(nse=grad.nse).",
        new="",
        tests="tests/_backend/test_measure.py::test_rows_that_overflow_only_when_added_up_are_found",
        backend="jax",
    ),
    Fault(
        name="gradients that overflow only when unscaled are finite to the sums",
        file="keras_lso/_backend/jax/measure.py",
        old="proofs).all() & (inv_scale <= 1)",
        new="proofs).all()",
        tests="tests/_backend/test_measure.py::test_a_finite_norm_proves_nothing_where_unscaling_enlarges",
        backend="jax",
    ),
]
