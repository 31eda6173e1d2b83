"""The numbers of 16-bit weights on an accelerator, which a CPU is taken for here.

The references are the formulas of `_backend/masters.py`. The rules compute nothing, so
that no other rounding is in the way.
"""

import keras
import numpy as np
import pytest

from keras_lso import LossScaleOptimizer
from keras_lso._keras_internals import rules

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow compile a step", allow_module_level=True)

import torch  # noqa: E402

from keras_lso._backend.masters import KINDS  # noqa: E402
from keras_lso._backend.torch import in_step as torch_in_step  # noqa: E402
from testing.beside_keras import bits, take  # noqa: E402
from testing.triton_steps import (  # noqa: E402
    EDGES,
    SPECIAL,
    WEIGHTS,
    State,
    assert_same_bits,
    expected_of,
    make,
    number,
    raw,
    step,
    tensors,
)

OTHER_KINDS = [w for w in WEIGHTS if w[1] in ("remainder", "stochastic")]
of_each_kind = pytest.mark.parametrize("low, kind", OTHER_KINDS)
RULES = {"as it is": rules.SGD(number(0.0)), "overwrite": rules.Overwrite()}
of_each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
# Several small tensors, and one that has a chunk to itself.
SHAPES = [(0,), (), (7,), (64, 5), (3, 200), (500,)]


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    take("accelerator", monkeypatch)


def assert_same(state, expected):
    """Bit for bit, but for remainders of NaNs, which make NaNs whatever they are."""
    for one in (state, expected):
        for weight, kept in zip(one.weights, one.kept, strict=True):
            if kept is not None:
                kept[weight.isnan()] = 0
    assert_same_bits(state, expected)


def gradients(shapes):
    grads = tensors(9, shapes=shapes)
    for g in grads:
        if g.numel() >= len(SPECIAL):
            g.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return grads


@of_each_rule
@of_each_kind
def test_step_keeps_same_bits_as_master_formulas(low, kind, rule):
    for shapes in (SHAPES, [(300,)]):
        state, grads = make(rule, low, kind, shapes), gradients(shapes)
        if isinstance(rule, rules.SGD):
            grads = [g.nan_to_num(1.0, 1.0, 1.0) for g in grads]
        expected = expected_of(rule, state, grads, 1.0)
        step(rule, state, grads, inv_scale=1.0)
        assert_same(state, expected)


@of_each_rule
@of_each_kind
def test_skipped_step_changes_no_bit(low, kind, rule):
    for shapes in (SHAPES, [(300,)]):
        state, grads = make(rule, low, kind, shapes), gradients(shapes)
        state.weights[-2 % len(shapes)].view(torch.int16).view(-1)[-9:] = 0x7F81
        before = raw(state.tensors)
        step(rule, state, grads, finite=False, inv_scale=1.0)
        assert raw(state.tensors) == before


@of_each_kind
@pytest.mark.parametrize("lower", [0, 1, 0x1000, 0x1234, 0x7FFF, 0x8000, 0xFFFF])
def test_numbers_of_every_upper_half_split_like_formula(lower, low, kind):
    upper = np.arange(2**16, dtype=np.uint32) << 16
    numbers = torch.tensor((upper | np.uint32(lower)).view(np.float32))
    state = make(RULES["overwrite"], low, kind, [tuple(numbers.shape)] * 4)
    state = State(state.kept[:1], [()], state.weights[:1], kind)
    expected = expected_of(RULES["overwrite"], state, [numbers], 1.0)
    step(RULES["overwrite"], state, [numbers], inv_scale=1.0)
    assert_same(state, expected)


@pytest.mark.parametrize("remainder", [*EDGES, 12345, -54])
@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_weights_of_all_bit_patterns_join_like_formula(low, remainder):
    weights = torch.arange(2**16).to(torch.int16).view(getattr(torch, low))
    kept = torch.full_like(weights, remainder, dtype=torch.int16)
    state, grads = State([kept], [()], [weights], "remainder"), [torch.ones(2**16)]
    expected = expected_of(RULES["as it is"], state, grads, 1.0)
    step(RULES["as it is"], state, grads, inv_scale=1.0)
    assert_same(state, expected)


# --- Zeros that were assigned ---------------------------------------------------------


def trained(steps=3):
    """An optimizer of bfloat16 weights, half of which have negative remainders."""
    variable = keras.Variable(np.ones(64), dtype="bfloat16")
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=4.0, master_weights="remainder"
    )
    optimizer.build([variable])
    for _ in range(steps):
        descend(optimizer, variable, np.where(np.arange(64) % 2, 1e-3, -2e-3))
    [low] = optimizer._masters.variables
    assert (low.value < 0).any() and (low.value > 0).any()
    return optimizer, variable


def descend(optimizer, variable, gradient):
    grads = [torch.tensor(4.0 * gradient, dtype=torch.float32)]
    optimizer.apply(grads, [variable], update_scale=False)


def pairs_of(optimizer):
    return [(n.kept.value, n.weight.value) for n in optimizer._masters._found]


def test_weight_assigned_zero_restarts_at_zero():
    optimizer, variable = trained()
    assert torch_in_step.are_known(pairs_of(optimizer))
    variable.assign(np.zeros(64))
    assert not torch_in_step.are_known(pairs_of(optimizer))
    [narrow] = optimizer._masters._found
    [low] = optimizer._masters.variables
    is_negative = (low.value < 0).clone()
    descend(optimizer, variable, np.full(64, 0.5))
    assert (variable.value == -0.5).all()
    assert (low.value[is_negative] == 0).all()


def test_steps_check_for_assigned_zeros_until_step_is_applied():
    optimizer, variable = trained()
    [low] = optimizer._masters.variables
    variable.assign(np.zeros(64))
    before = bits([variable, low])
    # A skipped step leaves them, and the next one still has to look.
    descend(optimizer, variable, np.full(64, np.inf))
    assert bits([variable, low]) == before
    descend(optimizer, variable, np.full(64, 0.5))
    assert (variable.value == -0.5).all()
    assert torch_in_step.are_known(pairs_of(optimizer))


def test_strided_weights_are_written_without_changing_gaps():
    wide = torch.zeros(64, dtype=torch.bfloat16)
    for kind in ("remainder", "stochastic"):
        wide.copy_(torch.arange(64))
        variable = keras.Variable(torch.nn.Parameter(wide[::2]), dtype="bfloat16")
        optimizer = LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=4.0, master_weights=kind
        )
        optimizer.build([variable])
        assert not variable.value.is_contiguous()
        for gradient in (1.0, np.inf, 1.0):
            descend(optimizer, variable, np.full(32, gradient))
        assert (wide[::2] == torch.arange(-2, 62, 2)).all()
        assert (wide[1::2] == torch.arange(1, 64, 2)).all()


def test_torch_numbers_has_class_for_each_master_kind():
    from keras_lso._backend.torch import masters as torch_masters

    assert set(torch_masters.NUMBERS) == set(map(type, KINDS.values()))
