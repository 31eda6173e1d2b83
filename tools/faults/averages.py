"""Faults of moving averages and of clipping."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="final values share a buffer with their averages",
        file="keras_lso/loss_scale_optimizer.py",
        old="variable.assign(ops.copy(variable))",
        new="pass",
        tests="integration_tests/test_callbacks.py::test_averages_end_a_run_that_stops_early",
        backend="jax",
    ),
    Fault(
        name="averages move in a step that is skipped",
        file="keras_lso/_core/fused_step.py",
        old="numbers, applied)",
        new="numbers, ops.isfinite(applied))",
        tests="tests/_core/test_averages.py::test_weights_and_averages_are_those_of_keras",
    ),
    Fault(
        name="the first average is a share of the weights",
        file="keras_lso/_core/fused_step.py",
        old="Average(momentum *",
        new="Average(0 * momentum +",
        tests="tests/_core/test_averages.py::test_weights_and_averages_are_those_of_keras",
    ),
    Fault(
        name="averages are kept of the first tensors",
        file="keras_lso/_core/fused_step.py",
        old="self._variables, averages.variables",
        new="[], []",
        tests="tests/_core/test_averages.py::test_averages_that_are_other_tensors_now_are_found",
    ),
    Fault(
        name="averages overwrite weights and leave their masters",
        file="keras_lso/_core/fused_step.py",
        old="slots=averaged.slots, owns",
        new="slots=averaged.slots, narrow=None, owns",
        tests="tests/_core/test_averages.py::test_averages_of_float16_variables_are_those_of_their_masters",
    ),
    Fault(
        name="averages weigh weights by the momentum",
        file="keras_lso/_keras_internals/rules.py",
        old="w * self.momentum + g",
        new="g * self.momentum + w",
        tests="tests/_core/test_averages.py::test_weights_and_averages_are_those_of_keras",
        backend="tensorflow",
    ),
    Fault(
        name="gradients that are clipped one by one are unscaled twice",
        file="keras_lso/_core/fused_step.py",
        old="of_each, value), 1.0",
        new="of_each, value), inv_scale",
        tests="tests/_core/test_clipping.py::test_it_clips_as_keras_does",
    ),
    Fault(
        name="the mean of a window is not clipped",
        file="keras_lso/_core/fused_step.py",
        old="means, factor = step.clipped(sums, factor, norm)",
        new="means = sums",
        tests="tests/_core/test_clipping.py::test_the_mean_of_a_window_is_clipped",
    ),
    Fault(
        name="the norm by which gradients are clipped is that of the scaled ones",
        file="keras_lso/_backend/torch/measure.py",
        old="(norm * inv_scale)",
        new="norm",
        tests="tests/_core/test_clipping.py::test_it_clips_as_keras_does",
    ),
    Fault(
        name="short gradients are lengthened to the limit",
        file="keras_lso/_backend/framework.py",
        old="ops.maximum(of_one, norm)",
        new="of_one",
        tests="tests/_core/test_clipping.py::test_it_clips_as_keras_does",
        backend="tensorflow",
    ),
    Fault(
        name="PyTorch lengthens short gradients to the limit",
        file="keras_lso/_backend/torch/measure.py",
        old="norms.clamp_min(norm)",
        new="norms",
        tests="tests/_core/test_clipping.py::test_it_clips_as_keras_does",
    ),
]
