"""Faults of accumulation: micro-batches that are added up, and windows that end."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="a micro-batch that overflows is added up",
        file="keras_lso/_core/fused_step.py",
        old=", added, inv_scale",
        new=", None, inv_scale",
        tests="tests/_core/test_accumulation.py::test_overflowing_micro_batch_is_dropped_whole_and_counted_as_skipped",
    ),
    Fault(
        name="a micro-batch that overflows ends a window",
        file="keras_lso/_core/fused_step.py",
        old="backend.scalars.logical_and(added.finite, may_end)",
        new="may_end",
        tests="tests/_core/test_accumulation.py::test_overflowing_micro_batch_is_dropped_whole_and_counted_as_skipped",
    ),
    Fault(
        name="the sum of a window may overflow",
        file="keras_lso/_core/fused_step.py",
        old="inv_scale * (2 * count)",
        new="inv_scale",
        tests="tests/_core/test_accumulation.py::test_gradient_that_could_overflow_window_sum_is_skipped",
    ),
    Fault(
        name="the next window starts with the sums of the last",
        file="keras_lso/_core/fused_step.py",
        old="backend.run_masked(is_last, clear)",
        new="pass",
        tests="tests/_core/test_accumulation.py::test_accumulated_steps_match_keras_after_each_micro_batch",
    ),
    Fault(
        name="the bias correction of Adam counts micro-batches",
        file="keras_lso/_keras_internals/rates.py",
        old="steps // count if count else steps",
        new="steps",
        tests="tests/_core/test_accumulation.py::test_accumulated_steps_match_keras_after_each_micro_batch",
    ),
    Fault(
        name="a step takes the caller's gradients for its own",
        file="keras_lso/_core/fused_step.py",
        old="owns_gradients,\n    )",
        new="True,\n    )",
        tests="tests/_core/test_accumulation.py::test_apply_leaves_gradients_bitwise_unchanged",
    ),
    Fault(
        name="on TensorFlow sums are cleared though the window goes on",
        file="keras_lso/_backend/tensorflow/framework.py",
        old="where(flag, tf.zeros_like(v), v",
        new="zeros_like(v",
        tests="tests/_backend/test_framework.py::test_backend_override_matches_framework_default",
        backend="tensorflow",
    ),
    Fault(
        name="the norm of unscaled gradients may overflow",
        file="keras_lso/_backend/torch/measure.py",
        old="total.square() < torch",
        new="total < torch",
        tests="tests/_core/test_clipping.py::test_overflow_of_unscaled_global_norm_skips_step",
    ),
    Fault(
        name="on JAX the norm of unscaled gradients may overflow",
        file="keras_lso/_backend/jax/measure.py",
        old="(jnp.square(total)",
        new="(total",
        tests="tests/_core/test_clipping.py::test_overflow_of_unscaled_global_norm_skips_step",
        backend="jax",
    ),
]
