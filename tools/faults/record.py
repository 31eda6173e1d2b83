"""Faults of the record of steps."""

from tools.faults.fault import Fault

_NUMPY = "tests/_core/test_step_record.py::test_recorded_rows_match_numpy_model"
_WINDOWS = "tests/_core/test_step_record.py::test_recorded_norms_of_micro_batches_match_numpy_model"
_REASONS = "tests/_core/test_step_record.py::test_record_distinguishes_spike_overflow_and_non_finite_rate"
_RING = "tests/_core/test_step_record.py::test_record_holds_last_steps_up_to_length"
_TWICE = "integration_tests/test_step_record.py::test_record_keeps_last_entry_of_repeated_step"

FAULTS = [
    Fault(
        name="the loss scale on record is that of the next step",
        file="keras_lso/_core/step_record.py",
        old="scale = backend.scalars.copy(read(self._policy.scale))",
        new="scale = read(self._policy.scale)",
        tests=_NUMPY,
    ),
    Fault(
        name="the learning rate on record is that of the next step",
        file="keras_lso/_core/step_record.py",
        old="0.0 if rate is None else rate",
        new="0.0 if rate is None else self._rate()",
        tests=_NUMPY,
    ),
    Fault(
        name="a micro-batch of a window that goes on counts as applied",
        file="keras_lso/_core/step_record.py",
        old="goes_on, code(ACCUMULATED), taken",
        new="goes_on, taken, taken",
        tests=_WINDOWS,
    ),
    Fault(
        name="the norm of a micro-batch is multiplied by its window",
        file="keras_lso/_core/fused_step.py",
        old="        if norm:\n            found = found._replace(norm=found.norm / (2 * count))\n",
        new="",
        tests=_WINDOWS,
    ),
    Fault(
        name="the norm of a micro-batch without a rule is multiplied by its window",
        file="keras_lso/_core/step.py",
        old="if window and needs_norm:",
        new="if False:",
        tests=_WINDOWS,
    ),
    Fault(
        name="a spike is on record as a rate that is not finite",
        file="keras_lso/_core/step_record.py",
        old="refused = where(is_spike, code(SPIKE), refused)",
        new="pass",
        tests=_REASONS,
    ),
    Fault(
        name="a full ring is read from its first place",
        file="keras_lso/_core/step_record.py",
        old="rows[new % self.length]",
        new="rows[: len(new)]",
        tests=_RING,
    ),
    Fault(
        name="PyTorch writes each step after a full ring over the last one",
        file="keras_lso/_backend/torch/scalars.py",
        old="torch.remainder(count, ring.shape[0])",
        new="count.clamp(max=ring.shape[0] - 1)",
        tests=_RING,
        backend="torch",
    ),
    Fault(
        name="steps after a state was loaded are numbered from one",
        file="keras_lso/_core/counters.py",
        old="        if self.record is not None:\n            self.record.restart()\n",
        new="",
        tests="tests/_core/test_step_record.py::test_step_numbers_continue_from_loaded_state",
    ),
    Fault(
        name="what a ring cannot hold until it is read is lost",
        file="keras_lso/callbacks/step_record.py",
        old="if self._unread + self._per_execution > self._length:",
        new="if False:",
        tests="integration_tests/test_step_record.py::test_step_record_holds_each_step_of_long_epoch_once",
    ),
    Fault(
        name="a function that was compiled before the record goes on without it",
        file="keras_lso/callbacks/step_record.py",
        old="            self.model.make_train_function(force=True)\n",
        new="",
        tests="integration_tests/test_step_record.py::test_step_record_works_with_previously_trained_model",
        backend="tensorflow",
    ),
    Fault(
        name="a step that was made twice is read twice",
        file="keras_lso/_core/record_file.py",
        old="kept.pop()",
        new="break",
        tests=_TWICE,
    ),
    Fault(
        name="a line that was not finished is joined to the next one",
        file="keras_lso/_core/record_file.py",
        old="            file.truncate()\n",
        new="",
        tests="integration_tests/test_step_record.py::test_unfinished_line_of_record_is_removed",
    ),
    Fault(
        name="the steps before an error in fit are discarded",
        file="keras_lso/callbacks/step_record.py",
        old="            self._file.begin()\n        self.flush()\n",
        new="            self._file.begin()\n",
        tests="integration_tests/test_step_record.py::test_steps_before_error_in_fit_are_written",
    ),
    Fault(
        name="flush fails after an error in the first step",
        file="keras_lso/callbacks/step_record.py",
        old=" and have_values(optimizer.variables)",
        new="",
        tests="integration_tests/test_step_record.py::test_flush_after_error_in_first_step_writes_nothing",
        backend="jax",
    ),
    Fault(
        name="the micro-batches of dropped windows are numbered twice",
        file="keras_lso/_core/counters.py",
        old="return skipped + applied + spikes * undone",
        new="return skipped + applied",
        tests="tests/_core/test_step_record.py::test_step_numbers_continue_after_restored_spikes",
    ),
    Fault(
        name="a short record is read as rarely as a long one",
        file="keras_lso/callbacks/step_record.py",
        old="return min(length, self._wanted_length())",
        new="return self._wanted_length()",
        tests="integration_tests/test_step_record.py::test_step_record_is_complete_with_short_record_of_optimizer",
    ),
]
