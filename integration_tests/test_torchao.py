"""Stochastic rounding here and in torchao: the same steps, and as far from each other.

torchao draws other bits, and keeps its moments in bfloat16.
"""

import importlib.util

import keras
import numpy as np
import pytest

import keras_lso

if keras.backend.backend() != "torch":
    pytest.skip("torchao trains PyTorch's parameters", allow_module_level=True)

REASON = "torchao is not installed"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason=REASON
)
COUNT, STEPS, RATE = 40_000, 60, 1e-4


def trained_by_torchao(torch, gradients):
    from torchao.optim import _AdamW

    weight = torch.nn.Parameter(torch.ones(COUNT, dtype=torch.bfloat16))
    optimizer = _AdamW([weight], lr=RATE, weight_decay=0.0, bf16_stochastic_round=True)
    # To compile its step takes a minute.
    with torch.compiler.set_stance("force_eager"):
        for gradient in gradients:
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
    return weight


def trained_by_us(torch, gradients):
    weight = keras.Variable(torch.ones(COUNT, dtype=torch.bfloat16), dtype="bfloat16")
    inner = keras.optimizers.AdamW(RATE, weight_decay=0.0, epsilon=1e-8)
    optimizer = keras_lso.GuardedOptimizer(inner, master_weights="stochastic")
    for gradient in gradients:
        optimizer.apply([torch.full_like(weight.value, gradient)], [weight])
    return weight.value


def test_stochastic_rounding_matches_mean_and_variance_of_torchao():
    import torch

    torch.manual_seed(0)
    gradients = np.random.default_rng(0).uniform(0.5, 1.5, STEPS)
    ours, theirs = (
        train(torch, gradients).detach().double()
        for train in (trained_by_us, trained_by_torchao)
    )
    # Each step is below a 39th of the unit below 1, which bfloat16 would lose.
    assert ours.mean() < 1 - 0.8 * STEPS * RATE
    # What of the standard deviation is left in the mean of so many, and a part of each
    # step for the moments in bfloat16.
    error = float(theirs.std()) / np.sqrt(COUNT)
    assert abs(float(ours.mean() - theirs.mean())) <= 6 * error + 0.01 * STEPS * RATE
    assert float(ours.var()) == pytest.approx(float(theirs.var()), rel=0.1)
