"""Faults of Triton's kernels, of their trial and their addresses."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="an option that is set later takes a kernel that was not tried",
        file="keras_lso/_backend/torch/triton/steps.py",
        old=", how.form(rule), [",
        new=", [",
        tests="tests/_backend/test_torch_triton_steps.py::test_what_is_tried_may_change_from_step_to_step",
    ),
    Fault(
        name="a gradient is stepped with the other sign",
        file="keras_lso/_backend/torch/triton/steps.py",
        old="grads[i].is_neg()",
        new="False",
        tests="tests/_backend/test_torch_triton_steps.py::test_a_gradient_that_is_the_negative_of_what_it_holds_is_left_to_pytorch",
    ),
    Fault(
        name="the verdict of a trial is ignored",
        file="keras_lso/_backend/torch/triton/trial.py",
        old="    return not fault\n",
        new="    return True\n",
        tests="tests/_backend/test_torch_triton_steps.py::test_what_has_failed_is_replaced_by_pytorch",
    ),
    Fault(
        name="a NaN passes a trial",
        file="keras_lso/_backend/torch/triton/trial.py",
        old="torch.logical_not(errors <= limits)",
        new="errors > limits",
        tests="tests/_backend/test_torch_triton_trial.py::test_a_kernel_that_is_wrong_fails",
    ),
    Fault(
        name="a slot that has moved is written where it was",
        file="keras_lso/_backend/torch/triton/addresses.py",
        old="if addresses != self",
        new="addresses = self._regular_at or addresses\n        if addresses != self",
        tests="tests/_backend/test_torch_addresses.py::test_what_has_moved_is_sent_again",
    ),
    Fault(
        name="a recorded graph reads the addresses of the steps that are not",
        file="keras_lso/_backend/torch/triton/addresses.py",
        old="if stream is None:\n            return self._sent(numbers), True",
        new="",
        tests="tests/_backend/test_torch_addresses.py::test_a_graph_that_is_recorded_has_numbers_of_its_own",
    ),
]
