"""Comparisons of the facts about a backend: devices, memory, flags."""

import keras
import numpy as np
from keras import ops

from testing.comparisons.inputs import RANDOM, sparse, tensor
from testing.comparisons.registry import compares


@compares("devices")
def names_devices(own, reference):
    assert reference() == []
    assert own()
    assert all(isinstance(name, str) for name in own())


@compares("hardware_of")
def is_the_cpu_for_what_is_there(own, reference):
    for value in (tensor([1.0]), keras.Variable([1.0]).value):
        assert own(value) == reference(value) == "cpu"


@compares("has_values")
def says_where_numbers_can_be_read(own, reference):
    assert own(tensor([1.0])) is reference(tensor([1.0])) is True
    found = []

    def traced(x):
        found.append(own(x))
        return x

    ops.vectorized_map(traced, tensor([1.0, 2.0]))
    assert set(found) == {False}


@compares("memory_of")
def is_that_of_all_views(own, reference):
    value, other = tensor(RANDOM[0]), tensor(RANDOM[0])
    assert reference(value) == reference(value) != reference(other)
    assert reference(value)[1] is None
    views = value, value.detach(), value.view(-1), value.data
    assert len({own(view)[0] for view in views}) == 1
    assert len({own(v)[0] for v in (value, other, value[:1], sparse(RANDOM[0]))}) == 4
    assert own(None) == reference(None)
    before = own(value)
    value.add_(1.0)
    assert own(value)[0] == before[0]
    assert own(value)[1] != before[1]
    assert own(np.ones(2))[1] is None


@compares("preserve_random_state")
def restores_random_numbers(own, reference):
    import torch

    with own():
        inside = torch.rand(())
    assert torch.rand(()) == inside
    with reference():
        outside = torch.rand(())
    assert torch.rand(()) != outside


@compares(
    "COMPILES_LOOPS",
    "UPDATES_IN_PLACE",
    "STEPS_WRITE_TENSORS",
    "REDUCES_GRADIENTS",
    "OTHER_STEP",
    "HOW_TO_SCALE",
)
def differs(own, reference):
    assert type(own) is type(reference)
    assert own != reference
