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
        taken.append(next(iter(function(iter([batch]), shown.append, 1))))
    assert len(shown) == 2
    for found in (*shown, *taken):
        flat = keras.tree.flatten(found)
        for value, right in zip(flat, keras.tree.flatten(batch), strict=True):
            np.testing.assert_array_equal(value, right)
    assert next(iter(reference(iter([batch]), shown.append, 5))) is batch
    with pytest.raises(ValueError, match="steps_per_execution=5"):
        own(iter([batch]), shown.append, 5)
