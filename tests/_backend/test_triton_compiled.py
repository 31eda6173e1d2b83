"""What the kernels in Triton move, counted in their programs.

Triton compiles them for an H100 or H200, without a GPU, to the program that its driver
would load. `make test-triton` runs this, in an environment with Triton.
"""

import os
import re
from types import SimpleNamespace

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow compile a step", allow_module_level=True)
pytest.importorskip("triton", reason="`make test-triton` installs Triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from benchmarks.accelerators.triton_program import (  # noqa: E402
    HOPPER,
    bytes_of_blocks,
    compiled,
)
from keras_lso._backend import masters
from keras_lso._backend.rule import TrustRatio
from keras_lso._backend.torch.triton import steps as torch_triton
from keras_lso._backend.torch.triton import trial as torch_triton_trial
from keras_lso._keras_internals import rules
from keras_lso.optimizers.lars import LARSRule
from testing.triton_trials import WEIGHTS

kernels = torch_triton.import_kernels()

POINTER = "*fp32"
TABLES = {"table": "*i64", "gradients": "*i64", "owners": "*i64", "count": "i32"}
SCALARS = {"found_inf": POINTER, "inv_scale": POINTER}
RATES = {"alpha": POINTER, "rate_1": "fp32", "rate_2": "fp32", "epsilon": "fp32"}
CASES = {
    "SGD": ("sgd", {"learning_rate": POINTER}, {"decay": None}),
    "momentum": (
        "momentum",
        {"learning_rate": POINTER, "momentum": "fp32"},
        {"decay": None, "NESTEROV": False},
    ),
    "nesterov and decay": (
        "momentum",
        {"learning_rate": POINTER, "momentum": "fp32", "decay": POINTER},
        {"NESTEROV": True},
    ),
    "Adam": ("adam", RATES, {"decay": None}),
    "AdamW": ("adam", {**RATES, "decay": POINTER}, {}),
    "LARS, norms": ("lars_squares", {"squares": POINTER, "weight_decay": "fp32"}, {}),
    "LARS": (
        "lars",
        {"rates": POINTER, "momentum": "fp32", "weight_decay": "fp32"},
        {"NESTEROV": False},
    ),
}
# Bytes for each parameter of a float32 gradient: it is read, and the weight and each
# slot are read and written.
BYTES = {
    "SGD": 4 + 8,
    "momentum": 4 + 16,
    "nesterov and decay": 4 + 16,
    "Adam": 4 + 24,
    "AdamW": 4 + 24,
    "LARS, norms": 4 + 4,
    "LARS": 4 + 16,
}
# How often the weights, and what is kept with them, are read and written.
ACCESSES = dict.fromkeys(BYTES, 2) | {"LARS, norms": 1}
# What is more, or less, in each of these, if the weights have 16 bits.
KINDS = {"float32": 2, "remainder": 0, "stochastic": -2}
of_each_kind = pytest.mark.parametrize("kind", KINDS)
of_each_low = pytest.mark.parametrize("low", [tl.float16, tl.bfloat16], ids=str)
of_each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def program(case, gradient, weight=tl.float32, kind=None):
    """The PTX of a kernel that is given gradients, a string."""
    name, types, constants = CASES[case]
    constants = {**constants, "GRADIENT": gradient, "WEIGHT": weight, "KIND": kind}
    types = {**TABLES, **SCALARS, **types}
    if kind == "stochastic" and name != "lars_squares":
        types["iterations"] = "*i32"
    elif name != "lars_squares":
        constants["iterations"] = None
    return compiled(name, types, {**constants, "N": kernels.BLOCK})


@of_each_case
def test_kernel_reads_gradient_and_passes_once_over_state(case):
    assert bytes_of_blocks(program(case, tl.float32)) == (BYTES[case], BYTES[case])


@of_each_kind
@of_each_case
def test_threads_of_whole_blocks_exchange_no_elements(case, kind):
    if case == "LARS, norms":
        pytest.skip("sums are exchanged")
    ptx = program(case, tl.float16, tl.float16, kind)
    # Only whole blocks have 16 bytes a thread, and they come first.
    whole = ptx[ptx.index("ld.global.v") : ptx.rindex("st.global.v")]
    assert "st.global.v" in ptx and "shared" not in whole


@of_each_low
@of_each_kind
@of_each_case
def test_kernels_of_16_bit_weights_move_expected_bytes(case, kind, low):
    # The gradient is two bytes shorter.
    expected = BYTES[case] - 2 + ACCESSES[case] * KINDS[kind]
    assert bytes_of_blocks(program(case, low, low, kind)) == (expected, expected)


def test_remainder_masters_move_28_bytes_with_adam_and_20_with_momentum():
    """With the two bytes by which a gradient is checked."""
    for case, moved in {"Adam": 28, "momentum": 20}.items():
        ptx = program(case, tl.bfloat16, tl.bfloat16, "remainder")
        assert bytes_of_blocks(ptx) == (moved - 2, moved - 2)


FLOOR = "cvt.rmi.ftz.f32.f32"


@of_each_low
@of_each_kind
@of_each_case
def test_kernel_operations_round_as_in_ieee_754(case, kind, low):
    ptx = program(case, tl.float16, low, kind)
    # `floor` takes a number below the normal range for 0, and gets none.
    inexact = re.search(r"\bfma\.|\.ftz|\.approx|div\.full", ptx.replace(FLOOR, ""))
    assert not inexact
    if case != "LARS, norms":
        assert re.search(rf"cvt\.rn\.{'bf16' if low == tl.bfloat16 else 'f16'}", ptx)
    if "Adam" in case:
        assert "sqrt.rn.f32" in ptx and "div.rn.f32" in ptx


def test_norm_kernel_sums_blocks_without_atomics():
    pointers = {"table": "*i64", "squares": POINTER, "norms": POINTER}
    ptx = compiled(
        "lars_norms",
        {**pointers, "count": "i32", "blocks": "i32"},
        {"SUMMED": kernels.SUMMED, "N": kernels.BLOCK},
    )
    # In the order of the blocks, whichever of them is done first.
    assert not re.search(r"\b(atom|red)\.", ptx)
    assert "sqrt.rn.f32" in ptx


IS_NOT_1 = re.compile(r"setp\.neu\.f32\s+(%p\d+), %r\d+, 0f3F800000;")


@of_each_kind
@of_each_case
def test_skipped_step_reads_only_flag_and_returns(case, kind):
    ptx = program(case, tl.float32, tl.bfloat16, kind)
    found = IS_NOT_1.search(ptx)
    assert ptx[: found.start()].count("ld.global") == 1
    is_not_1 = re.escape(found[1])
    # Triton 3.7 branches to the step, 3.9 around it.
    branch = re.match(
        rf"\s*@{is_not_1} bra\s+\S+;\s*bra\.uni\s+(?P<end>\S+);"
        rf"|\s*@!{is_not_1} bra\s+(?P<around>\S+);",
        ptx[found.end() :],
    )
    _, _, skipped = ptx.partition(f"{branch['end'] or branch['around']}:")
    assert "global" not in skipped[: skipped.index("ret;")]


def test_values_and_addresses_do_not_recompile_kernel():
    """What Triton knows a compiled program by, as it finds it at a launch."""
    kernel = kernels.momentum
    bind = create_function_from_signature(
        kernel.signature, kernel.params, CUDABackend(HOPPER)
    )
    numbers, scalars = torch.zeros(9, dtype=torch.int64), torch.zeros(9)
    given = dict.fromkeys(["table", "gradients", "owners"], numbers)
    given |= {"count": 7, "found_inf": scalars[0], "inv_scale": scalars[1]}
    given |= {"learning_rate": scalars[2], "decay": None, "momentum": 0.9}
    given |= {"NESTEROV": False, "GRADIENT": tl.float16, "N": 1024}
    given |= {"WEIGHT": tl.float16, "KIND": "stochastic"}
    given["iterations"] = torch.zeros(9, dtype=torch.int32)[0]
    program = bind(**given)[1]
    for other in (
        {"count": 1},
        {"count": 16},
        {"count": 2**31 - 1},
        {"momentum": 0.0},
        {"momentum": 1.0},
        {"table": numbers[1:]},
        {"inv_scale": scalars[4]},
        {"iterations": torch.zeros(9, dtype=torch.int32)[1]},
    ):
        assert bind(**{**given, **other})[1] == program
    assert bind(**{**given, "decay": scalars[3]})[1] != program


# --- What a trial runs ----------------------------------------------------------------


class Recorder:
    """A kernel that is not launched: it notes which program would have been."""

    def __init__(self, kernel, programs):
        self._name, self._programs = kernel.fn.__name__, programs
        self._bind = create_function_from_signature(
            kernel.signature, kernel.params, CUDABackend(HOPPER)
        )

    def __getitem__(self, grid):
        return self._note

    def _note(self, *args, **given):
        _, program, options = self._bind(*args, **given)
        self._programs.append((self._name, str(program), str(options)))


@pytest.fixture
def programs(monkeypatch):
    """A list that gets the programs that are launched."""
    found = []
    made = {
        name: Recorder(value, found) if isinstance(value, triton.JITFunction) else value
        for name, value in vars(kernels).items()
    }
    monkeypatch.setattr(torch_triton, "kernels", lambda: SimpleNamespace(**made))
    monkeypatch.setattr(torch_triton_trial, "_verdicts", {})
    return found


def number(value):
    return torch.tensor(value, dtype=torch.float32)


RATIO = TrustRatio(0.001, upper=1.0)
RULES = {
    "SGD": rules.SGD(number(1e-3)),
    "momentum 1": rules.Momentum(number(1e-3), 1),
    "momentum 0, decay": rules.Momentum(number(1e-3), 0.0, decay=number(1e-5)),
    "nesterov": rules.Momentum(number(1e-3), 0.9, nesterov=1),
    "Adam": rules.Adam(number(1e-3), 0.9, 0.999, 1e-7),
    "AdamW": rules.Adam(number(1e-3), 0.0, 1.0, 1, decay=number(1e-5)),
    "LARS": LARSRule(number(9.0), 0.9, 5e-5, RATIO),
    "LARS, no decay": LARSRule(number(9.0), 1, 0, RATIO, nesterov=True),
    "LARS, paper": LARSRule(number(9.0), 0.9, 1, TrustRatio(0.001, paper=True)),
    "LARS, excluded": LARSRule(number(9.0), 0.9, 5e-5, None),
}


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_step_runs_same_programs_as_its_trial(rule, dtype, weights, programs):
    sample = torch_triton_trial.sample_of(rule)
    variant = torch_triton_trial.Variant(sample, dtype, *weights)
    # What is not launched changes nothing, and so it fails.
    with pytest.warns(UserWarning, match="after a step"):
        torch_triton_trial.passes(
            variant, torch.device("cpu"), torch_triton._step_by_itself, kernels.BLOCK
        )
    tried = set(programs)
    assert tried
    for count, size in ((1, 1), (16, 16), (100, 5000)):
        programs.clear()
        places = [slice(i * size, (i + 1) * size) for i in range(count)]
        dtypes = [dtype, weights[0], *[torch.float32] * len(rule.slots)]
        if variant.keeps:
            dtypes.append(getattr(torch, masters.KINDS[variant.kind].kept))
        rows = [torch.ones(count * size, dtype=d) for d in dtypes]
        chunk, grads = torch_triton_trial._chunk(variant, rows, places)
        inv_scale = 1.0 if count == 1 else number(0.5)
        arguments = grads, inv_scale, None, torch.tensor(3)
        assert torch_triton._step_by_itself(chunk, rule, *arguments)
        assert set(programs) == tried
