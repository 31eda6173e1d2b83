"""Steps with 16-bit numbers as one function that Inductor compiles."""

import shutil
import warnings

import keras
import numpy as np
import pytest

import keras_lso
from testing.harness import WAYS, take
from testing.masters import OTHER_CODECS
from testing.optimizers import OPTIMIZERS, rule_of

if keras.backend.backend() != "torch":
    pytest.skip("Only PyTorch compiles them", allow_module_level=True)

import torch

from keras_lso._backend import codecs
from keras_lso._backend.torch import compiled

SHAPES = (300, 7), (2**18 + 3,), (), (0, 3), (70, 64)
needs_compiler = pytest.mark.skipif(
    not shutil.which("g++"), reason="Inductor needs a compiler"
)


def trained(make, dtype, kind, slots, monkeypatch, is_on):
    """Returns the state after five steps, one of them skipped, as float32 arrays."""
    monkeypatch.setattr(compiled, "IS_ON", is_on)
    random = np.random.default_rng(0)
    variables = [keras.Variable(random.normal(size=s), dtype=dtype) for s in SHAPES]
    optimizer = keras_lso.LossScaleOptimizer(
        make(0.01), initial_scale=8.0, master_weights=kind, slot_dtype=slots
    )
    optimizer.build(variables)
    for step in range(5):
        grads = [torch.from_numpy(random.normal(size=s)).float() for s in SHAPES]
        if step == 2:
            grads[0][0] = torch.inf
            before = bits([*variables, *optimizer.inner_optimizer.variables])
        grads = [g.to(variables[0].value.dtype) for g in grads]
        optimizer.apply(grads, variables, scaled=True)
        if step == 2:
            assert bits([*variables, *optimizer.inner_optimizer.variables]) == before
    assert int(optimizer.skipped_steps) == 1
    # The numbers of weights, not their parts.
    state: dict = {}
    optimizer.save_own_variables(state)
    arrays = [v.value.detach().float().numpy() for v in variables]
    return arrays + [np.asarray(v, "float32") for v in state.values()]


def bits(variables):
    return [v.value.detach().float().numpy().tobytes() for v in variables]


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    monkeypatch.setattr(compiled, "_has_failed", False)


@pytest.mark.slow
@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "dtype, kind, slots",
    [
        ("bfloat16", "remainder", None),
        ("bfloat16", "stochastic", "bfloat16"),
        ("float16", "remainder", "bfloat16"),
        ("bfloat16", "remainder8", None),
        ("float16", "remainder8", "bfloat16"),
        ("float16", "stochastic", None),
        ("bfloat16", "float32", "bfloat16"),
        ("float32", "auto", "bfloat16"),
        ("bfloat16", "remainder8", "int8"),
        ("bfloat16", "stochastic", "int8"),
        ("float16", "float32", "int8"),
        ("float32", "auto", "int8"),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_step_is_that_of_formula(name, dtype, kind, slots, way, monkeypatch):
    assert_compiled_as_formula(name, dtype, kind, slots, way, monkeypatch)


@pytest.mark.slow
@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("kind", OTHER_CODECS)
def test_compiled_step_with_added_kind_is_that_of_formula(kind, monkeypatch):
    monkeypatch.setitem(codecs.CODECS, kind, OTHER_CODECS[kind])
    told = "momentum", "bfloat16", kind, None, "host"
    assert_compiled_as_formula(*told, monkeypatch)


def assert_compiled_as_formula(name, dtype, kind, slots, way, monkeypatch):
    make = OPTIMIZERS[name]
    if slots and not rule_of(make).has_moments:
        slots = None
    take(way, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = trained(make, dtype, kind, slots, monkeypatch, True)
    assert not compiled._has_failed
    theirs = trained(make, dtype, kind, slots, monkeypatch, False)
    for x, y in zip(ours, theirs, strict=True):
        # PyTorch's kernels contract a product and a sum, the function rounds twice. A
        # random bit then rounds one number in some thousands to the other neighbour.
        size = np.abs(y).max(initial=1e-30)
        is_apart = np.abs(x - y) > 1e-5 * size
        assert is_apart.sum() <= 1 + 0.01 * y.size
        # The last of 127 levels of a fourth root.
        limit = 2**-4.9 if slots == "int8" else 2**-7
        np.testing.assert_allclose(x, y, rtol=limit, atol=limit * size)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("sizes", [[6], [6, 70]])
def test_compiled_step_reads_negative_bit_of_gradient(sizes, monkeypatch):
    monkeypatch.setattr(compiled, "IS_ON", True)
    ends = []
    for layout in (torch.Tensor.clone, lambda grad: torch._neg_view(-grad)):
        variables = [keras.Variable(np.ones(n), dtype="bfloat16") for n in sizes]
        optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.Adam(0.1))
        optimizer.build(variables)
        grads = [layout(torch.linspace(-1, 1, n)) for n in sizes]
        optimizer.apply(grads, variables)
        ends.append(bits(variables))
    assert ends[0] == ends[1]


@needs_compiler
def test_compiled_step_does_not_show_a_warning_again(monkeypatch):
    def warn():
        warnings.warn("Told once.", stacklevel=1)

    told = keras.optimizers.SGD, "bfloat16", "stochastic", None, monkeypatch, True
    trained(*told)  # The compiler itself has contexts of warnings.
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(2):
            warn()
            trained(*told)
    assert [str(w.message) for w in seen].count("Told once.") == 1


def test_compiler_that_fails_is_named_once_and_changes_no_bit(monkeypatch):
    def fail(in_blocks):
        def run(*arguments):
            raise RuntimeError("no C++ compiler")

        return run

    monkeypatch.setattr(compiled, "_compiled", fail)
    told = keras.optimizers.Adam, "bfloat16", "remainder", "bfloat16", monkeypatch
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler") as caught:
        ours = trained(*told, True)
    assert len([w for w in caught if "torch.compile" in str(w.message)]) == 1
    for x, y in zip(ours, trained(*told, False), strict=True):
        assert x.tobytes() == y.tobytes()
