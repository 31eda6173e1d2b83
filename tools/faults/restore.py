"""Faults of runs that go back to a copy."""

from tools.faults.fault import Fault

_TESTS = "integration_tests/test_restore.py"
_BY_HAND = f"{_TESTS}::test_restored_run_matches_run_restarted_by_hand"

FAULTS = [
    Fault(
        name="a copy that holds NaN is kept",
        file="keras_lso/callbacks/copies.py",
        old="if not refused:",
        new="if True:",
        tests=f"{_TESTS}::test_non_finite_copy_is_not_kept",
        backend="torch",
    ),
    Fault(
        name="a run goes back to a copy from among the skipped steps",
        file="keras_lso/callbacks/copies.py",
        old="if c.attempted <= before]",
        new="]",
        tests=f"{_TESTS}::test_restore_ignores_copy_taken_among_skipped_steps",
        backend="jax",
    ),
    Fault(
        name="a run goes back to the same copy again and again",
        file="keras_lso/callbacks/copies.py",
        old="self._copies[-1] is self._last",
        new="False",
        tests=f"{_TESTS}::test_run_that_stalls_after_last_retry_raises",
        backend="jax",
    ),
    Fault(
        name="slots stay as they were at the stall",
        file="keras_lso/callbacks/copies.py",
        old="self._optimizer._state.assign(optimizer, copy.optimizer)",
        new="pass",
        tests=_BY_HAND,
        backend="torch",
    ),
    Fault(
        name="a copy brings back the learning rate of its time",
        file="keras_lso/callbacks/copies.py",
        old="before.assign(rate)",
        new="pass",
        tests=f"{_TESTS}::test_restore_multiplies_rate_that_was_lowered_since_copy",
        backend="torch",
    ),
    Fault(
        name="a compiled step goes on with the rates of the old schedule",
        file="keras_lso/callbacks/loss_scale_monitor.py",
        old="stop_recording_overflows()\n        self.model.make_train_function(force=True)",
        new="stop_recording_overflows()",
        tests=_BY_HAND,
        backend="tensorflow",
    ),
    Fault(
        name="a schedule that is scaled twice is scaled once",
        file="keras_lso/callbacks/copies.py",
        old="Scaled(schedule, before * factor)",
        new="Scaled(schedule, factor)",
        tests=f"{_TESTS}::test_each_restore_scales_schedule_again",
        backend="torch",
    ),
    Fault(
        name="the batch after the bad one is saved",
        file="keras_lso/callbacks/bad_batch.py",
        old="self._batches[-skipped]",
        new="self._batches[-skipped + 1]",
        tests=f"{_TESTS}::test_monitor_saves_bad_batch",
        backend="torch",
    ),
    Fault(
        name="a monitor watches batches after its run has ended with an error",
        file="keras_lso/callbacks/bad_batch.py",
        old="if self._model.train_function is self:",
        new="if False:",
        tests="integration_tests/test_bad_batch.py"
        "::test_interrupted_monitor_sees_no_later_batch",
        backend="torch",
    ),
    Fault(
        name="a run is restored at the end of an epoch",
        file="keras_lso/callbacks/loss_scale_monitor.py",
        old='is not None and self.on_stall != "restore":',
        new="is not None:",
        tests=f"{_TESTS}::test_swapped_weights_of_epoch_end_do_not_undo_restore",
        backend="torch",
    ),
    Fault(
        name="a run that is restored at its end ends without averages",
        file="keras_lso/callbacks/loss_scale_monitor.py",
        old="self.model.optimizer.finalize_variable_values(weights)",
        new="pass",
        tests=f"{_TESTS}::test_run_that_is_restored_at_its_end_ends_with_averages",
        backend="torch",
    ),
    Fault(
        name="a stall is reported before a step has recorded its gradients",
        file="keras_lso/callbacks/loss_scale_monitor.py",
        old="if steps_attempted(self._find_optimizer()) > self._attempted:",
        new="if True:",
        tests="integration_tests/test_loss_scale_monitor.py"
        "::test_stall_detected_at_end_of_epoch_names_layers_after_next_step",
        backend="torch",
    ),
    Fault(
        name="a mask of -inf prevents copies",
        file="keras_lso/callbacks/copies.py",
        old="if at not in self._constants and not is_finite(value)",
        new="if not is_finite(value)",
        tests=f"{_TESTS}::test_constant_mask_of_minus_inf_does_not_prevent_copies",
        backend="torch",
    ),
    Fault(
        name="a run goes back without end",
        file="keras_lso/callbacks/loss_scale_monitor.py",
        old="self._copies.restored == self.retries",
        new="False",
        tests=f"{_TESTS}::test_run_that_stalls_after_last_retry_raises",
        backend="jax",
    ),
    Fault(
        name="steps of windows are updates for the monitor",
        file="keras_lso/_core/counters.py",
        old="counters.skipped, counters.applied, optimizer.skipped_spikes",
        new="counters.skipped, optimizer.iterations, optimizer.skipped_spikes",
        tests=f"{_TESTS}::test_restored_run_counts_micro_batches_of_windows",
        backend="torch",
    ),
    Fault(
        name="a process copies its own shard alone",
        file="keras_lso/_backend/jax/framework.py",
        old="value = multihost_utils.process_allgather(value, tiled=True)",
        new="value = value.addressable_shards[0].data",
        tests="integration_tests/distributed/test_jax_restore.py"
        "::test_restored_processes_continue_like_run_restarted_by_hand",
        backend="jax",
    ),
]
