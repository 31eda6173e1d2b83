"""The trial of Triton's kernels, without Triton: with kernels of PyTorch for them.

`test_triton.py` has the real ones.
"""

import dataclasses
import importlib.util
import re
import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import keras
import numpy as np
import pytest

import keras_lso

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow compile a step", allow_module_level=True)
import torch

from keras_lso._backend import formulas, kernel_choice
from keras_lso._backend.framework import Framework
from keras_lso._backend.measurement import Measurement
from keras_lso._backend.rule import TrustRatio, always
from keras_lso._backend.torch.chunks import Chunk
from keras_lso._backend.torch.triton import steps as torch_triton
from keras_lso._backend.torch.triton import trial as torch_triton_trial
from keras_lso._backend.torch.triton.trial import Variant, passes, sample_of
from keras_lso._keras_internals import rules
from keras_lso.optimizers.lars import LARSRule
from testing.beside_keras import Pair, bits, take

REFERENCE = Framework()
CPU, BLOCK = torch.device("cpu"), 1024
RULES = {
    "SGD": rules.SGD(0.1),
    "momentum": rules.Momentum(0.1, 0.9, decay=0.01),
    "nesterov": rules.Momentum(0.1, 0.9, nesterov=True),
    "AdamW": rules.Adam(0.1, 0.9, 0.999, 1e-7, decay=0.01),
    "LARS": LARSRule(0.1, 0.9, 0.01, TrustRatio(0.1)),
    "paper": LARSRule(0.1, 0.9, 0, TrustRatio(0.1, paper=True), nesterov=True),
    "excluded": LARSRule(0.1, 0.9, 0.01, None),
}


@pytest.fixture(autouse=True)
def verdicts(monkeypatch):
    """A process that has tried nothing."""
    found = {}
    monkeypatch.setattr(torch_triton_trial, "_verdicts", found)
    return found


# --- Kernels, sound and broken --------------------------------------------------------


def by_the_formula(chunk, rule, grads, inv_scale, found_inf):
    """A kernel that is right."""
    if found_inf == 1.0:
        return True
    for i, (w, *slots) in enumerate(zip(chunk.variables, *chunk.slots, strict=True)):
        master, low = w, chunk.pairs[i][1] if chunk.pairs else None
        if low is not None:
            master = REFERENCE.resynchronised(w, low)
        g = grads[i].float() * inv_scale
        norms = REFERENCE.norms_of(rule, g, master, *slots)
        new = rule(formulas, always, g, master, *slots, norms=norms)
        for tensor, value in zip((w, *slots), new, strict=True):
            tensor.copy_(value)
        if low is not None:
            low.copy_(REFERENCE.rounded(new[0], keras_name(low)))
    return True


def keras_name(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def another_rate(chunk, rule, *args):
    rate = rule.learning_rate * (1 + 1e-4)
    return by_the_formula(chunk, dataclasses.replace(rule, learning_rate=rate), *args)


def without_decay(chunk, rule, *args):
    return by_the_formula(chunk, dataclasses.replace(rule, decay=None), *args)


def never_skips(chunk, rule, grads, inv_scale, found_inf):
    return by_the_formula(chunk, rule, grads, inv_scale, torch.tensor(0.0))


def afterwards(change):
    """Returns a kernel that is right, and then does something else to the chunk."""

    def step(chunk, rule, grads, inv_scale, found_inf):
        by_the_formula(chunk, rule, grads, inv_scale, found_inf)
        change(chunk, grads, found_inf == 1.0)
        return True

    return step


@afterwards
def loses_the_sign_of_zero(chunk, grads, is_skipped):
    for slot in chunk.slots[0]:
        slot.add_(0.0)


@afterwards
def quiets_a_nan(chunk, grads, is_skipped):
    if is_skipped:
        for _, low in chunk.pairs:
            low.copy_(torch.where(low.isnan(), torch.nan, low))


@afterwards
def writes_beside_it(chunk, grads, is_skipped):
    weight = chunk.variables[1]
    beside = weight.as_strided((1,), (1,), weight.storage_offset() + weight.numel())
    beside.fill_(7.0)


@afterwards
def writes_a_gradient(chunk, grads, is_skipped):
    grads[-1].mul_(0.5)


@afterwards
def leaves_the_variables(chunk, grads, is_skipped):
    if not is_skipped:
        chunk.pairs[-1][1].neg_()


@afterwards
def makes_a_nan(chunk, grads, is_skipped):
    chunk.slots[0][2][-1] = torch.nan


def leaving(part):
    """Returns a kernel that does not step a part of each weight."""

    def step(chunk, *args):
        kept = [t.clone() for t in chunk.variables]
        by_the_formula(chunk, *args)
        for t, old in zip(chunk.variables, kept, strict=True):
            t[part(t)] = old[part(t)]
        return True

    step.__name__ = f"leaving_{part.__name__}"
    return step


def rest_of_a_block(tensor):
    return slice(tensor.numel() // BLOCK * BLOCK, None)


def what_lies_askew(tensor):
    return slice(None if tensor.data_ptr() % 16 else tensor.numel(), None)


def ignores_assignments(chunk, *args):
    for master, low in chunk.pairs:
        low.copy_(REFERENCE.rounded(master, keras_name(low)))
    return by_the_formula(chunk, *args)


def lets_float16_overflow(chunk, *args):
    by_the_formula(chunk, *args)
    for master, low in chunk.pairs:
        low.copy_(torch.where(master.isfinite(), master.to(low.dtype), low))
    return True


def raises(*args):
    raise ValueError("no such instruction")


def declines(*args):
    return False


BROKEN = {
    another_rate: r"after a step \d+ elements are off by up to .* in the weights",
    without_decay: r"after a step \d+ elements are off by up to .* in the weights",
    never_skips: "a step that is skipped changes the weights",
    loses_the_sign_of_zero: "a step that is skipped changes the momentum",
    quiets_a_nan: "a step that is skipped changes the low-precision variables",
    writes_beside_it: "after a step 1 elements are off .* in the weights",
    writes_a_gradient: "after a step .* in the gradients",
    leaves_the_variables: "after a step .* in the low-precision variables",
    makes_a_nan: "after a step 1 elements are off by up to nan in the momentum",
    leaving(rest_of_a_block): "after a step .* in the weights",
    leaving(what_lies_askew): "after a step .* in the weights",
    ignores_assignments: "after a step .* in the weights",
    lets_float16_overflow: "after a step .* in the low-precision variables",
    raises: "ValueError: no such instruction",
    declines: "it does not take the tensors",
}
MOMENTUM = Variant(sample_of(RULES["momentum"]), torch.float16, torch.float16)


# --- The trial ------------------------------------------------------------------------


@pytest.mark.parametrize("low", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_kernel_that_is_right_passes(rule, dtype, low):
    assert passes(Variant(sample_of(rule), dtype, low), CPU, by_the_formula, BLOCK)


@pytest.mark.parametrize("kernel", BROKEN, ids=lambda kernel: kernel.__name__)
def test_a_kernel_that_is_wrong_fails(kernel):
    with pytest.warns(UserWarning, match="failed its trial on cpu") as caught:
        assert passes(MOMENTUM, CPU, kernel, BLOCK) is False
    [message] = [str(w.message) for w in caught]
    assert f"Kernel: {MOMENTUM}. Fault: " in message
    assert re.search(BROKEN[kernel], message)
    for fact in ("PyTorch's own kernels", "report", "Momentum", "torch.float16"):
        assert fact in message


def test_a_rule_is_tried_with_numbers_of_which_each_counts():
    for rule in RULES.values():
        sample = sample_of(rule)
        expected = moved(sample)
        for field in dataclasses.fields(sample):
            value = getattr(sample, field.name)
            if isinstance(value, float) and value:
                other = dataclasses.replace(sample, **{field.name: value * 1.01})
                assert not torch.equal(moved(other), expected), field.name


def moved(rule):
    rows = torch_triton_trial._rows(Variant(rule, torch.float32, None), places())
    [_, weights, *_] = torch_triton_trial._expected(
        Variant(rule, torch.float32, None), rows, places()
    )
    # As far as a trial sees.
    return (weights / (10 * torch_triton_trial.TOLERANCE)).round()


def places():
    return torch_triton_trial._places(rules.SGD(0.1), CPU, BLOCK)


def test_norms_are_tried_of_more_blocks_than_are_added_at_once(monkeypatch):
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
    variant = Variant(sample_of(RULES["LARS"]), torch.float32, None)
    with pytest.warns(UserWarning, match="failed its trial"):
        assert not passes(variant, CPU, of_some_blocks, BLOCK)
    assert passes(variant._replace(low=torch.float16), CPU, by_the_formula, BLOCK)


def test_rules_that_are_compiled_alike_are_tried_once():
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


# --- The verdict ----------------------------------------------------------------------


def counting(kernel, calls):
    def step(*args):
        calls.append(1)
        return kernel(*args)

    return step


@pytest.mark.parametrize("kernel", [by_the_formula, raises])
def test_a_variant_is_tried_once_and_warned_of_once(kernel):
    calls = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {passes(MOMENTUM, CPU, counting(kernel, calls), BLOCK) for _ in "abc"}
    assert found == {kernel is by_the_formula}
    assert len(calls) == (2 if kernel is by_the_formula else 1)
    assert len(caught) == (kernel is raises)


def test_each_device_and_each_process_has_its_own_trial(monkeypatch):
    calls = []
    step = counting(by_the_formula, calls)
    other = MOMENTUM._replace(gradient=torch.float32)
    for variant, device in ((MOMENTUM, CPU), (MOMENTUM, "cpu:0"), (other, CPU)):
        assert passes(variant, torch.device(device), step, BLOCK)
    assert len(calls) == 6
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert passes(MOMENTUM, CPU, step, BLOCK)
    assert len(calls) == 8


def test_it_is_an_error_where_triton_is_asked_for(monkeypatch):
    monkeypatch.setattr(kernel_choice, "KERNELS", "triton")
    for _ in "ab":
        with pytest.raises(RuntimeError, match="no such instruction") as caught:
            passes(MOMENTUM, CPU, raises, BLOCK)
        for fact in ("cpu", str(MOMENTUM), "No weight was changed", "report"):
            assert fact in str(caught.value)
    assert passes(MOMENTUM._replace(low=None), CPU, by_the_formula, BLOCK)


def test_a_graph_that_is_recorded_leaves_a_variant_untried(monkeypatch, verdicts):
    with monkeypatch.context() as patch:
        patch.setattr(torch_triton_trial, "_is_recorded", lambda device: True)
        assert passes(MOMENTUM, CPU, by_the_formula, BLOCK) is None
        assert not verdicts
    assert passes(MOMENTUM, CPU, by_the_formula, BLOCK)
    monkeypatch.setattr(torch_triton_trial, "_is_recorded", lambda device: True)
    assert passes(MOMENTUM, CPU, by_the_formula, BLOCK)


# --- What is around it ----------------------------------------------------------------


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_contexts_of_the_user_are_not_felt(rule, in_float64):
    variant = Variant(sample_of(rule), torch.bfloat16, torch.float16)
    with torch.inference_mode(), torch.device("meta"), keras.device("meta"):
        assert passes(variant, CPU, by_the_formula, BLOCK)
        assert torch.is_inference_mode_enabled()
        assert torch.ones(1).device.type == "meta"


def test_random_numbers_stay_as_they_are():
    before = torch.random.get_rng_state()
    assert passes(MOMENTUM, CPU, by_the_formula, BLOCK)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("is_sound", [True, False])
def test_it_may_wait_where_the_user_may_not(is_sound, monkeypatch):
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


# --- Steps of an optimizer ------------------------------------------------------------


class Kernels:
    """Kernels of PyTorch that a step takes for Triton's.

    Args:
        kernel: One of the above.

    Attributes:
        calls: List with an item for each call beside those of trials.
    """

    BLOCK, tl = BLOCK, torch

    def __init__(self, kernel):
        self.kernel, self.calls = kernel, []

    def step(self, launches, rule, grads, inv_scale, found, found_inf):
        self.calls.append(type(rule))
        for launch in launches:
            weights, *slots = launch.group._rows
            low = slots.pop() if launch.dtypes["COPY"] else []
            chunk = SimpleNamespace(
                variables=weights,
                slots=slots,
                pairs=list(zip(weights, low, strict=False)),
            )
            own = [grads[i] for i in launch.columns]
            assert self.kernel(chunk, rule, own, inv_scale, found_inf)
        return True

    def step_by_itself(self, *args):
        return self.kernel(*args)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Lets a step take a CPU for a GPU, and `Kernels` for Triton's."""

    def use(kernel):
        made = Kernels(kernel)
        take("accelerator", monkeypatch)
        monkeypatch.setattr(torch_triton, "DEVICES", ("cpu",))
        monkeypatch.setattr(torch_triton, "kernels", lambda: made)
        monkeypatch.setattr(torch_triton, "_step", made.step)
        monkeypatch.setattr(torch_triton, "_step_by_itself", made.step_by_itself)
        return made

    return use


def adam(rate, **options):
    return keras.optimizers.Adam(rate, **options)


def test_what_has_passed_steps(on_a_gpu):
    kernels, pair = on_a_gpu(by_the_formula), Pair(adam)
    for _ in range(3):
        pair.step()
    pair.overflow(np.inf)
    pair.step_in_float16()
    assert kernels.calls == [rules.Adam] * 5
    pair.assert_alike()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kernel", [never_skips, raises, leaving(rest_of_a_block)])
def test_what_has_failed_is_replaced_by_pytorch(kernel, dtype, on_a_gpu):
    kernels, pair = on_a_gpu(kernel), Pair(adam, dtype=dtype)
    with pytest.warns(UserWarning, match="failed its trial") as caught:
        pair.step()
    pair.overflow(np.inf)
    for _ in range(2):
        pair.step()
    assert len(caught) == 1 and not kernels.calls
    if dtype == "float32":
        pair.assert_alike()
    else:
        pair.assert_weights_alike_in_float16()


def test_a_failure_is_an_error_before_anything_has_changed(on_a_gpu, monkeypatch):
    """Of the second of two chunks: the first is not stepped either."""
    monkeypatch.setattr(kernel_choice, "KERNELS", "triton")

    def wrong_in_a_decay(chunk, rule, *args):
        return by_the_formula(chunk, dataclasses.replace(rule, weight_decay=0.0), *args)

    def make(rate):
        return keras_lso.LARS(rate, weight_decay_rate=0.1, exclude_1d=True)

    kernels, pair = on_a_gpu(wrong_in_a_decay), Pair(make)
    before = bits(pair.state())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed its trial"):
            pair.step()
    assert bits(pair.state()) == before and not kernels.calls


def test_what_is_tried_may_change_from_step_to_step(on_a_gpu, verdicts):
    """In the options of the optimizer, and in the dtype of the gradients."""

    def make(rate, **options):
        return keras.optimizers.SGD(rate, momentum=0.9, **options)

    kernels, pair = on_a_gpu(by_the_formula), Pair(make)
    pair.step()
    for optimizer in (pair.optimizer.inner_optimizer, pair.inner):
        optimizer.nesterov = True
    pair.step()
    assert [v.rule.nesterov for _, _, v in verdicts] == [False, True]
    pair.step_in_float16()
    assert [v.gradient for _, _, v in verdicts][2:] == [torch.float16]
    pair.step()
    assert len(verdicts) == 3 and len(kernels.calls) == 4
    pair.assert_alike()


def test_gradients_of_several_dtypes_all_have_to_pass(on_a_gpu):
    """Else a chunk would be stepped by two ways."""

    def wrong_in_float16(chunk, rule, grads, inv_scale, found_inf):
        is_wrong = grads[0].dtype == torch.float16
        return (raises if is_wrong else by_the_formula)(
            chunk, rule, grads, inv_scale, found_inf
        )

    kernels, pair = on_a_gpu(wrong_in_float16), Pair(adam)
    grads = pair.gradients()
    scaled = [torch.tensor(g * float(pair.optimizer.loss_scale)) for g in grads]
    scaled[1] = scaled[1].half()
    with pytest.warns(UserWarning, match="gradients in torch.float16"):
        pair.optimizer.apply(scaled, pair.ours)
    assert not kernels.calls
    pair.apply_to_keras(grads)
    pair.assert_alike(1e-3)


def test_steps_after_a_recorded_one_are_tried(on_a_gpu, monkeypatch, verdicts):
    kernels, pair = on_a_gpu(by_the_formula), Pair(adam)
    with monkeypatch.context() as patch:
        patch.setattr(torch_triton_trial, "_is_recorded", lambda device: True)
        for _ in range(2):
            pair.step()
    assert not kernels.calls and not verdicts
    for _ in range(2):
        pair.step()
    assert len(kernels.calls) == 2 and len(verdicts) == 1
    pair.assert_alike()


def test_a_step_that_is_like_the_last_asks_for_no_verdict(on_a_gpu, monkeypatch):
    kernels, pair = on_a_gpu(by_the_formula), Pair(adam)
    pair.step()
    monkeypatch.setattr(torch_triton_trial, "passes", None)
    monkeypatch.setattr(torch_triton_trial, "sample_of", None)
    pair.step()
    assert len(kernels.calls) == 2


def test_a_gradient_that_is_the_negative_of_what_it_holds_is_left_to_pytorch(on_a_gpu):
    """PyTorch notes the sign of such a view, and memory has the other one."""
    step = torch_triton._step
    on_a_gpu(by_the_formula)
    grad = torch.tensor([2.0 + 3.0j]).conj().imag
    assert grad.is_neg() and grad.is_contiguous()
    chunk = Chunk(True, [0], [torch.ones(1)], [], [])
    launches = torch_triton._launches(chunk, [grad])
    arguments = 1.0, Measurement(None), None
    assert not step(launches, rules.SGD(torch.tensor(0.1)), [grad], *arguments)


def test_what_the_host_interprets_takes_no_addresses_of_a_gpu(monkeypatch):
    monkeypatch.setattr(
        torch_triton, "kernels", lambda: SimpleNamespace(ARE_INTERPRETED=True)
    )
    grads = [SimpleNamespace(device=torch.device("cuda", 0))]
    with pytest.raises(RuntimeError, match="on the host"):
        torch_triton._step_by_itself(None, None, grads, 1.0, None)


# --- Where there is no Triton ---------------------------------------------------------


@pytest.fixture
def without_triton(monkeypatch):
    """A CPU is taken for a GPU, on a machine that has no Triton."""
    take("accelerator", monkeypatch)
    monkeypatch.setattr(torch_triton, "DEVICES", ("cpu",))
    monkeypatch.setattr(kernel_choice, "KERNELS", "auto")
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels = "keras_lso._backend.torch.triton.kernels"
    monkeypatch.delitem(sys.modules, kernels, raising=False)
    torch_triton.kernels.cache_clear()
    yield
    torch_triton.kernels.cache_clear()


def test_a_step_without_triton_is_silent(without_triton):
    pair = Pair(adam)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            pair.step()
    assert torch_triton.kernels() is None
    pair.assert_alike()


def test_a_triton_that_cannot_be_imported_is_warned_of(without_triton, monkeypatch):
    def too_old(name):
        raise TypeError("jit() got an unexpected keyword argument")

    monkeypatch.setattr(torch_triton.importlib, "import_module", too_old)
    pair = Pair(adam)
    with pytest.warns(UserWarning, match="unexpected keyword") as caught:
        for _ in range(2):
            pair.step()
    assert len(caught) == 1
    pair.assert_alike()


def test_triton_is_not_looked_for_if_it_is_not_asked_for(without_triton, monkeypatch):
    monkeypatch.setattr(kernel_choice, "KERNELS", "framework")
    monkeypatch.setattr(torch_triton, "import_kernels", None)
    pair = Pair(adam)
    pair.step()
    pair.assert_alike()


def test_triton_is_missed_if_it_is_asked_for(without_triton, monkeypatch):
    monkeypatch.setattr(kernel_choice, "KERNELS", "triton")
    pair = Pair(adam)
    before = bits(pair.state())
    with pytest.raises(ImportError, match="pip install triton"):
        pair.step()
    assert bits(pair.state()) == before


def test_triton_is_not_imported_with_the_package(monkeypatch):
    names = []
    monkeypatch.setattr(torch_triton.importlib, "import_module", names.append)
    spec = importlib.util.spec_from_file_location("anew", torch_triton.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert names == []
