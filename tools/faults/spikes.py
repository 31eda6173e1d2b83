"""Faults of spike guards."""

from tools.faults.fault import Fault

_MODEL = "tests/_core/test_spikes.py::test_the_steps_that_are_skipped_are_the_models"
_STILL = "tests/_core/test_spikes.py::test_a_spike_changes_nothing_but_the_history"
_WINDOWS = "tests/_core/test_spikes.py::test_a_window_with_a_spike_is_taken_back"

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
        tests="tests/_core/test_spikes.py::test_no_more_than_a_window_of_steps_is_skipped_in_a_row",
    ),
    Fault(
        name="steps are judged before the history is warm",
        file="keras_lso/_core/spikes.py",
        old="seen >= min(self._guard.warmup, window)",
        new="seen >= 2",
        tests="tests/_core/test_spikes.py::test_no_step_is_judged_before_the_history_is_warm",
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
        tests="tests/_core/test_spikes.py::test_a_history_that_is_not_full_judges_by_what_it_has",
    ),
    Fault(
        name="an overflow enters the history",
        file="keras_lso/_core/spikes.py",
        old="scalars.logical_and(is_next, finite)",
        new="is_next",
        tests="tests/_core/test_spikes.py::test_an_overflow_is_no_spike_and_does_not_enter_the_history",
    ),
    Fault(
        name="equal norms are outliers by their rounding",
        file="keras_lso/_core/spikes.py",
        old="mean * _ROUNDING",
        new="mean * 0.0",
        tests="tests/_core/test_spikes.py::test_norms_that_differ_by_a_rounding_are_no_outliers",
    ),
    Fault(
        name="a limit on norms is lifted as the history is",
        file="keras_lso/_core/spikes.py",
        old="logical_or(is_spike, norm > self._guard.max_norm)",
        new="logical_or(is_spike, (norm > self._guard.max_norm) & (in_a_row < 2))",
        tests="tests/_core/test_spikes.py::test_a_norm_above_the_largest_is_a_spike_from_the_first_step_on",
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
        tests="tests/_core/test_spikes.py::test_a_resumed_run_judges_as_one_that_did_not_stop",
    ),
]
