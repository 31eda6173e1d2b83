"""Faults of moving averages, and of gradients that are clipped one by one."""

from tools.faults.fault import Fault

_STEP = "keras_lso/_core/fused_step.py"
_AVERAGES = "tests/_core/test_averages.py"
_CLIPPING = "tests/_core/test_clipping.py"
_OF_KERAS = f"{_AVERAGES}::test_weights_and_averages_are_those_of_keras"

FAULTS = [
    Fault(
        name="averages move in a step that is skipped",
        file=_STEP,
        old="self._let(self._averages, rule, self._weights, applied)",
        new="self._let(self._averages, rule, self._weights, ops.isfinite(applied))",
        tests=_OF_KERAS,
    ),
    Fault(
        name="the first average is a share of the weights",
        file="keras_lso/_core/fused_step.py",
        old="rule = Average(momentum * self._optimizer.ema_momentum)",
        new="rule = Average(0 * momentum + self._optimizer.ema_momentum)",
        tests="tests/_core/test_averages.py::test_weights_and_averages_are_those_of_keras",
    ),
    Fault(
        name="averages overwrite one step late",
        file=_STEP,
        old="is_due = (updates + 1) % frequency == 0",
        new="is_due = updates % frequency == 0",
        tests=_OF_KERAS,
    ),
    Fault(
        name="averages overwrite in a step that is skipped",
        file=_STEP,
        old="is_due = backend.scalars.logical_and(applied, is_due)",
        new="is_due = backend.scalars.logical_and(ops.isfinite(applied), is_due)",
        tests=_OF_KERAS,
    ),
    Fault(
        name="averages are kept of the first tensors",
        file=_STEP,
        old="self._variables, averages.variables, averages.plan",
        new="[], [], averages.plan",
        tests=f"{_AVERAGES}::test_averages_that_are_other_tensors_now_are_found",
    ),
    Fault(
        name="averages are moved in the order that they had in memory",
        file=_STEP,
        old="self._variables, averages.variables, averages.plan",
        new="self._variables, averages.variables, None",
        tests=f"{_AVERAGES}::test_averages_that_are_other_tensors_now_are_found",
    ),
    Fault(
        name="a variable without a gradient is not averaged",
        file=_STEP,
        old="    if len(averages) < len(moving_averages_of(optimizer)):\n        return None\n",
        new="",
        tests=f"{_AVERAGES}::test_a_variable_without_a_gradient_is_averaged_as_well",
    ),
    Fault(
        name="averages overwrite masters and leave the model's variables",
        file=_STEP,
        old="weights = Targets(step.targets.variables, nothing, step.targets.copies)",
        new="weights = Targets(step.targets.variables, nothing)",
        tests=f"{_AVERAGES}::test_averages_of_float16_variables_are_those_of_their_masters",
    ),
    Fault(
        name="a stateless step with averages loses its weights",
        file=_STEP,
        old="    stored = storage_of(averages)\n",
        new="    stored = storage_of([*variables, *averages])[len(variables) :]\n",
        tests=f"{_AVERAGES}::test_stateless_steps",
        backend="torch",
    ),
    Fault(
        name="averages weigh weights by the momentum",
        file="keras_lso/_keras_internals/rules.py",
        old="select(w * self.momentum + g * (1 - self.momentum), w)",
        new="select(g * self.momentum + w * (1 - self.momentum), w)",
        tests=_OF_KERAS,
        backend="tensorflow",
    ),
    Fault(
        name="weights are added to in place of overwritten",
        file="keras_lso/_keras_internals/rules.py",
        old="return (select(g, w),)",
        new="return (select(g + w, w),)",
        tests=_OF_KERAS,
        backend="tensorflow",
    ),
    Fault(
        name="gradients that are clipped one by one are unscaled twice",
        file=_STEP,
        old="backend.clipped(grads, inv_scale, of_each, value), 1.0",
        new="backend.clipped(grads, inv_scale, of_each, value), inv_scale",
        tests=f"{_CLIPPING}::test_it_clips_as_keras_does",
    ),
    Fault(
        name="the mean of a window is not clipped",
        file=_STEP,
        old="means, factor = step.clipped(sums, factor, norm)",
        new="means = sums",
        tests=f"{_CLIPPING}::test_the_mean_of_a_window_is_clipped",
    ),
    Fault(
        name="short gradients are lengthened to the limit",
        file="keras_lso/_backend/framework.py",
        old="g * (norm / ops.maximum(of_one, norm))",
        new="g * (norm / of_one)",
        tests=f"{_CLIPPING}::test_it_clips_as_keras_does",
        backend="tensorflow",
    ),
    Fault(
        name="PyTorch lengthens short gradients to the limit",
        file="keras_lso/_backend/torch/measure.py",
        old="(norm / norms.clamp_min(norm))",
        new="(norm / norms)",
        tests=f"{_CLIPPING}::test_it_clips_as_keras_does",
        backend="torch",
    ),
    Fault(
        name="negative elements are not clipped",
        file="keras_lso/_backend/torch/measure.py",
        old="        torch._foreach_clamp_min_(unscaled, -value)\n",
        new="",
        tests=f"{_CLIPPING}::test_it_clips_as_keras_does",
        backend="torch",
    ),
    Fault(
        name="each process clips by the norm of its shard",
        file="keras_lso/_backend/torch/measure.py",
        old="norms = _norms_of_whole(grads, unscaled)",
        new="norms = _norms_of_whole(unscaled, unscaled)",
        tests="integration_tests/distributed/test_torch_shards.py::test_steps_are_those_on_whole_tensors",
        backend="torch",
    ),
    Fault(
        name="averages follow the weights that were there when the window began",
        file="keras_lso/_core/fused_step.py",
        old="self._step.holds_all()",
        new="self._step.holds()",
        tests="tests/_core/test_plan.py::test_changed_variables_in_the_middle_of_a_window",
        backend="torch",
    ),
    Fault(
        name="of several limits the norm of all comes first",
        file="keras_lso/_keras_internals/rules.py",
        old="        or sum(map(bool, clips)) > 1\n",
        new="",
        tests=f"{_CLIPPING}::test_of_three_limits_that_are_set_later_keras_takes_its_first",
    ),
]
