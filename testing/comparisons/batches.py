"""Comparisons of how the batches of `fit` are seen."""

import keras
import numpy as np
import pytest

from testing.comparisons.inputs import tensor
from testing.comparisons.registry import compares


@compares("shown")
def shows_the_batch_that_comes_next(own, reference):
    batch = tensor(np.ones((2, 3))), {"a": tensor(np.zeros(4))}
    shown, taken = [], []
    for function in (own, reference):
        taken.append(next(iter(function(iter([batch]), shown.append))))
    assert len(shown) == 2
    for found in (*shown, *taken):
        flat = keras.tree.flatten(found)
        for value, right in zip(flat, keras.tree.flatten(batch), strict=True):
            np.testing.assert_array_equal(value, right)


@compares("check_batches_are_seen")
def refuses_batches_that_a_compiled_function_takes(own, reference):
    assert own(1) is reference(1) is reference(5) is None
    with pytest.raises(ValueError, match="steps_per_execution=5"):
        own(5)
