"""Faults of the protection of moving statistics."""

from tools.faults.fault import Fault

_FILE = "keras_lso/diagnostics/statistics.py"
_MODELS = "keras_lso/_keras_internals/models.py"
_UNDO = "keras_lso/_backend/torch/undo.py"
_TESTS = "tests/test_statistics.py"
_WHOLE = "integration_tests/test_statistics.py"
_ON_DEVICE = (
    "tests/_backend/test_torch_undo.py::test_what_layers_keep_is_restored_on_the_device"
)

FAULTS = [
    Fault(
        name="statistics of a skipped step are kept",
        file=_FILE,
        old="        before.restore_if_skipped()\n        return logs",
        new="        return logs",
        tests=f"{_WHOLE}::test_a_skipped_batch_leaves_the_model_as_if_there_were_none",
    ),
    Fault(
        name="statistics of an applied step are restored",
        file=_FILE,
        old="[ops.not_equal(a, b) for a, b in pairs]",
        new="[ops.equal(a, b) for a, b in pairs]",
        tests=f"{_WHOLE}::test_a_skipped_batch_leaves_the_model_as_if_there_were_none",
        backend="tensorflow",
    ),
    Fault(
        name="only the first of two optimizers may skip",
        file=_FILE,
        old="    guards = _skipping(optimizers_in(model))\n",
        new="    guards = _skipping(optimizers_in(model))[:1]\n",
        tests=f"{_TESTS}::test_either_of_two_optimizers_may_be_the_one_that_skips",
    ),
    Fault(
        name="seed generators are restored",
        file=_FILE,
        old="if id(variable) in kept else new",
        new="if kept else new",
        tests=f"{_TESTS}::test_seed_generators_and_metrics_move_on",
        backend="jax",
    ),
    Fault(
        name="a train function that was made before is not made anew",
        file=_FILE,
        old="        remake_train_function(model)\n",
        new="",
        tests=f"{_TESTS}::test_a_train_function_that_was_made_before_is_made_anew",
        backend="jax",
    ),
    Fault(
        name="a model is protected twice",
        file=_FILE,
        old='if not isinstance(own_attribute(model, "train_step"), _ProtectedStep):',
        new="if True:",
        tests=f"{_TESTS}::test_it_may_be_called_at_any_time",
    ),
    Fault(
        name="variables that the step creates are not restored",
        file=_FILE,
        old="        if new:\n",
        new="        if False:\n",
        tests=f"{_TESTS}::test_a_model_that_a_loop_builds_is_refused",
    ),
    Fault(
        name="frozen weights are left out of a train step of one's own",
        file=_FILE,
        old="self._includes_frozen = not is_keras_own(step)",
        new="self._includes_frozen = False",
        tests=f"{_TESTS}::test_what_a_train_step_writes_to_frozen_layers_is_restored",
    ),
    Fault(
        name="frozen weights are copied at each step",
        file=_MODELS,
        old="keras.Model.train_step\n",
        new="None\n",
        tests=f"{_TESTS}::test_keras_own_train_step_copies_no_frozen_weights",
    ),
    Fault(
        name="the states of recurrent layers are left out",
        file=_MODELS,
        old="kept += [v for v in states if isinstance(v, keras.Variable)]",
        new="pass",
        tests="tests/test_recurrent_states.py::test_a_skipped_step_leaves_the_states_as_they_were",
    ),
    Fault(
        name="the nested states of stacked cells are left out",
        file=_MODELS,
        old="states = keras.tree.flatten(layer.states)",
        new="states = layer.states or ()",
        tests="tests/test_recurrent_states.py::test_a_skipped_step_leaves_the_states_as_they_were",
    ),
    Fault(
        name="a model with recurrent states is not built before its first step",
        file=_MODELS,
        old="for build in (_build_in_a_symbolic_pass, _build_by_shapes):",
        new="for build in (_build_in_a_symbolic_pass,):",
        tests="tests/test_recurrent_states.py::test_a_model_that_fit_builds_keeps_its_states_from_the_first_step",
        backend="tensorflow",
    ),
    Fault(
        name="a report leaves its states in recurrent layers",
        file="keras_lso/diagnostics/trial_runs.py",
        old="[*model.variables, *model.metrics_variables, *kept]",
        new="[*model.variables, *model.metrics_variables]",
        tests="tests/test_trial_runs.py::test_the_states_of_a_recurrent_layer_are_restored",
    ),
    Fault(
        name="the buffers of a wrapped module are left out",
        file=_MODELS,
        old="            kept += _buffers_of(layer)\n",
        new="            pass\n",
        tests=f"{_TESTS}::test_the_buffers_of_a_wrapped_module_are_restored",
        backend="torch",
    ),
    Fault(
        name="what a module put in the place of a buffer is written to",
        file=_MODELS,
        old="return self.tensor if self.value is self.tensor else self",
        new="return self.value",
        tests=f"{_TESTS}::test_a_buffer_that_a_module_replaces_is_restored",
        backend="torch",
    ),
    Fault(
        name="a model that fit builds is not built before its first step",
        file=_MODELS,
        old="            build(model, data)\n            return\n",
        new="            return\n",
        tests=f"{_TESTS}::test_a_model_that_fit_builds_is_protected_from_its_first_step",
        backend="tensorflow",
    ),
    Fault(
        name="what layers keep is restored if the step was applied",
        file=_UNDO,
        old="_copy_unless(torch.logical_not(flag), pairs)",
        new="_copy_unless(flag, pairs)",
        tests=_ON_DEVICE,
        backend="torch",
    ),
    Fault(
        name="integers that layers keep are not restored on a device",
        file=_UNDO,
        old="            target.copy_(torch.where(flag, value, target))\n",
        new="            pass\n",
        tests=_ON_DEVICE,
        backend="torch",
    ),
    Fault(
        name="what layers keep is the very tensor that they write",
        file=_UNDO,
        old="copies = [torch.empty_like(tensor) for tensor in tensors]",
        new="return tensors",
        tests="tests/_backend/test_framework.py::test_an_override_does_what_the_default_does",
        backend="torch",
    ),
    Fault(
        name="on TensorFlow the replicas restore nothing",
        file="keras_lso/_backend/tensorflow/framework.py",
        old="            tf.cond(flag, lambda: _nothing(restore()), _nothing)",
        new="            pass",
        tests="integration_tests/distributed/test_tensorflow_statistics.py::test_statistics_of_all_replicas_are_restored",
        backend="tensorflow",
    ),
]
