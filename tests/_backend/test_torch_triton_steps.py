"""Steps of an optimizer by Triton's kernels, for which kernels of PyTorch are taken.

Or by PyTorch's own, where Triton is missing or too old.
"""

import dataclasses
import importlib.util
import sys
import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import keras_lso

if keras.backend.backend() != "torch":
    pytest.skip("JAX and TensorFlow compile a step", allow_module_level=True)

import torch

from keras_lso._backend import kernel_choice
from keras_lso._backend.masters import KINDS
from keras_lso._backend.measurement import Measurement
from keras_lso._backend.torch.chunks import Chunk
from keras_lso._backend.torch.triton import steps as torch_triton
from keras_lso._backend.torch.triton import trial as torch_triton_trial
from keras_lso._keras_internals import rules
from testing.beside_keras import SCALE, Pair, bits, take
from testing.triton_trials import (
    BLOCK,
    by_the_formula,
    leaving,
    never_skips,
    raises,
    rest_of_a_block,
)

pytestmark = pytest.mark.usefixtures("verdicts")


class Kernels:
    """Kernels of PyTorch that a step takes for Triton's.

    Args:
        kernel: One of those in `testing/triton_trials.py`.

    Attributes:
        calls: List with an item for each call but for those of trials.
    """

    BLOCK, tl = BLOCK, torch

    def __init__(self, kernel):
        self.kernel, self.calls = kernel, []

    def step(
        self, chunk, launches, rule, grads, inv_scale, found, found_inf, iterations
    ):
        self.calls.append(type(rule))
        assert sorted(i for launch in launches for i in launch.columns) == list(
            range(len(grads))
        )
        return self.kernel(chunk, rule, grads, inv_scale, found_inf, iterations)

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


def test_kernel_that_passed_trial_takes_steps(on_a_gpu):
    kernels, pair = on_a_gpu(by_the_formula), Pair(keras.optimizers.Adam)
    for _ in range(3):
        pair.step()
    pair.overflow(np.inf)
    pair.step_in_float16()
    assert kernels.calls == [rules.Adam] * 5
    pair.assert_alike()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kernel", [never_skips, raises, leaving(rest_of_a_block)])
def test_kernel_that_failed_trial_is_replaced_by_pytorch_kernel(
    kernel, dtype, on_a_gpu
):
    kernels, pair = on_a_gpu(kernel), Pair(keras.optimizers.Adam, dtype=dtype)
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


def test_failed_trial_raises_before_any_state_changes(on_a_gpu, monkeypatch):
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernel_is_tried_and_steps_for_each_master_kind(
    dtype, kind, on_a_gpu, verdicts, monkeypatch
):
    """As by PyTorch's own kernels: with random bits of the same step and weight."""
    runs = []
    for kernel in (by_the_formula, None):
        kernels, pair = on_a_gpu(kernel), Pair(keras.optimizers.SGD, dtype=dtype)
        if kernel is None:
            monkeypatch.setattr(torch_triton, "kernels", lambda: None)
        pair.optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.SGD(0.125), initial_scale=SCALE, master_weights=kind
        )
        pair.optimizer.build(pair.ours)
        for _ in range(2):
            pair.apply(pair.gradients())
        pair.overflow(np.inf)
        pair.apply(pair.gradients(), "float16")
        assert len(kernels.calls) == (4 if kernel else 0)
        runs.append(bits([*pair.ours, *pair.optimizer._masters.variables]))
    assert runs[0] == runs[1]
    tried = {(v.weight, v.kind) for _, _, v in verdicts}
    assert tried == {(getattr(torch, dtype), kind)}


def test_changed_options_and_gradient_dtypes_are_tried_again(on_a_gpu, verdicts):
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


def test_kernel_failing_for_one_gradient_dtype_takes_no_step(on_a_gpu):
    """Else a chunk would be stepped by two ways."""

    def wrong_in_float16(chunk, rule, grads, *args):
        is_wrong = grads[0].dtype == torch.float16
        return (raises if is_wrong else by_the_formula)(chunk, rule, grads, *args)

    kernels, pair = on_a_gpu(wrong_in_float16), Pair(keras.optimizers.Adam)
    grads = pair.gradients()
    scaled = [torch.tensor(g * float(pair.optimizer.loss_scale)) for g in grads]
    scaled[1] = scaled[1].half()
    with pytest.warns(UserWarning, match="gradients in torch.float16"):
        pair.optimizer.apply(scaled, pair.ours)
    assert not kernels.calls
    pair.apply_to_keras(grads)
    pair.assert_alike(1e-3)


def test_kernel_is_tried_in_first_step_after_graph_recording(
    on_a_gpu, monkeypatch, verdicts
):
    kernels, pair = on_a_gpu(by_the_formula), Pair(keras.optimizers.Adam)
    with monkeypatch.context() as patch:
        patch.setattr(torch_triton_trial, "_is_recorded", lambda device: True)
        for _ in range(2):
            pair.step()
    assert not kernels.calls and not verdicts
    for _ in range(2):
        pair.step()
    assert len(kernels.calls) == 2 and len(verdicts) == 1
    pair.assert_alike()


def test_repeated_step_requests_no_verdict(on_a_gpu, monkeypatch):
    kernels, pair = on_a_gpu(by_the_formula), Pair(keras.optimizers.Adam)
    pair.step()
    monkeypatch.setattr(torch_triton_trial, "passes", None)
    monkeypatch.setattr(torch_triton_trial, "sample_of", None)
    pair.step()
    assert len(kernels.calls) == 2


def test_gradient_with_negative_bit_is_left_to_pytorch(on_a_gpu):
    """PyTorch notes the sign of such a view, and memory has the other one."""
    step = torch_triton._step
    on_a_gpu(by_the_formula)
    grad = torch.tensor([2.0 + 3.0j]).conj().imag
    assert grad.is_neg() and grad.is_contiguous()
    chunk = Chunk(True, [0], [torch.ones(1)], [], [])
    launches = torch_triton._launches(chunk, [grad])
    arguments = 1.0, Measurement(None), None, None
    assert not step(chunk, launches, rules.SGD(torch.tensor(0.1)), [grad], *arguments)


def test_interpreted_kernels_reject_gpu_tensors(monkeypatch):
    monkeypatch.setattr(
        torch_triton, "kernels", lambda: SimpleNamespace(ARE_INTERPRETED=True)
    )
    grads = [SimpleNamespace(device=torch.device("cuda", 0))]
    with pytest.raises(RuntimeError, match="on the host"):
        torch_triton._step_by_itself(None, None, grads, 1.0, None, None)


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


def test_step_without_triton_emits_no_warning(without_triton):
    pair = Pair(keras.optimizers.Adam)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            pair.step()
    assert torch_triton.kernels() is None
    pair.assert_alike()


def test_failed_triton_import_warns_once(without_triton, monkeypatch):
    def too_old(name):
        raise TypeError("jit() got an unexpected keyword argument")

    monkeypatch.setattr(torch_triton.importlib, "import_module", too_old)
    pair = Pair(keras.optimizers.Adam)
    with pytest.warns(UserWarning, match="unexpected keyword") as caught:
        for _ in range(2):
            pair.step()
    assert len(caught) == 1
    pair.assert_alike()


def test_framework_kernels_setting_never_imports_triton(without_triton, monkeypatch):
    monkeypatch.setattr(kernel_choice, "KERNELS", "framework")
    monkeypatch.setattr(torch_triton, "import_kernels", None)
    pair = Pair(keras.optimizers.Adam)
    pair.step()
    pair.assert_alike()


def test_triton_kernels_setting_without_triton_raises_import_error(
    without_triton, monkeypatch
):
    monkeypatch.setattr(kernel_choice, "KERNELS", "triton")
    pair = Pair(keras.optimizers.Adam)
    before = bits(pair.state())
    with pytest.raises(ImportError, match="pip install triton"):
        pair.step()
    assert bits(pair.state()) == before


def test_importing_steps_module_does_not_import_triton_kernels(monkeypatch):
    names = []
    monkeypatch.setattr(torch_triton.importlib, "import_module", names.append)
    spec = importlib.util.spec_from_file_location("anew", torch_triton.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert names == []
