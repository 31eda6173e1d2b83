"""Faults of accumulation: micro-batches that are added up, and windows that end."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="a micro-batch that overflows is added up",
        file="keras_lso/_core/fused_step.py",
        old=", added, inv_scale",
        new=", None, inv_scale",
        tests="tests/_core/test_accumulation.py::test_a_micro_batch_that_overflows_is_dropped_whole",
    ),
    Fault(
        name="a micro-batch that overflows ends a window",
        file="keras_lso/_core/fused_step.py",
        old="backend.scalars.logical_and(added.finite, may_end)",
        new="may_end",
        tests="tests/_core/test_accumulation.py::test_a_micro_batch_that_overflows_is_dropped_whole",
    ),
    Fault(
        name="the sum of a window may overflow",
        file="keras_lso/_core/fused_step.py",
        old="inv_scale * (2 * count)",
        new="inv_scale",
        tests="tests/_core/test_accumulation.py::test_no_sum_overflows",
    ),
    Fault(
        name="the next window starts with the sums of the last",
        file="keras_lso/_core/fused_step.py",
        old="backend.run_masked(is_last, clear)",
        new="pass",
        tests="tests/_core/test_accumulation.py::test_windows_are_those_of_keras",
    ),
    Fault(
        name="the bias correction of Adam counts micro-batches",
        file="keras_lso/_keras_internals/rates.py",
        old="steps // count if count else steps",
        new="steps",
        tests="tests/_core/test_accumulation.py::test_windows_are_those_of_keras",
    ),
    Fault(
        name="a step takes the caller's gradients for its own",
        file="keras_lso/_core/fused_step.py",
        old="owns_gradients,\n    )",
        new="True,\n    )",
        tests="tests/_core/test_accumulation.py::test_no_gradient_is_written",
    ),
    Fault(
        name="on TensorFlow sums are cleared though the window goes on",
        file="keras_lso/_backend/tensorflow/framework.py",
        old="where(flag, tf.zeros_like(v), v",
        new="zeros_like(v",
        tests="tests/_backend/test_framework.py::test_an_override_does_what_the_default_does",
        backend="tensorflow",
    ),
    Fault(
        name="the norm of unscaled gradients may overflow",
        file="keras_lso/_backend/torch/measure.py",
        old="total.square() < torch",
        new="total < torch",
        tests="tests/_core/test_clipping.py::test_a_norm_that_overflows_once_unscaled",
    ),
    Fault(
        name="on JAX the norm of unscaled gradients may overflow",
        file="keras_lso/_backend/jax/measure.py",
        old="(jnp.square(total)",
        new="(total",
        tests="tests/_core/test_clipping.py::test_a_norm_that_overflows_once_unscaled",
        backend="jax",
    ),
]
