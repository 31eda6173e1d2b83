"""Faults of Triton's kernels, of their trial and their addresses."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="an option that is set later takes a kernel that was not tried",
        file="keras_lso/_backend/torch/triton/steps.py",
        old=", how.form(rule), [",
        new=", [",
        tests="tests/_backend/test_torch_triton_steps.py::test_changed_options_and_gradient_dtypes_are_tried_again",
    ),
    Fault(
        name="a gradient is stepped with the other sign",
        file="keras_lso/_backend/torch/triton/steps.py",
        old="grads[i].is_neg()",
        new="False",
        tests="tests/_backend/test_torch_triton_steps.py::test_gradient_with_negative_bit_is_left_to_pytorch",
    ),
    Fault(
        name="the verdict of a trial is ignored",
        file="keras_lso/_backend/torch/triton/trial.py",
        old="    return not fault\n",
        new="    return True\n",
        tests="tests/_backend/test_torch_triton_steps.py::test_kernel_that_failed_trial_is_replaced_by_pytorch_kernel",
    ),
    Fault(
        name="a NaN passes a trial",
        file="keras_lso/_backend/torch/triton/trial.py",
        old="torch.logical_not(errors <= limits)",
        new="errors > limits",
        tests="tests/_backend/test_torch_triton_trial.py::test_wrong_kernel_fails_trial_with_warning",
    ),
    Fault(
        name="a slot that has moved is written where it was",
        file="keras_lso/_backend/torch/triton/addresses.py",
        old="if addresses != self",
        new="addresses = self._regular_at or addresses\n        if addresses != self",
        tests="tests/_backend/test_torch_addresses.py::test_address_table_is_sent_again_after_tensor_moves",
    ),
    Fault(
        name="a recorded graph reads the addresses of the steps that are not",
        file="keras_lso/_backend/torch/triton/addresses.py",
        old="if stream is None:\n            return self._sent(numbers), True",
        new="",
        tests="tests/_backend/test_torch_addresses.py::test_recorded_graph_receives_separate_numbers",
    ),
]
