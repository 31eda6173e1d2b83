"""The flat memory of what an optimizer owns, for its compiled steps on PyTorch."""

import keras
import numpy as np
import pytest

import keras_lso
from testing.harness import bits, take

if keras.backend.backend() != "torch":
    pytest.skip("Only PyTorch gathers tensors", allow_module_level=True)

import torch

from keras_lso._backend.torch import compiled, flat, masters

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")

SHAPES = [(30, 7), (0, 3), (5,), (), (1,), (64, 33), (33, 128)]


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch):
    """Runs the function that Inductor would compile, operation by operation."""
    monkeypatch.setattr(compiled, "IS_ON", True)
    monkeypatch.setattr(compiled, "_has_failed", False)
    monkeypatch.setattr(compiled, "_compiled", lambda in_blocks: compiled._step)


class Training:
    """Adam with remainders and moments in bfloat16, and random gradients."""

    def __init__(self):
        self.random = np.random.default_rng(0)
        self.variables = [
            keras.Variable(self.random.normal(size=s), dtype="bfloat16") for s in SHAPES
        ]
        self.optimizer = keras_lso.GuardedOptimizer(
            keras.optimizers.Adam(0.01),
            master_weights="remainder",
            slot_dtype="bfloat16",
        )
        self.optimizer.build(self.variables)

    def step(self, without=(), factor=1.0):
        """Takes a step in which some variables have no gradient."""
        grads = []
        for i, shape in enumerate(SHAPES):
            values = np.asarray(self.random.normal(size=shape) * factor)
            grad = torch.from_numpy(values).bfloat16()
            grads.append(None if i in without else grad)
        self.optimizer.apply(grads, self.variables)

    @property
    def columns(self):
        """The tensors that belong to the optimizer."""
        inner = self.optimizer.inner_optimizer
        remainders = [v for v in self.optimizer.variables if v.dtype == "int16"]
        columns = [inner._momentums, inner._velocities, remainders]
        return [[v.value for v in column] for column in columns]

    @property
    def state(self):
        return bits([*self.variables, *self.optimizer.variables])


def addresses(training):
    return [[t.data_ptr() for t in column] for column in training.columns]


def is_flat(column):
    return flat.view_of(column) is not None


def test_first_step_moves_columns_into_flat_memory_once():
    training = Training()
    tensors, version = training.columns, training.columns[0][0]._version
    weights = [v.value.data_ptr() for v in training.variables]
    assert not any(map(is_flat, tensors))
    training.step()
    assert all(map(is_flat, tensors))
    # The same objects, which autograd sees as written.
    for column, before in zip(training.columns, tensors, strict=True):
        assert all(t is b for t, b in zip(column, before, strict=True))
    assert [tuple(t.shape) for t in training.columns[0]] == SHAPES
    assert tensors[0][0]._version > version
    assert [v.value.data_ptr() for v in training.variables] == weights
    moved = addresses(training)
    training.step()
    training.step(without=[0, 2])
    assert addresses(training) == moved


def test_flat_column_is_neither_gathered_nor_copied_back(monkeypatch):
    # On the host a remainder is copied, since no vector of the CPU holds int16.
    take("accelerator", monkeypatch)
    training = Training()
    training.step()
    copied: list = []
    gather, copy_back = flat.gathered, torch._foreach_copy_
    monkeypatch.setattr(compiled, "gathered", lambda t: copied.append(t) or gather(t))
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda t, new: copied.append(t) or copy_back(t, new)
    )
    training.step()
    weights = [v.value for v in training.variables]
    assert len(copied) == 2
    assert all(t[0] is weights[0] for t in copied)


def several_sets(training):
    """Steps of other sets of variables, and what changes state from outside."""
    training.step(without=[2, 3])
    training.step()
    training.step(without=[0])
    training.step(factor=np.inf)  # An overflow.
    training.variables[0].assign(training.variables[0] + 1.0)
    training.step()
    saved: dict = {}
    training.optimizer.save_own_variables(saved)
    saved = {k: keras.ops.convert_to_numpy(v).copy() for k, v in saved.items()}
    training.step()
    training.optimizer.load_own_variables(saved)
    training.step()
    with torch.inference_mode():
        training.step()
    # Memory that somebody else has replaced.
    for tensor in training.columns[0][::2]:
        tensor.data = tensor.data.clone()
    training.step()
    return training.state


@pytest.mark.parametrize("first", [(), (4,), (1, 2, 3, 4, 5)])
def test_state_equals_that_of_tensors_in_memory_of_their_own(first, way, monkeypatch):
    training, theirs = Training(), Training()
    training.step(without=first)
    ours = several_sets(training)
    monkeypatch.setattr(flat, "_can_move", lambda tensor: False)
    theirs.step(without=first)
    assert not any(map(is_flat, theirs.columns))
    assert several_sets(theirs) == ours


def test_tensors_that_got_memory_of_their_own_move_again():
    training, other = Training(), Training()
    for each in (training, other):
        each.step()
    for column in training.columns:
        for tensor in column:
            tensor.data = tensor.data.clone()
    assert not any(map(is_flat, training.columns))
    for each in (training, other):
        each.step()
    assert all(map(is_flat, training.columns))
    assert training.state == other.state


def test_larger_set_does_not_take_tensors_that_have_moved():
    # A recorded graph may write to them.
    training = Training()
    training.step(without=[0])
    moved = addresses(training)
    training.step()
    assert addresses(training) == moved


def test_recorded_step_moves_nothing_and_no_later_step_does(monkeypatch):
    training = Training()
    before = addresses(training)
    with monkeypatch.context() as recording:
        recording.setattr(flat, "is_recorded", lambda: True)
        training.step(without=[0, 2, 3, 4])
    training.step()
    assert addresses(training) == before


def test_first_step_in_inference_mode_leaves_state_writable():
    training = Training()
    with torch.inference_mode():
        training.step()
    assert all(map(is_flat, training.columns))
    for column in training.columns:
        assert not any(t.is_inference() for t in column)
        column[0].add_(1)


def test_memory_shared_between_processes_stays():
    training = Training()
    shared = training.columns[0]
    for tensor in shared:
        tensor.share_memory_()
    training.step()
    assert not is_flat(shared)
    assert all(map(is_flat, training.columns[1:]))


def test_results_of_stateless_step_have_memory_of_their_own():
    training = Training()
    state = [v.value.detach().clone() for v in training.optimizer.variables]
    weights = [v.value.detach().clone() for v in training.variables]
    _, new = training.optimizer.stateless_apply(
        state, list(map(torch.ones_like, weights)), weights
    )
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in new)


def test_neighbours_in_memory_of_their_own_are_not_flat():
    memory = np.zeros(8, np.float32)
    tensors = [torch.from_numpy(memory[:3]), torch.from_numpy(memory[3:])]
    assert tensors[0].data_ptr() + 12 == tensors[1].data_ptr()
    assert not is_flat(tensors)


def test_flat_view_follows_order_and_layout():
    memory = torch.arange(24.0)
    first, second = memory[4:10].view(2, 3), memory[10:14]
    view = flat.view_of([first, torch.empty(0, 3), second])
    assert view.tolist() == list(range(4, 14))
    view.zero_()
    assert first.count_nonzero() == 0 and memory[14] == 14.0
    assert not is_flat([second, first])
    assert not is_flat([first, memory[11:14]])
    assert not is_flat([first, memory[9:14]])
    assert not is_flat([memory[4:10].view(3, 2).T, second])
    # Not where vectors of 16 bytes begin.
    assert not is_flat([memory[5:10], second])


def test_step_of_one_tensor_in_the_middle_of_flat_memory_writes_it(way, monkeypatch):
    training, theirs = Training(), Training()
    training.step()
    with monkeypatch.context() as alone:
        alone.setattr(flat, "_can_move", lambda tensor: False)
        theirs.step()
        theirs.step(without=[0, 1, 2, 3, 4])
    assert any(c[-1].data_ptr() % 16 for c in training.columns)
    training.step(without=[0, 1, 2, 3, 4])
    assert training.state == theirs.state


@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:1], [(0,), (3,), (0,), (4,)]])
def test_kernel_looks_up_keys_of_elements(shapes):
    tensors = [torch.zeros(s) for s in shapes]
    random_bits = masters.RandomBits(list(range(len(shapes))), tensors, tensors)
    step = torch.tensor(7)
    for offset in (0, 2**24):
        expected = random_bits.keys(step, offset, [None] * len(shapes))
        like = torch.empty(len(expected))
        keys = masters.keys_in_kernel(random_bits.table, step, offset, like)
        assert torch.equal(keys, expected)
        assert len(set(expected.tolist())) == sum(t.numel() > 0 for t in tensors)
