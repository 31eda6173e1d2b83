"""Masters of float16 variables on an accelerator, where the versions of tensors tell.

The steps run on a CPU as they do there. The reference is a step on a CPU as it is,
which compares each master with its variable every time.
"""

import contextlib

import keras
import numpy as np
import pytest

from keras_lso import LossScaleOptimizer
from keras_lso._backend import backend
from keras_lso._backend.codecs import CODECS
from keras_lso._backend.framework import Framework

if keras.backend.backend() != "torch":
    pytest.skip(
        "JAX and TensorFlow compare each master with its variable at every step",
        allow_module_level=True,
    )

torch = pytest.importorskip("torch")

from keras_lso._backend.torch import masters as torch_masters  # noqa: E402
from testing import harness  # noqa: E402

SCALE = 4.0
SPECIAL = [0.0, -0.0, 1.0, 1e-9, 65504.0, 65519.0, 65520.0, 7e4]
SPECIAL += [np.inf, -np.inf, np.nan]


@pytest.fixture
def accelerator(monkeypatch):
    """A step runs as on an accelerator."""
    harness.take("accelerator", monkeypatch)


@pytest.fixture
def comparisons(monkeypatch):
    """A list with an item for each time that masters were compared."""
    calls = []
    compare = torch_masters._resynchronise_all

    def counting(framework, masters, weights):
        calls.append(len(weights))
        compare(framework, masters, weights)

    monkeypatch.setattr(torch_masters, "_resynchronise_all", counting)
    return calls


def make(values, dtype="float16", inner=None):
    variables = [keras.Variable(torch.tensor(v), dtype=dtype) for v in values]
    inner = inner or keras.optimizers.SGD(0.5)
    optimizer = LossScaleOptimizer(inner, initial_scale=SCALE, master_weights=True)
    optimizer.build(variables)
    return optimizer, variables


def step(optimizer, variables, value=1.0):
    grads = [torch.full(tuple(v.shape), value * SCALE) for v in variables]
    # The same scale throughout.
    optimizer.apply(grads, variables, update_scale=False)


def bits(variables):
    return [v.value.detach().clone().contiguous().view(torch.uint8) for v in variables]


def assert_same_bits(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masters_round_and_resynchronize_like_reference(dtype):
    values = np.repeat(SPECIAL, len(SPECIAL))
    master = torch.tensor(values, dtype=torch.float32)
    with np.errstate(over="ignore"):
        low = torch.tensor(SPECIAL * len(SPECIAL)).to(getattr(torch, dtype))
    reference = Framework()
    expected = reference.rounded(master, dtype)
    assert torch.equal(
        backend.rounded(master, dtype).view(torch.int16), expected.view(torch.int16)
    )
    of_float32 = CODECS["float32"].decode
    assert torch.equal(
        of_float32(backend, low, master).view(torch.int32),
        of_float32(reference, low, master).view(torch.int32),
    )


def test_masters_are_compared_only_in_first_step(accelerator, comparisons):
    optimizer, variables = make([[1.0, 2.0], [3.0]])
    for _ in range(3):
        step(optimizer, variables)
    # A skipped step changes nothing.
    step(optimizer, variables, np.inf)
    step(optimizer, variables)
    assert comparisons == [2]
    np.testing.assert_array_equal(variables[0].value.detach(), [-1.0, 0.0])


def assign(optimizer, variable):
    variable.assign([5.0, 2.0])


def load_state(optimizer, variable):
    layer = torch.nn.Module()
    layer.weight = variable.value
    layer.load_state_dict({"weight": torch.tensor([5.0, 2.0])})


def assign_data(optimizer, variable):
    variable.value.data = torch.tensor([5.0, 2.0], dtype=torch.float16)


def write_through_a_view(optimizer, variable):
    with torch.no_grad():
        variable.value.view(1, 2)[0, 0] = 5.0


def write_in_inference_mode(optimizer, variable):
    with torch.inference_mode():
        variable.value.copy_(torch.tensor([5.0, 2.0]))


def replace_the_tensor(optimizer, variable):
    variable._value = torch.nn.Parameter(torch.tensor([5.0, 2.0], dtype=torch.float16))


def load_masters(optimizer, variable):
    optimizer._masters.variables[0].assign([5.0, 2.0])
    variable.assign([5.0, 2.0])


def train_with_another_optimizer(optimizer, variable):
    other, _ = make([[0.0]])
    other = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=SCALE)
    other.apply([torch.tensor([-8.0, 0.0]) * SCALE], [variable], update_scale=False)


@pytest.mark.parametrize(
    "write",
    [
        assign,
        load_state,
        assign_data,
        write_through_a_view,
        write_in_inference_mode,
        replace_the_tensor,
        load_masters,
        train_with_another_optimizer,
    ],
)
def test_master_restarts_after_any_write_to_its_variable(accelerator, write):
    optimizer, [variable] = make([[2.0, 3.0]])
    for _ in range(2):
        step(optimizer, [variable])
    write(optimizer, variable)
    expected = variable.value.detach().float() - 0.5
    assert expected[0] == 4.5
    step(optimizer, [variable])
    assert torch.equal(variable.value.detach().float(), expected)
    [master] = optimizer._masters.variables
    assert torch.equal(master.value.detach(), expected)


def test_master_assigned_alone_restarts_from_its_variable(accelerator):
    optimizer, [variable] = make([[2.0, 3.0]])
    for _ in range(2):
        step(optimizer, [variable])
    optimizer._masters.variables[0].assign([50.0, 2.0])
    step(optimizer, [variable])
    np.testing.assert_array_equal(variable.value.detach(), [0.5, 1.5])


@pytest.mark.parametrize("offset", range(4))
def test_weight_anywhere_in_flat_buffer_has_its_master(offset):
    """As in those that distributed training makes."""
    optimizer, [variable] = make([[2.0, 3.0, 4.0, 5.0]])
    weight = torch.zeros(8, dtype=torch.float16)[offset : offset + 4]
    variable.value.data = weight.copy_(variable.value.data)
    step(optimizer, [variable])
    weight[0] = 5.0
    step(optimizer, [variable])
    assert weight.tolist() == [4.5, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_skipped_step_changes_no_bit_of_special_values(accelerator, dtype):
    optimizer, variables = make([SPECIAL, [1.0]], dtype)
    step(optimizer, variables, 0.0)
    step(optimizer, variables, 0.0)
    for assigned in (None, SPECIAL, SPECIAL[::-1]):
        if assigned:
            variables[0].assign(assigned)
        before = bits(variables)
        step(optimizer, variables, np.nan)
        assert_same_bits(bits(variables), before)
        # A master whose weight was assigned starts from there, in a skipped step too.
        masters = bits(optimizer._masters.variables)
        step(optimizer, variables, np.nan)
        assert_same_bits(bits(optimizer._masters.variables), masters)


def test_masters_are_compared_again_once_assigned(accelerator, comparisons):
    optimizer, variables = make([[1.0, 2.0]])
    step(optimizer, variables, np.inf)
    variables[0].assign([5.0, 2.0])
    for _ in range(2):
        step(optimizer, variables, np.inf)
    for _ in range(3):
        step(optimizer, variables)
    assert comparisons == [1] * 2
    np.testing.assert_array_equal(variables[0].value.detach(), [3.5, 0.5])


def test_masters_are_compared_in_steps_recorded_by_graph(
    accelerator, comparisons, monkeypatch
):
    optimizer, variables = make([[1.0, 2.0]])
    for _ in range(2):
        step(optimizer, variables)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(2):
            step(optimizer, variables)
    # Nor is what it leaves known: it has not run, but will.
    step(optimizer, variables)
    assert comparisons == [1] * 4


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_random_sequence_of_steps_and_assignments_matches_cpu(monkeypatch, dtype, seed):
    """Steps, overflows and assignments of variables and masters, in any order.

    All numbers are multiples of 1/256 below 2**16, which float32 has exactly.
    """
    random = np.random.default_rng(seed)
    values = [random.integers(-8, 8, size=n).astype("float32") for n in (4, 3, 1)]
    runs = [make(values, dtype, keras.optimizers.SGD(0.5)) for _ in range(2)]
    for _ in range(12):
        event = random.choice(["step", "step", "skip", "assign", "assign master"])
        i, values = random.integers(3), random.integers(-8, 8, size=(3, 4)) / 4
        for (optimizer, variables), is_accelerator in zip(
            runs, [True, False], strict=True
        ):
            size = variables[i].shape[0]
            if event == "assign":
                variables[i].assign(values[i, :size])
            elif event == "assign master":
                optimizer._masters.variables[i].assign(values[i, :size] + 1 / 8)
            else:
                grads = [
                    torch.tensor(v[: w.shape[0]] / 64 * SCALE, dtype=torch.float32)
                    for v, w in zip(values, variables, strict=True)
                ]
                if event == "skip":
                    grads[i][0] = np.inf
                with monkeypatch.context() as patch:
                    harness.take("accelerator" if is_accelerator else "host", patch)
                    optimizer.apply(grads, variables, update_scale=False)
        # A skipped step re-initialises masters on the accelerator, not on the CPU.
        states = [
            [*variables, *o._masters.variables] if event == "step" else variables
            for o, variables in runs
        ]
        for a, e in zip(*states, strict=True):
            assert torch.equal(a.value, e.value), event


@pytest.mark.parametrize("kind", ["float32", "remainder", "remainder8", "stochastic"])
def test_strided_variable_is_rounded_without_changing_gaps(kind, accelerator):
    wide = torch.tensor([1.0, 9.0, 2.0, 9.0], dtype=torch.float16)
    variable = keras.Variable(torch.nn.Parameter(wide[::2]), dtype="float16")
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=SCALE, master_weights=kind
    )
    optimizer.build([variable])
    assert not variable.value.is_contiguous()
    for value in (1.0, np.inf, 1.0):
        step(optimizer, [variable], value)
    np.testing.assert_array_equal(wide, [0.0, 9.0, 1.0, 9.0])


def take_steps(kind, make, transposed=False, mode=contextlib.nullcontext):
    """Returns the bits of bfloat16 weights and of what is kept with them."""
    random = np.random.default_rng(0)
    weights = []
    for shape in [(6, 5), (200, 120)]:
        value = torch.tensor(random.normal(size=shape)).to(torch.bfloat16)
        value = value.t().contiguous().t() if transposed else value
        weights.append(keras.Variable(torch.nn.Parameter(value)))
    assert weights[0].value.is_contiguous() is not transposed
    optimizer = LossScaleOptimizer(make(0.01), master_weights=kind)
    optimizer.build(weights)
    for step in range(4):
        grads = [torch.tensor(random.normal(size=w.shape)).float() for w in weights]
        with mode() if step == 2 else contextlib.nullcontext():
            optimizer.apply(grads, weights, scaled=False)
    return harness.bits([*weights, *optimizer._masters.variables])


of_each_kind = pytest.mark.parametrize(
    "kind", ["remainder", "remainder8", "stochastic"]
)
of_each_make = pytest.mark.parametrize(
    "make", [keras.optimizers.Adam, keras.optimizers.Adadelta]
)


@of_each_kind
@of_each_make
def test_transposed_weights_step_like_contiguous_weights(make, kind, way):
    assert take_steps(kind, make, transposed=True) == take_steps(kind, make)


@of_each_kind
@of_each_make
def test_step_in_inference_mode_is_bitwise_equal_to_ordinary_step(make, kind):
    found = take_steps(kind, make, mode=torch.inference_mode)
    assert found == take_steps(kind, make)
