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
    assert found == [False]


@compares("memory_of")
def is_that_of_all_views(own, reference):
    value, other = tensor(RANDOM[0]), tensor(RANDOM[0])
    assert reference(value) == reference(value) != reference(other)
    assert own(value) == own(value.detach()) == own(value.view(-1)) == own(value.data)
    assert len({own(v) for v in (value, other, value[:1], sparse(RANDOM[0]))}) == 4
    assert own(None) == reference(None)


@compares("version_of")
def changes_with_each_write(own, reference):
    value = tensor([1.0])
    assert reference(value) is None
    before = own(value)
    value.add_(1.0)
    assert own(value) != before
    assert own(np.ones(2)) is None


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
    "VALUES_ARE_SHARED",
    "REDUCES_GRADIENTS",
    "OTHER_STEP",
    "PACKAGES",
    "HOW_TO_SCALE",
)
def differs(own, reference):
    assert type(own) is type(reference)
    assert own != reference
