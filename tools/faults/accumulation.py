"""Faults of accumulation: micro-batches that are added up, and windows that end."""

from tools.faults.fault import Fault

_STEP = "keras_lso/_core/fused_step.py"
_TESTS = "tests/_core/test_accumulation.py"

FAULTS = [
    Fault(
        name="a micro-batch that overflows is added up",
        file=_STEP,
        old="grads, added, inv_scale)",
        new="grads, None, inv_scale)",
        tests=f"{_TESTS}::test_a_micro_batch_that_overflows_is_dropped_whole",
    ),
    Fault(
        name="a micro-batch that overflows ends a window",
        file=_STEP,
        old="backend.scalars.logical_and(added.finite, may_end)",
        new="may_end",
        tests=f"{_TESTS}::test_a_micro_batch_that_overflows_is_dropped_whole",
    ),
    Fault(
        name="the sum of a window may overflow",
        file=_STEP,
        old="            inv_scale * (2 * count),\n",
        new="            inv_scale,\n",
        tests=f"{_TESTS}::test_no_sum_overflows",
    ),
    Fault(
        name="the next window starts with the sums of the last",
        file=_STEP,
        old="        backend.clear(sums, is_last)\n",
        new="",
        tests=f"{_TESTS}::test_windows_are_those_of_keras",
    ),
    Fault(
        name="the sum of a variable without a gradient outlives its window",
        file=_STEP,
        old="if len(accumulators) < len(accumulators_of(optimizer)):",
        new="if False:",
        tests=f"{_TESTS}::test_a_variable_without_a_gradient_leaves_it_to_keras",
    ),
    Fault(
        name="micro-batches are added to what the sums were",
        file=_STEP,
        old="self._accumulators, self._sums.variables, self._sums.plan",
        new="[], [], self._sums.plan",
        tests=f"{_TESTS}::test_sums_that_are_other_tensors_now_are_found",
    ),
    Fault(
        name="micro-batches are added up in the order that sums had in memory",
        file=_STEP,
        old="self._accumulators, self._sums.variables, self._sums.plan",
        new="self._accumulators, self._sums.variables, None",
        tests=f"{_TESTS}::test_sums_that_are_other_tensors_now_are_found",
    ),
    Fault(
        name="what the update changes is not looked at before a window ends",
        file=_STEP,
        old="return self._sums_hold() and (self._window_goes_on() or self._step.holds())",
        new="return self._sums_hold()",
        tests="tests/_core/test_plan.py::test_changed_variables_in_the_middle_of_a_window",
        backend="torch",
    ),
    Fault(
        name="the bias correction of Adam counts micro-batches",
        file="keras_lso/_keras_internals/rates.py",
        old="return steps // count if count else steps",
        new="return steps",
        tests=f"{_TESTS}::test_windows_are_those_of_keras",
    ),
    Fault(
        name="the host goes through the end of each window",
        file="keras_lso/_backend/torch/steps.py",
        old="if not is_on_host(flag) or flag:",
        new="if True:",
        tests=f"{_TESTS}::test_the_host_stops_where_a_window_goes_on",
    ),
    Fault(
        name="a step takes the caller's gradients for its own",
        file="keras_lso/_core/fused_step.py",
        old="        low_precision_variables,\n        owns_gradients,\n    )\n    targets",
        new="        low_precision_variables,\n        True,\n    )\n    targets",
        tests="tests/_core/test_accumulation.py::test_no_gradient_is_written",
    ),
    Fault(
        name="gradients are divided by what they are to be multiplied by",
        file="keras_lso/_backend/torch/kernels.py",
        old="torch.reciprocal(factor)",
        new="factor",
        tests="tests/_core/test_accumulation.py::test_windows_are_those_of_keras",
    ),
    Fault(
        name="sums are cleared though the window goes on",
        file="keras_lso/_backend/torch/steps.py",
        old="    elif flag:\n",
        new="    else:\n",
        tests="tests/_backend/test_framework.py::test_an_override_does_what_the_default_does",
    ),
    Fault(
        name="on TensorFlow sums are cleared though the window goes on",
        file="keras_lso/_backend/tensorflow/framework.py",
        old="_assign_here(v, tf.where(flag, tf.zeros_like(v), v))",
        new="_assign_here(v, tf.zeros_like(v))",
        tests="tests/_backend/test_framework.py::test_an_override_does_what_the_default_does",
        backend="tensorflow",
    ),
    Fault(
        name="the norm of unscaled gradients may overflow",
        file="keras_lso/_backend/torch/measure.py",
        old="Measurement(total.square() < torch.inf,",
        new="Measurement(total < torch.inf,",
        tests="tests/_core/test_clipping.py::test_a_norm_that_overflows_once_unscaled",
    ),
    Fault(
        name="on TensorFlow the norm of unscaled gradients may overflow",
        file="keras_lso/_backend/tensorflow/measure.py",
        old="finite = tf.math.is_finite(tf.square(total))",
        new="finite = tf.math.is_finite(total)",
        tests="tests/_core/test_clipping.py::test_a_norm_that_overflows_once_unscaled",
        backend="tensorflow",
    ),
    Fault(
        name="on JAX the norm of unscaled gradients may overflow",
        file="keras_lso/_backend/jax/measure.py",
        old="finite = jnp.isfinite(jnp.square(total))",
        new="finite = jnp.isfinite(total)",
        tests="tests/_core/test_clipping.py::test_a_norm_that_overflows_once_unscaled",
        backend="jax",
    ),
    Fault(
        name="the reference hands a rule its slots in another order",
        file="keras_lso/_backend/targets.py",
        old="return [(variable, *slots) for variable, slots in pairs]",
        new="return [(variable, *reversed(slots)) for variable, slots in pairs]",
        tests="tests/_backend/test_framework.py::test_an_override_does_what_the_default_does",
    ),
]
