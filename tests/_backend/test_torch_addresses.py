"""Tables of where tensors are, as the Triton kernels are given them."""

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("of PyTorch's tensors", allow_module_level=True)

import torch

from keras_lso._backend.torch.triton import addresses as torch_addresses
from keras_lso._backend.torch.triton.addresses import Group, Numbers

BLOCK = 8
SIZES = [8, 0, 17, 1]


def rows(count=2):
    return [[torch.zeros(size) for size in SIZES] for _ in range(count)]


def addresses(tensors):
    return [t.data_ptr() for t in tensors]


def test_address_table_lists_tensors_and_owner_of_each_block():
    [weights, slots], [grads] = rows(), rows(1)
    group = Group([weights, slots], BLOCK)
    table, gradients, owners = group.on_device(grads)
    assert table.view(4, 4).tolist() == [
        SIZES,
        [0, 1, 1, 4],
        addresses(weights),
        addresses(slots),
    ]
    assert gradients.tolist() == addresses(grads)
    # Block after block, those of the third tensor are two and a rest.
    assert owners.tolist() == [0, 2, 2, 2, 3]
    assert (group.blocks, group.count) == (5, 4)
    assert list(map(id, group.written)) == list(map(id, [*weights, *slots]))


def test_address_table_ends_with_rows_of_weight_numbers():
    both, [grads] = rows(), rows(1)
    numbers = [[4, 5, 6, 7], [0, 2**31, 2**40, -1]]
    table, _, _ = Group(both, BLOCK, numbers).on_device(grads)
    assert table.view(6, 4)[2:].tolist() == [*map(addresses, both), *numbers]


def test_address_table_is_sent_once_while_tensors_stay_in_place():
    group, [grads, others] = Group(rows(), BLOCK), rows()
    first = group.on_device(grads)
    assert all(a is b for a, b in zip(group.on_device(grads), first, strict=True))
    second = group.on_device(others)
    assert second[0] is first[0] and second[2] is first[2]
    assert second[1].tolist() == addresses(others)
    # A launch that has not run yet keeps what it was given.
    assert first[1].tolist() == addresses(grads)


@pytest.mark.parametrize("row", [0, 1])
def test_address_table_is_sent_again_after_tensor_moves(row):
    both, [grads] = rows(), rows(1)
    group = Group(both, BLOCK)
    group.on_device(grads)
    both[row][2].data = torch.zeros(17)
    table, _, owners = group.on_device(grads)
    assert table.view(4, 4)[2:].tolist() == list(map(addresses, both))
    assert owners.tolist() == [0, 2, 2, 2, 3]


@pytest.mark.parametrize("data", [torch.zeros(34)[::2], torch.zeros(16)])
def test_strided_or_resized_tensor_has_no_address_table(data):
    both, [grads] = rows(), rows(1)
    group = Group(both, BLOCK)
    group.on_device(grads)
    whole = both[1][2].data
    both[1][2].data = data
    assert group.on_device(grads) is None
    assert group.on_device(grads) is None
    both[1][2].data = whole
    assert group.on_device(grads) is not None


def test_recorded_graph_receives_separate_numbers():
    numbers = Numbers(torch.device("cpu"))
    eager, _ = numbers.on_device([3, 4], stream=0)
    recorded, is_new = numbers.on_device([3, 4], stream=None)
    assert is_new and recorded is not eager and recorded.tolist() == [3, 4]
    # Neither is what it records known to later steps.
    numbers.on_device([5, 6], stream=None)
    same, is_new = numbers.on_device([3, 4], stream=0)
    assert same is eager and not is_new


def test_recorded_graph_receives_separate_address_tables(monkeypatch):
    group, [grads] = Group(rows(), BLOCK), rows(1)
    eager = group.on_device(grads)
    with monkeypatch.context() as patch:
        patch.setattr(torch_addresses, "stream_of", lambda device: None)
        recorded = group.on_device(grads)
    for ours, theirs in zip(recorded, eager, strict=True):
        assert ours is not theirs and torch.equal(ours, theirs)
    assert all(a is b for a, b in zip(group.on_device(grads), eager, strict=True))


def test_each_stream_receives_separate_numbers():
    numbers = Numbers(torch.device("cpu"))
    one, _ = numbers.on_device([3, 4], stream=1)
    other, is_new = numbers.on_device([3, 4], stream=2)
    assert is_new and other is not one


def test_addresses_are_sent_exactly_as_int64():
    address = 2**47 - 1
    sent, _ = Numbers(torch.device("cpu")).on_device([address], stream=0)
    assert sent.dtype == torch.int64 and sent.tolist() == [address]
