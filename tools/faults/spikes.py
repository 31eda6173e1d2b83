"""Faults of spike guards."""

from tools.faults.fault import Fault

_MODEL = "tests/_core/test_spikes.py::test_skipped_spikes_match_numpy_model"
_STILL = (
    "tests/_core/test_spikes.py::test_spike_leaves_weights_slots_and_scale_unchanged"
)
_WINDOWS = "tests/_core/test_spikes.py::test_window_with_spike_is_rolled_back"

FAULTS = [
    Fault(
        name="an outlier enters the history as it is",
        file="keras_lso/_core/spikes.py",
        old="scalars.where(is_spike, limit, norm)",
        new="norm",
        tests=_MODEL,
    ),
    Fault(
        name="outliers are skipped for any number of steps",
        file="keras_lso/_core/spikes.py",
        old="in_a_row < window",
        new="in_a_row < 2 * window",
        tests="tests/_core/test_spikes.py::test_guard_skips_at_most_window_consecutive_steps",
    ),
    Fault(
        name="steps are judged before the history is warm",
        file="keras_lso/_core/spikes.py",
        old="seen >= min(self._guard.warmup, window)",
        new="seen >= 2",
        tests="tests/_core/test_spikes.py::test_guard_skips_no_step_during_warmup",
    ),
    Fault(
        name="the history forgets nothing",
        file="keras_lso/_core/spikes.py",
        old="== seen % window",
        new="== seen",
        tests=_MODEL,
    ),
    Fault(
        name="places of the history without a norm count as zeros",
        file="keras_lso/_core/spikes.py",
        old="places < seen, values",
        new="places < window, values",
        tests="tests/_core/test_spikes.py::test_guard_judges_by_partly_filled_history_after_warmup",
    ),
    Fault(
        name="an overflow enters the history",
        file="keras_lso/_core/spikes.py",
        old="scalars.logical_and(is_next, finite)",
        new="is_next",
        tests="tests/_core/test_spikes.py::test_overflow_is_not_counted_as_spike_and_stays_out_of_history",
    ),
    Fault(
        name="equal norms are outliers by their rounding",
        file="keras_lso/_core/spikes.py",
        old="mean * _ROUNDING",
        new="mean * 0.0",
        tests="tests/_core/test_spikes.py::test_norms_that_differ_by_rounding_are_not_spikes",
    ),
    Fault(
        name="a limit on norms is lifted as the history is",
        file="keras_lso/_core/spikes.py",
        old="logical_or(is_spike, norm > self._guard.max_norm)",
        new="logical_or(is_spike, (norm > self._guard.max_norm) & (in_a_row < 2))",
        tests="tests/_core/test_spikes.py::test_norm_above_max_norm_is_spike_from_first_step_on",
    ),
    Fault(
        name="a fused step applies an outlier",
        file="keras_lso/_core/fused_step.py",
        old="permitted = both(permitted, spikes.judge(found.norm, judged))",
        new="spikes.judge(found.norm, judged)",
        tests=_STILL,
    ),
    Fault(
        name="an optimizer without a rule applies an outlier",
        file="keras_lso/_core/step.py",
        old="return both(permitted, self._spikes.judge(found.norm, finite))",
        new="self._spikes.judge(found.norm, finite)\n            return permitted",
        tests=_STILL,
    ),
    Fault(
        name="a window that was taken back counts for a schedule",
        file="keras_lso/_core/fused_step.py",
        old="undone * (optimizer.gradient_accumulation_steps - 1)",
        new="undone * 0",
        tests=_WINDOWS,
    ),
    Fault(
        name="the sums of a window that was taken back remain",
        file="keras_lso/_core/step.py",
        old="is_dropped = backend.scalars.logical_not(calm)",
        new="is_dropped = backend.scalars.logical_and(calm, backend.scalars.logical_not(calm))",
        tests=_WINDOWS,
    ),
    Fault(
        name="a resumed run has no history of spikes",
        file="keras_lso/_core/state_file.py",
        old="[] if spikes is None else spikes.variables",
        new="[]",
        tests="tests/_core/test_spikes.py::test_resumed_run_skips_same_spikes_as_uninterrupted_run",
    ),
    Fault(
        name="a history of spikes is read without the masters that it follows",
        file="keras_lso/_core/state_file.py",
        old="_WITH_SPIKES = 3",
        new="_WITH_SPIKES = 2",
        tests="tests/_core/test_spikes.py::test_state_without_masters_and_with_history_loads_into_masters",
    ),
]
