"""The trial of Triton's kernels, without Triton: with kernels of PyTorch for them.

`test_triton.py` has the real ones.
"""

import dataclasses
import re
import warnings
from unittest import mock

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow compile a step", allow_module_level=True)

import torch

from keras_lso._backend import kernel_choice
from keras_lso._backend.masters import KINDS
from keras_lso._backend.torch.triton import trial as torch_triton_trial
from keras_lso._backend.torch.triton.trial import Variant, passes, sample_of
from keras_lso._keras_internals import rules
from testing.triton_trials import (
    BLOCK,
    BROKEN,
    BROKEN_FOR,
    CPU,
    DTYPES,
    MOMENTUM,
    REFERENCE,
    RULES,
    WEIGHTS,
    by_the_formula,
    raises,
)

pytestmark = pytest.mark.usefixtures("verdicts")


# --- The trial ----------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_correct_kernel_passes_trial(rule, dtype, weights):
    variant = Variant(sample_of(rule), dtype, *weights)
    assert passes(variant, CPU, by_the_formula, BLOCK)


@pytest.mark.parametrize("kernel", BROKEN, ids=lambda kernel: kernel.__name__)
def test_wrong_kernel_fails_trial_with_warning(kernel):
    with pytest.warns(UserWarning, match="failed its trial on cpu") as caught:
        assert passes(MOMENTUM, CPU, kernel, BLOCK) is False
    [message] = [str(w.message) for w in caught]
    assert f"Kernel: {MOMENTUM}. Fault: " in message
    assert re.search(BROKEN[kernel], message)
    for fact in ("PyTorch's own kernels", "report", "Momentum", "torch.float16"):
        assert fact in message


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", BROKEN_FOR, ids=lambda kernel: kernel.__name__)
def test_kernel_wrong_for_one_master_kind_fails_trial(kernel, dtype):
    kind, fault = BROKEN_FOR[kernel]
    variant = MOMENTUM._replace(weight=dtype, kind=kind)
    with pytest.warns(UserWarning, match=f"masters: {kind}.*{fault}"):
        assert passes(variant, CPU, kernel, BLOCK) is False


@pytest.mark.parametrize("weights", WEIGHTS[1:], ids=str)
def test_trial_tolerates_rounding_differences_of_last_bit(weights):
    """As of a root or a quotient that a card rounds in another way."""

    def off_by_a_bit(chunk, rule, *args):
        rate = rule.learning_rate * (1 + 2.0**-23)
        return by_the_formula(
            chunk, dataclasses.replace(rule, learning_rate=rate), *args
        )

    variant = Variant(sample_of(RULES["momentum"]), torch.float32, *weights)
    assert passes(variant, CPU, off_by_a_bit, BLOCK)


def test_trial_sample_is_sensitive_to_each_rule_coefficient():
    for rule in RULES.values():
        sample = sample_of(rule)
        expected = moved(sample)
        for field in dataclasses.fields(sample):
            value = getattr(sample, field.name)
            if isinstance(value, float) and value:
                other = dataclasses.replace(sample, **{field.name: value * 1.01})
                assert not torch.equal(moved(other), expected), field.name


def moved(rule):
    variant = Variant(rule, torch.float32)
    rows = torch_triton_trial._rows(variant, places())
    [_, weights, *_] = torch_triton_trial._expected(variant, rows, rows, places())
    # As far as a trial sees.
    return (weights / (10 * torch_triton_trial.TOLERANCE)).round()


def places():
    return torch_triton_trial._places(rules.SGD(0.1), CPU, BLOCK)


def test_trial_finds_norms_that_omit_blocks(monkeypatch):
    sound = REFERENCE.norms_of

    def norms_of_some_blocks(rule, *tensors):
        return sound(rule, *[t[: 1024 * BLOCK] for t in tensors])

    def of_some_blocks(*args):
        with mock.patch.object(REFERENCE, "norms_of", norms_of_some_blocks):
            return by_the_formula(*args)

    own = torch_triton_trial._places
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(
        torch_triton_trial, "_places", lambda rule, _, block: own(rule, gpu, block)
    )
    variant = Variant(sample_of(RULES["LARS"]), torch.float32)
    with pytest.warns(UserWarning, match="failed its trial"):
        assert not passes(variant, CPU, of_some_blocks, BLOCK)
    variant = variant._replace(weight=torch.float16, kind="float32")
    assert passes(variant, CPU, by_the_formula, BLOCK)


def test_rules_compiled_alike_share_trial_sample():
    rate = torch.tensor(0.1)
    one, other = rules.Adam(rate, 0.9, 0.999, 1e-7), rules.Adam(rate * 2, 0.5, 0.9, 1.0)
    assert sample_of(one) == sample_of(other)
    assert hash(sample_of(one)) == hash(sample_of(other))
    samples = {sample_of(rule) for rule in RULES.values()}
    samples |= {
        sample_of(one),
        sample_of(dataclasses.replace(RULES["SGD"], decay=rate)),
    }
    samples |= {sample_of(dataclasses.replace(RULES["LARS"], weight_decay=0.0))}
    assert len(samples) == len(RULES) + 3


# --- The verdict --------------------------------------------------------------


def counting(kernel, calls):
    def step(*args):
        calls.append(1)
        return kernel(*args)

    return step


@pytest.mark.parametrize("kernel", [by_the_formula, raises])
def test_variant_is_tried_once_and_warns_once(kernel):
    calls = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {passes(MOMENTUM, CPU, counting(kernel, calls), BLOCK) for _ in "abc"}
    assert found == {kernel is by_the_formula}
    assert len(calls) == (2 if kernel is by_the_formula else 1)
    assert len(caught) == (kernel is raises)


def test_each_device_and_process_runs_separate_trial(monkeypatch):
    calls = []
    step = counting(by_the_formula, calls)
    other = MOMENTUM._replace(gradient=torch.float32)
    for variant, device in ((MOMENTUM, CPU), (MOMENTUM, "cpu:0"), (other, CPU)):
        assert passes(variant, torch.device(device), step, BLOCK)
    assert len(calls) == 6
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert passes(MOMENTUM, CPU, step, BLOCK)
    assert len(calls) == 8


def test_failed_trial_raises_where_triton_kernels_are_required(monkeypatch):
    monkeypatch.setattr(kernel_choice, "KERNELS", "triton")
    for _ in "ab":
        with pytest.raises(RuntimeError, match="no such instruction") as caught:
            passes(MOMENTUM, CPU, raises, BLOCK)
        for fact in ("cpu", str(MOMENTUM), "No weight was changed", "report"):
            assert fact in str(caught.value)
    other = MOMENTUM._replace(weight=torch.float32, kind=None)
    assert passes(other, CPU, by_the_formula, BLOCK)


def test_graph_recording_leaves_variant_untried(monkeypatch, verdicts):
    with monkeypatch.context() as patch:
        patch.setattr(torch_triton_trial, "_is_recorded", lambda device: True)
        assert passes(MOMENTUM, CPU, by_the_formula, BLOCK) is None
        assert not verdicts
    assert passes(MOMENTUM, CPU, by_the_formula, BLOCK)
    monkeypatch.setattr(torch_triton_trial, "_is_recorded", lambda device: True)
    assert passes(MOMENTUM, CPU, by_the_formula, BLOCK)


# --- What is around it --------------------------------------------------------


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_trial_is_independent_of_user_contexts(rule, kind, in_float64):
    variant = Variant(sample_of(rule), torch.bfloat16, torch.float16, kind)
    with torch.inference_mode(), torch.device("meta"), keras.device("meta"):
        assert passes(variant, CPU, by_the_formula, BLOCK)
        assert torch.is_inference_mode_enabled()
        assert torch.ones(1).device.type == "meta"


def test_trial_preserves_random_number_state():
    before = torch.random.get_rng_state()
    assert passes(MOMENTUM, CPU, by_the_formula, BLOCK)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("is_sound", [True, False])
def test_trial_disables_and_restores_sync_debug_mode(is_sound, monkeypatch):
    modes = [2]
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)
    try:
        with torch_triton_trial._undisturbed(torch.device("cuda", 0)):
            assert modes == [2, "default"]
            1 / is_sound
    except ZeroDivisionError:
        pass
    assert modes == [2, "default", 2]
