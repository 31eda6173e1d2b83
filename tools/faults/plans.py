"""Faults of plans: a step that is decided once and holds for too long."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="a plan holds where a gradient is missing now",
        file="keras_lso/_core/step.py",
        old="list(map(type, grads)) == self._types",
        new="len(grads) == len(self._types)",
        tests="tests/_core/test_plan.py::test_changed_arguments_step_like_optimizer_without_plan",
    ),
    Fault(
        name="a plan holds for variables in another order",
        file="keras_lso/_core/step.py",
        old="and all(map(operator.is_, variables, self.variables))",
        new="",
        tests="tests/_core/test_plan.py::test_changed_arguments_step_like_optimizer_without_plan",
    ),
    Fault(
        name="a plan holds whatever the optimizer has become",
        file="keras_lso/_core/step.py",
        old="and self._choice.holds()",
        new="",
        tests="tests/_core/test_plan.py::test_changed_hyperparameters_step_like_optimizer_without_plan",
    ),
    Fault(
        name="a plan holds in other context_guards",
        file="keras_lso/_core/step.py",
        old="and backend.context_guards() == self._context",
        new="",
        tests="tests/_core/test_plan.py::test_changed_context_guards_make_new_plan",
    ),
    Fault(
        name="a copied optimizer has the plan of the original",
        file="keras_lso/_core/step.py",
        old='{**vars(self), "_plan": None}',
        new="vars(self)",
        tests="tests/_core/test_plan.py::test_step_state_for_copies_omits_plan",
    ),
    Fault(
        name="a variable that was excluded from decay decays on",
        file="keras_lso/_keras_internals/rules.py",
        old='frozenset(state.get("_exclude_from_weight_decay") or ()),',
        new="",
        tests="tests/_core/test_plan.py::test_changed_hyperparameters_step_like_optimizer_without_plan",
    ),
    Fault(
        name="a step writes tensors that the variables held once",
        file="keras_lso/_keras_internals/variables.py",
        old="not all(map(operator.is_, map(_tensor_of, variables), storage))",
        new="False",
        tests="tests/_core/test_plan.py::test_changed_variables_step_like_optimizer_without_plan",
    ),
    Fault(
        name="a step on PyTorch takes memory for other than what it writes",
        file="keras_lso/_backend/torch/chunks.py",
        old="return are_in_place and self._are_alike(written)",
        new="return self._are_alike(written)",
        tests="tests/_core/test_plan.py::test_moved_tensor_data_steps_like_optimizer_without_plan",
    ),
    Fault(
        name="what FSDP has sharded after a step is not looked for",
        file="keras_lso/_backend/torch/chunks.py",
        old="set(map(id, FSDP_MODULES)",
        new="(",
        tests="integration_tests/distributed/test_torch_shards.py::test_inconsistent_sharding_is_rejected_before_any_change",
    ),
    Fault(
        name="scalars are read from a tensor that changes under the step",
        file="keras_lso/_backend/torch/scalars.py",
        old="return tensor.clone()",
        new="return tensor",
        tests="tests/_core/test_counters.py::test_returned_counters_do_not_change_with_later_steps",
    ),
    Fault(
        name="a step that was decided in a replica is taken outside of it",
        file="keras_lso/_backend/tensorflow/framework.py",
        old="tf.distribute.get_strategy(), is_outside",
        new="(tf.distribute.get_strategy(),)",
        tests="tests/_core/test_plan.py::test_step_planned_in_replica_is_rejected_in_cross_replica_context",
        backend="tensorflow",
    ),
]
