"""Faults of master weights, and of what a variable takes from its master."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="final values do not reach variables that have masters",
        file="keras_lso/_core/master_weights.py",
        old="yield\n        self.write()",
        new="yield",
        tests="tests/_core/test_master_weights.py::test_final_values_are_those_of_the_averaged_masters",
    ),
    Fault(
        name="a step that is not fused starts from an old master",
        file="keras_lso/_core/step.py",
        old="masters.read()",
        new="",
        tests="tests/_core/test_master_weights.py::test_a_master_restarts_where_its_variable_was_assigned",
    ),
    Fault(
        name="a master that float16 cannot hold becomes inf",
        file="keras_lso/_core/master_weights.py",
        old="backend.rounded(value",
        new="ops.cast(value",
        tests="tests/_core/test_master_weights.py::test_what_is_too_large_for_float16_saturates",
    ),
    Fault(
        name="a step that is not fused rounds its masters",
        file="keras_lso/_core/master_weights.py",
        old="backend.resynchronised(ops.convert_to_tensor(master), value",
        new='ops.cast(value, "float32"',
        tests="tests/_core/test_master_weights.py::test_steps_too_small_for_float16_add_up",
    ),
    Fault(
        name="a master decays although its variable is excluded",
        file="keras_lso/loss_scale_optimizer.py",
        old="exclude_masters_with_variables(inner, variables, masters.trained)",
        new="",
        tests="tests/_core/test_exclusions.py::test_an_exclusion_counts_whenever_it_is_made tests/_core/test_exclusions.py::test_an_exclusion_of_a_member_of_a_multi_optimizer_counts",
    ),
    Fault(
        name="a master loses the path that exclusions go by",
        file="keras_lso/_keras_internals/variables.py",
        old="copy._path = path_of(variable)",
        new="",
        tests="tests/_core/test_master_weights.py::test_a_master_carries_path_constraint_and_exclusions",
    ),
    Fault(
        name="a skipped fused step of the reference writes the variables that it rounds",
        file="keras_lso/_backend/framework.py",
        old="select(self.rounded(new[0], low.dtype), low",
        new="self.rounded(new[0], low.dtype",
        tests="tests/_backend/test_fused_step.py::test_fused_steps_of_masters_keep_their_variables_in_step",
    ),
    Fault(
        name="a master that is out of step is the one that is kept",
        file="keras_lso/_backend/framework.py",
        old='master, ops.cast(value, "float32")',
        new='ops.cast(value, "float32"), master',
        tests="tests/_backend/test_fused_step.py::test_fused_steps_of_masters_keep_their_variables_in_step",
        backend="jax",
    ),
    Fault(
        name="a master restarts in a step that is skipped",
        file="keras_lso/_backend/torch/masters.py",
        old=".logical_and_(finite)",
        new="",
        tests="tests/_backend/test_torch_masters.py::test_a_skipped_step_changes_no_bit_whatever_the_values",
    ),
    Fault(
        name="a note of an older step is believed",
        file="keras_lso/_backend/torch/in_step.py",
        old="or found.written != _written(master, variable)",
        new="",
        tests="tests/_backend/test_torch_masters.py::test_a_master_restarts_however_its_variable_was_written",
    ),
    Fault(
        name="an answer that has not arrived is taken for a yes",
        file="keras_lso/_backend/torch/in_step.py",
        old=".arrived() is True",
        new=".arrived() is not False",
        tests="tests/_backend/test_torch_masters.py::test_steps_compare_until_the_word_of_one_is_heard",
    ),
    Fault(
        name="a fused step starts from an old master",
        file="keras_lso/_backend/tensorflow/framework.py",
        old="            self._resynchronise(pairs)\n",
        new="            pass\n",
        tests="tests/_backend/test_fused_step.py::test_fused_steps_of_masters_keep_their_variables_in_step",
        backend="tensorflow",
    ),
]
