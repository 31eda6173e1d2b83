"""Faults that hide from a user what training does."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="a stall that shows at the end is not reported",
        file="keras_lso/callbacks/loss_scale_monitor.py",
        old="_end(logs)\n        if self._stalled_since is not",
        new="_end(logs)\n        if self._stalled_since is None and self._reported is",
        tests="integration_tests/test_loss_scale_monitor.py::test_a_stall_that_shows_only_at_the_end_is_told",
    ),
    Fault(
        name="the monitor synchronises with the device at every batch",
        file="keras_lso/callbacks/loss_scale_monitor.py",
        old="every = max(1, self.patience // self._per_execution)",
        new="every = 1",
        tests="integration_tests/test_loss_scale_monitor.py::test_an_event_file_holds_both",
    ),
    Fault(
        name="nobody warns of a rate in a compiled step",
        file="keras_lso/loss_scale_optimizer.py",
        old="have_values(self.variables) and self._counters.skips_in_a_row()",
        new="False",
        tests="tests/_core/test_rates.py::test_fit_warns_at_its_end_at_the_latest",
        backend="jax",
    ),
    Fault(
        name="a newer framework is taken without a look",
        file="keras_lso/_keras_internals/keras_version.py",
        old="TESTED and version",
        new="TESTED and not version",
        tests="tests/test_keras_version.py::test_a_newer_framework_without_a_private_function_is_refused",
    ),
    Fault(
        name="the lowest scale is not recognised",
        file="keras_lso/_backend/torch/scalars.py",
        old="& (scale <= lowest",
        new="& (scale < lowest",
        tests="tests/_core/test_counters.py::test_training_has_stalled_after_as_many_skips_at_the_lowest_scale",
    ),
    Fault(
        name="a pattern in vain is told only if the whole list is",
        file="keras_lso/_core/exclusions.py",
        old="all(map(exclusion.excludes, meant)) and (meant or not is_mistake)",
        new="not is_mistake",
        tests="tests/_core/test_exclusions.py::test_a_pattern_that_excludes_nothing_is_told_once",
    ),
    Fault(
        name="the history of a gradient is lost without a word",
        file="keras_lso/_core/wrapper.py",
        old="backend.check_not_followed([*grads, *fixed])",
        new="",
        tests="tests/_core/test_stateless_arguments.py::test_a_gradient_that_autograd_follows",
    ),
    Fault(
        name="a module that was cast after `build` trains nothing",
        file="keras_lso/_core/gradients.py",
        old="check_not_narrowed(variables)",
        new="",
        tests="tests/_backend/test_torch_memory.py::test_a_module_with_masters_that_was_cast_is_refused",
    ),
]
