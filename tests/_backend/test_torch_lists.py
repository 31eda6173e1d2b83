"""Lists of tensors with the arithmetic of tensors, which formulas are called with."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("The others have no lists of tensors", allow_module_level=True)
import torch

from keras_lso._backend.torch import xp
from keras_lso._backend.torch.lists import Tensors

SHAPES = [(3,), (2, 4), ()]


def arrays(seed):
    random = np.random.default_rng(seed)
    # Far from 0, which they are divided by.
    return [random.uniform(0.5, 2.0, size=shape) for shape in SHAPES]


def tensors(values):
    return Tensors([torch.tensor(v, dtype=torch.float32) for v in values])


# As a formula writes them, of lists `a` and `b`; `c` is a scalar tensor.
FORMULAS = {
    "sum": lambda a, b, c: a + b,
    "difference": lambda a, b, c: a - b,
    "a multiple is added": lambda a, b, c: a + b * 0.25,
    "a multiple is subtracted": lambda a, b, c: a - b * 0.25,
    "multiples are added": lambda a, b, c: a * 0.75 + b * 0.25,
    "multiples are subtracted": lambda a, b, c: a * 3 - b * 0.25,
    "a multiple of a multiple": lambda a, b, c: a * 0.5 * 3.0 - b,
    "products": lambda a, b, c: a * b - b * c,
    "quotients": lambda a, b, c: a * 0.5 / b - a / c,
    "numbers": lambda a, b, c: (a + 2.0) * c - 1.0 - c,
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_formulas_of_tensor_lists_match_numpy_in_float64(formula):
    a, b, c = arrays(1), arrays(2), 0.375
    of_lists = tensors(a), tensors(b)
    found = formula(*of_lists, torch.tensor(c)).items
    for value, x, y in zip(found, a, b, strict=True):
        np.testing.assert_allclose(value.numpy(), formula(x, y, c), rtol=1e-5)
    # Once more: nothing was changed.
    for given, values in zip(of_lists, (a, b), strict=True):
        for value, expected in zip(given.items, values, strict=True):
            np.testing.assert_array_equal(value.numpy(), np.float32(expected))


def test_tensor_of_factors_multiplies_each_list_item_by_its_factor():
    a, rates = arrays(1), np.array([0.5, 2.0, 4.0])
    found = tensors(a) * torch.tensor(rates, dtype=torch.float32)
    for value, x, rate in zip(found.items, a, rates, strict=True):
        np.testing.assert_allclose(value.numpy(), x * rate, rtol=1e-6)


FUNCTIONS = {"square": np.square, "sqrt": np.sqrt, "abs": np.abs, "sign": np.sign}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_tensor_lists_match_numpy(name):
    sign = 1.0 if name == "sqrt" else -1.0
    a = [x * sign for x in arrays(3)]
    for factor in (1.0, 0.5):
        found = getattr(xp, name)(tensors(a) * factor).items
        for value, x in zip(found, a, strict=True):
            expected = FUNCTIONS[name](x * factor)
            np.testing.assert_allclose(value.numpy(), expected, rtol=1e-6)


def test_maximum_and_average_of_tensor_lists_match_numpy():
    a, b = arrays(4), arrays(5)
    larger = xp.maximum(tensors(a), tensors(b)).items
    averages = xp.average(tensors(a), tensors(b), 0.75).items
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        np.testing.assert_allclose(larger[i].numpy(), np.maximum(x, y), rtol=1e-6)
        expected = 0.75 * x + 0.25 * y
        np.testing.assert_allclose(averages[i].numpy(), expected, rtol=1e-6)


WRITTEN = {
    **{name: FORMULAS[name] for name in ("sum", "difference", "multiples are added")},
    "the other way": lambda a, b, c: b + a,
    "multiple": lambda a, b, c: a * 0.5,
    "multiple of a sum": lambda a, b, c: (a + b) * 2.0,
    "other": lambda a, b, c: b,
}


@pytest.mark.parametrize("formula", WRITTEN.values(), ids=WRITTEN)
def test_expression_is_written_over_old_values_which_cannot_be_used_then(formula):
    a, b = arrays(6), arrays(7)
    old, other = tensors(a), tensors(b)
    places = list(map(torch.Tensor.data_ptr, old.items))
    pending = old * 0.5, old + other, other - old
    found = formula(old, other, None).written_over(old)
    assert list(map(torch.Tensor.data_ptr, found.items)) == places
    for value, x, y in zip(found.items, a, b, strict=True):
        np.testing.assert_allclose(value.numpy(), formula(x, y, None), rtol=1e-5)
    for value, y in zip(other.items, b, strict=True):
        np.testing.assert_array_equal(value.numpy(), np.float32(y))
    for late in (lambda: other * old, *(lambda p=p: p.items for p in pending)):
        with pytest.raises(RuntimeError, match="old value of a variable or slot"):
            late()
    with pytest.raises(RuntimeError, match="old value of a variable or slot"):
        (found + pending[1]).written_over(found)
