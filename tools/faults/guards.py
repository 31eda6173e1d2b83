"""Faults of the checks before a step: gradients, rates, variables."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="a rate that is inf in float16 makes inf of float16 weights",
        file="keras_lso/_keras_internals/rates.py",
        old='return ops.cast(rate, "float16")',
        new="return rate",
        tests="tests/_core/test_rates.py::test_rate_infinite_in_float16_skips_steps_of_float16_weights",
    ),
    Fault(
        name="a step at a rate of NaN is taken by a fused step",
        file="keras_lso/_core/fused_step.py",
        old="judged = found if permitted is None else _restricted(found, permitted)",
        new="judged = found",
        tests="tests/_core/test_rates.py::test_schedule_that_turns_nan_skips_all_later_steps",
    ),
    Fault(
        name="a step at a rate of NaN is taken by the inner optimizer",
        file="keras_lso/_core/step.py",
        old="finite = both(permitted, found.finite)\n\n        def update(grads):",
        new="finite = found.finite\n\n        def update(grads):",
        tests="tests/_core/test_rates.py::test_schedule_that_turns_nan_skips_all_later_steps",
    ),
    Fault(
        name="a gradient is checked in float32 and applied in float16",
        file="keras_lso/_core/step.py",
        old="grad = cast(grad, dtype)",
        new="",
        tests="tests/_core/test_applied_gradients.py::test_gradient_that_overflows_in_dtype_of_variable_is_skipped",
        backend="jax",
    ),
    Fault(
        name="the sum of two micro-batches is not checked",
        file="keras_lso/_core/step.py",
        old="grad = backend.to_dense(grad) + ops.convert_to_tensor(total)",
        new="grad = backend.to_dense(grad)",
        tests="tests/_core/test_applied_gradients.py::test_micro_batch_that_overflows_float16_sum_is_dropped",
    ),
    Fault(
        name="a variable may be trained twice in one step",
        file="keras_lso/_core/option_checks.py",
        old="v in variables}) <",
        new="v in variables}) >",
        tests="tests/compat/tf_keras/test_methods.py::test_duplicate_variable_in_var_list_is_rejected",
    ),
    Fault(
        name="gradients of another shape are broadcast",
        file="keras_lso/_core/gradients.py",
        old="    check_shapes(grads, variables)\n",
        new="",
        tests="tests/test_step_arguments.py::test_gradient_of_other_shape_is_rejected",
    ),
    Fault(
        name="members of a MultiOptimizer step before one of them fails",
        file="keras_lso/_core/gradients.py",
        old="    _check_members(optimizer, grads, variables)\n",
        new="",
        tests="tests/_core/test_gradients.py::test_step_is_rejected_if_multi_optimizer_member_has_no_gradients",
    ),
    Fault(
        name="a count that its variable cannot hold wraps around",
        file="keras_lso/_core/state_file.py",
        old="np.iinfo(dtype).max",
        new="np.inf",
        tests="tests/compat/tf_keras/test_methods_state.py::test_iterations_out_of_range_are_rejected",
    ),
    Fault(
        name="gradients that overflow only when unscaled are finite",
        file="keras_lso/_backend/framework.py",
        old="for v in unscaled]",
        new="for v in dense]",
        tests="tests/_backend/test_framework.py::test_backend_override_matches_framework_default",
    ),
    Fault(
        name="the largest magnitude is the largest value",
        file="keras_lso/_backend/tensors.py",
        old="ops.max(ops.abs(v)",
        new="ops.max(v",
        tests="tests/_backend/test_measure.py::test_largest_magnitude_matches_numpy_in_float64",
    ),
    Fault(
        name="float64 is narrowed",
        file="keras_lso/_backend/tensors.py",
        old="values if is_double else ops",
        new="ops",
        tests="tests/_backend/test_measure.py::test_huge_float64_gradients_are_finite",
    ),
]
