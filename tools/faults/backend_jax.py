"""Faults of the JAX backend: masks, donated buffers, and the compiled program."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="each kernel transposes a gradient of mixed precision by itself",
        file="keras_lso/_backend/jax/framework.py",
        old="return jax_layouts.in_row_major_order(grads)",
        new="return grads",
        tests="tests/_backend/test_compiled_jax.py::test_transposed_gradient_is_copied_once_for_all_readers",
        backend="jax",
    ),
    Fault(
        name="a gradient is put into the order that XLA chose for its product",
        file="keras_lso/_backend/jax/layouts.py",
        old="tuple(range(grad.ndim))",
        new="tuple(reversed(range(grad.ndim)))",
        tests="tests/_backend/test_compiled_jax.py::test_transposed_gradient_is_copied_once_for_all_readers",
        backend="jax",
    ),
    Fault(
        name="what a skipped step has written is assigned",
        file="keras_lso/_backend/jax/framework.py",
        old="jnp.where(self._finite, value, variable.value)",
        new="value",
        tests="tests/_backend/test_run_if.py::test_run_if_runs_whole_step_or_leaves_state_bitwise_unchanged",
        backend="jax",
    ),
    Fault(
        name="a float64 gradient is cut to float32",
        file="keras_lso/_backend/jax/framework.py",
        old='and not any(g.dtype == "float64" for g in gradients)',
        new="",
        tests="tests/_backend/test_compiled_jax.py::test_fused_step_does_not_accept_float64_gradient",
        backend="jax",
    ),
    Fault(
        name="a buffer that is somebody else's is donated",
        file="keras_lso/compat/backend/jax.py",
        old="jnp.copy(value) if buffer in seen else value",
        new="value",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_training_op_donates_no_buffer_that_is_used_elsewhere",
        backend="jax",
    ),
    Fault(
        name="a step that was compiled for another batch is run",
        file="keras_lso/compat/backend/jax.py",
        old="tuple((x.shape, x.dtype) for x in leaves",
        new="len(leaves",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_batches_of_different_length_may_read_different_variables",
        backend="jax",
    ),
    Fault(
        name="rows that overflow only when added up are finite to JAX",
        file="keras_lso/_backend/jax/framework.py",
        old="sum_duplicates(nse=grad.nse).",
        new="",
        tests="tests/_backend/test_measure.py::test_measure_finds_duplicate_rows_whose_sum_overflows",
        backend="jax",
    ),
    Fault(
        name="gradients that overflow only when unscaled are finite to the sums",
        file="keras_lso/_backend/jax/measure.py",
        old="proofs).all() & (inv_scale <= 1)",
        new="proofs).all()",
        tests="tests/_backend/test_measure.py::test_measure_finds_unscaling_overflow_despite_finite_norm",
        backend="jax",
    ),
]
