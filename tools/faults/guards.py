"""Faults of what a step is guarded by: its rates, its losses, what it applies."""

from tools.faults.fault import Fault

_STEP = "keras_lso/_core/step.py"
_FUSED = "keras_lso/_core/fused_step.py"
_OPTIMIZERS = "keras_lso/_keras_internals/optimizers.py"
_IN_RATES = "keras_lso/_keras_internals/rates.py"
_RATES = "tests/_core/test_rates.py"
_SCALING = "tests/_core/test_scaling.py"
_APPLIED = "tests/_core/test_applied_gradients.py"

FAULTS = [
    Fault(
        name="a rate that is inf in float16 makes inf of float16 weights",
        file=_IN_RATES,
        old='    return ops.cast(rate, "float16")\n',
        new="    return rate\n",
        tests=f"{_RATES}::test_a_rate_that_is_inf_in_float16_skips_steps_of_float16_weights",
    ),
    Fault(
        name="a rate of LARS, which multiplies in float32, counts in float16",
        file=_IN_RATES,
        old="    casts = steps_in_dtype_of_variables(optimizer)\n",
        new="    casts = True\n",
        tests=f"{_RATES}::test_a_rate_that_is_multiplied_in_float32_may_be_larger",
    ),
    Fault(
        name="a step at a rate of NaN is taken by a fused step",
        file=_FUSED,
        old="            self.update(rules, grads, _restricted(found, rates_finite), inv",
        new="            self.update(rules, grads, found, inv",
        tests=f"{_RATES}::test_a_schedule_that_ends_in_nan_ends_the_steps",
    ),
    Fault(
        name="a step at a rate of NaN is taken by the inner optimizer",
        file=_STEP,
        old="            finite = backend.scalars.logical_and(finite, rates_finite)\n",
        new="            pass\n",
        tests=f"{_RATES}::test_a_schedule_that_ends_in_nan_ends_the_steps",
    ),
    Fault(
        name="a rate of NaN moves the loss scale",
        file=_STEP,
        old="        backend.restore(live_storage_of(moved), before, keeps)\n",
        new="",
        tests=f"{_RATES}::test_training_goes_on_at_the_next_finite_rate",
    ),
    Fault(
        name="the rate of a micro-batch that updates nothing counts",
        file=_IN_RATES,
        old="scalars.where(may_end, rate, zero)",
        new="scalars.where(rate == rate, rate, rate)",
        tests=f"{_RATES}::test_a_rate_matters_to_the_last_micro_batch_of_a_window",
    ),
    Fault(
        name="the rate is computed when a micro-batch was added up",
        file=_FUSED,
        old="            rules = self._step.rules()\n            rates_finite =",
        new="            backend.clear(self._sums.variables, backend.scalar(True, 'bool'))"
        "\n            rules = self._step.rules()\n            rates_finite =",
        tests=f"{_RATES}::test_a_schedule_that_raises_leaves_everything_as_it_was",
    ),
    Fault(
        name="an infinite clipvalue ends training",
        file=_IN_RATES,
        old='name == "clipvalue" and value > 0',
        new='name == "clip"',
        tests=f"{_RATES}::test_an_infinite_clipvalue_clips_nothing",
    ),
    Fault(
        name="nobody warns of a rate in a compiled step",
        file="keras_lso/loss_scale_optimizer.py",
        old="if have_values(self.variables) and self._counters.skips_in_a_row():",
        new="if False:",
        tests=f"{_RATES}::test_fit_warns_at_its_end_at_the_latest",
        backend="jax",
    ),
    Fault(
        name="a stalled run is blamed on the gradients",
        file=_IN_RATES,
        old="if not math.isfinite(float(ops.convert_to_numpy(_rate_in_step(stepper)))):",
        new="if rate != rate:",
        tests=f"{_RATES}::test_a_stalled_run_names_the_rate",
    ),
    Fault(
        name="gradients that were only looked at are not unscaled",
        file=_STEP,
        old="        return any(are_arguments)\n",
        new="        return False\n",
        tests=f"{_SCALING}::test_gradients_that_were_only_looked_at_are_scaled",
    ),
    Fault(
        name="scaled and unscaled gradients are applied together",
        file=_STEP,
        old="if any(are_arguments) and not all(are_arguments):",
        new="if False:",
        tests=f"{_SCALING}::test_scaled_and_unscaled_ones_together_are_refused",
    ),
    Fault(
        name="gradients that the result was written into are unscaled twice",
        file=_STEP,
        old="if version != backend.version_of(tensor):",
        new="if False:",
        tests=f"{_SCALING}::test_gradients_that_were_written_to_since_are_refused",
    ),
    Fault(
        name="a view of a gradient that was looked at is taken for unscaled",
        file="keras_lso/_backend/torch/framework.py",
        old="            return value.data_ptr(), value.numel()\n",
        new="            return id(value)\n",
        tests=f"{_SCALING}::test_another_tensor_of_the_same_memory_is_scaled_too",
    ),
    Fault(
        name="a float64 gradient is checked in float64 where nothing casts it",
        file=_OPTIMIZERS,
        old="    if is_double and not casts and",
        new="    if False and",
        tests=f"{_APPLIED}::test_a_float64_gradient_beyond_float32_is_skipped_whoever_steps",
    ),
    Fault(
        name="an unscaled gradient in float16 is clipped in float16",
        file=_STEP,
        old="present = [backend.map_values(backend.in_float32, g) for g in present]",
        new="pass",
        tests=f"{_APPLIED}::test_a_gradient_in_float16_is_clipped_in_float32",
    ),
    Fault(
        name="an epsilon that float16 does not hold is not told",
        file="keras_lso/loss_scale_optimizer.py",
        old="        masters.warn_of_epsilons(inner)\n",
        new="",
        tests=f"{_APPLIED}::test_an_epsilon_that_is_0_in_float16_is_warned_of",
    ),
    Fault(
        name="a number of NumPy's is not looked at",
        file=_IN_RATES,
        old="_FLOATS = (float, np.floating)",
        new="_FLOATS = (float,)",
        tests=f"{_RATES}::test_any_other_coefficient_is_named",
    ),
    Fault(
        name="a loss that is refused switches the scale on",
        file="keras_lso/loss_scale_optimizer.py",
        old="        scaled = self._scaling.scale(loss)\n"
        "        self._scaling.gradients = Gradients.SCALED_BY_KERAS\n",
        new="        self._scaling.gradients = Gradients.SCALED_BY_KERAS\n"
        "        scaled = self._scaling.scale(loss)\n",
        tests=f"{_SCALING}::test_what_is_no_loss_is_refused_and_changes_nothing",
    ),
    Fault(
        name="each step warns of a loss that nobody scaled",
        file=_STEP,
        old="        self._has_warned = True\n        warn(\n",
        new="        warn(\n",
        tests=f"{_SCALING}::test_gradients_of_a_loss_that_nobody_scaled",
    ),
    Fault(
        name="a loss scale of the inner optimizer's own is not noticed later",
        file=_IN_RATES,
        old="            if factor is not None:\n                return",
        new="            if False:\n                return",
        tests=f"{_SCALING}::test_a_scale_of_the_inner_optimizer_s_own_is_refused",
    ),
    Fault(
        name="half of an optimizer is replaced",
        file="keras_lso/_core/wrapper.py",
        old="        if name in self._parts:\n",
        new="        if False:\n",
        tests=f"{_SCALING}::test_a_part_is_not_replaced",
    ),
    Fault(
        name="a gradient is checked in float32 and applied in float16",
        file=_STEP,
        old="                grad = cast(grad, dtype)\n",
        new="",
        tests=f"{_APPLIED}::test_a_gradient_that_overflows_in_the_dtype_of_its_variable",
        backend="jax",
    ),
    Fault(
        name="the sum of two micro-batches is not checked",
        file=_STEP,
        old="grad = backend.to_dense(grad) + ops.convert_to_tensor(total)",
        new="grad = backend.to_dense(grad)",
        tests=f"{_APPLIED}::test_micro_batches_that_add_up_to_inf_are_dropped",
    ),
    Fault(
        name="a gradient that is clipped first counts as an overflow",
        file=_OPTIMIZERS,
        old="    return None if is_clipped else dtype\n",
        new="    return dtype\n",
        tests=f"{_APPLIED}::test_a_gradient_that_is_clipped_first_is_applied",
    ),
    Fault(
        name="PyTorch is said to cast gradients that it does not",
        file=_OPTIMIZERS,
        old='return steps_in_dtype_of_variables(optimizer) and not hasattr(\n        optimizer, "_parallel_update_step"\n    )',
        new="return steps_in_dtype_of_variables(optimizer)",
        tests=f"{_APPLIED}::test_what_pytorch_applies_in_float32_is_not_skipped",
    ),
    Fault(
        name="a variable that comes twice is stepped twice",
        file="keras_lso/_core/gradients.py",
        old="        if key in names:\n",
        new="        if False:\n",
        tests=f"{_APPLIED}::test_a_variable_that_comes_twice_is_refused",
    ),
    Fault(
        name="nobody warns of weights in bfloat16",
        file="keras_lso/_core/master_weights.py",
        old="if not count or self._master_weights is False:",
        new="if True:",
        tests=f"{_APPLIED}::test_weights_in_bfloat16_that_may_not_move",
    ),
    Fault(
        name="averages go on with the masters of before an assignment",
        file=_FUSED,
        old="            backend.synchronise_masters(self._weights, applied)\n",
        new="            pass\n",
        tests="tests/_core/test_averages.py::test_an_assignment_within_a_window",
    ),
    Fault(
        name="a restarted schedule counts as skipped steps",
        file="keras_lso/_core/state_file.py",
        old="steps = value + np.int64(ops.convert_to_numpy(self._applied))",
        new="steps = value + np.int64(3)",
        tests="tests/_core/test_state_file.py::test_a_restarted_schedule_skips_no_steps",
    ),
]
