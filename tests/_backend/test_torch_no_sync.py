"""Functions that ask tensors, run without an answer: all of their branches."""

import itertools

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip(
        "on PyTorch alone an answer waits for the device", allow_module_level=True
    )

torch = pytest.importorskip("torch")

from keras_lso._backend.torch import no_sync as torch_no_sync  # noqa: E402


def one_after_the_other(*flags):
    return sum(
        2.0**i if flag else torch.tensor(-(3.0**i)) for i, flag in enumerate(flags)
    )


def one_within_the_other(a, b, c):
    if a:
        return torch.tensor(1.0) if b else torch.tensor(2.0)
    if c:
        return torch.tensor(3.0) if b else torch.tensor(4.0)
    return torch.tensor(5.0)


NUMBERS = 0.5, 2, True, np.float64(1), np.float32([1]), np.int32(3), torch.ones(2)


@pytest.mark.parametrize("number", NUMBERS, ids=map(repr, NUMBERS))
@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor])
def test_numbers_written_to_device_have_dtype_and_shape_of_pytorch(make, number):
    if torch.is_tensor(number) and make is torch.tensor:
        make = torch.as_tensor
    right = make(number)
    with torch_no_sync.NumbersOnDevice():
        for found in make(number, device="meta"), make(data=number):
            assert (found.dtype, found.shape) == (right.dtype, right.shape)


@pytest.mark.parametrize("function", [one_after_the_other, one_within_the_other])
def test_select_returns_result_of_branch_chosen_by_flags(function):
    for flags in itertools.product([False, True], repeat=3):
        tensors = [torch.tensor(flag) for flag in flags]
        found = torch_no_sync._select(lambda given=tensors: function(*given), ())
        assert float(found) == float(function(*flags))


def test_select_matches_function_with_six_flags():
    for flags in itertools.product([False, True], repeat=6):
        tensors = [torch.tensor(flag) for flag in flags]
        found = torch_no_sync._select(
            lambda given=tensors: one_after_the_other(*given), ()
        )
        assert float(found) == float(one_after_the_other(*flags))
