"""`NovoGrad` does what OpenSeq2Seq's formula and optax's code do, alone and in `fit`.

Largest difference allowed, after each of 50 steps, or each fifth one where optax's are
recorded: 2e-6 of the tensor's largest magnitude. Rounding of a step is 6e-8 of it at
most; sums of squares in another order add as much to a norm.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LossScaleOptimizer, NovoGrad

STEPS = 50
RECORDED = slice(4, None, 5)
SHARE = 2e-6
SHAPES = {"kernel": (3, 3, 2, 4), "bias": (4,), "dense": (4, 3), "scale": ()}


@pytest.fixture
def start():
    random = np.random.default_rng(1)
    return {
        name: random.standard_normal(shape).astype("float32")
        for name, shape in SHAPES.items()
    }


@pytest.fixture
def gradients():
    """The gradients of each step, of many magnitudes; those of one are 0 at times."""
    random = np.random.default_rng(2)
    return [
        {
            name: np.float32(10.0 ** random.integers(-3, 3))
            * random.standard_normal(shape).astype("float32")
            * np.float32(not (name == "dense" and step % 3 == 1))
            for name, shape in SHAPES.items()
        }
        for step in range(STEPS)
    ]


def trajectory(optimizer, start, gradients):
    """Returns the weights after each step of ours."""
    variables = [keras.Variable(value, name=name) for name, value in start.items()]
    scale = float(getattr(optimizer, "loss_scale", 1.0))
    steps = []
    for grads in gradients:
        optimizer.apply([ops.array(g * scale) for g in grads.values()], variables)
        steps.append([np.array(ops.convert_to_numpy(v)) for v in variables])
    return steps


def open_seq2seq(
    rates, start, gradients, beta1, beta2, epsilon, weight_decay, grad_averaging
):
    """OpenSeq2Seq's optimizers/novograd.py around TF1's momentum, in float64."""
    weights = {name: value.astype("float64") for name, value in start.items()}
    emas, momentums = dict.fromkeys(start, 0.0), dict.fromkeys(start, 0.0)
    steps = []
    for rate, grads in zip(rates, gradients, strict=True):
        for name, w in weights.items():
            g, ema = grads[name].astype("float64"), emas[name]
            g_2 = np.sum(g**2)
            emas[name] = g_2 if ema == 0 else ema * beta2 + g_2 * (1 - beta2)
            g = g / np.sqrt(emas[name] + epsilon)
            if weight_decay > 0:
                g = g + weight_decay * w
            if grad_averaging:
                g = g * (1 - beta1)
            momentums[name] = beta1 * momentums[name] + g
            weights[name] = w - rate * momentums[name]
        steps.append(list(weights.values()))
    return steps


def assert_same(ours, theirs, assert_close):
    assert len(ours) == len(theirs) >= STEPS // 5
    for mine, reference in zip(ours, theirs, strict=True):
        assert_close(mine, reference, share=SHARE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrap", [lambda o: o, LossScaleOptimizer], ids=["", "scaled"])
@pytest.mark.parametrize("averaging", [False, True], ids=["", "averaged"])
@pytest.mark.parametrize("decay", [0.0, 0.02])
def test_novograd_matches_open_seq2seq_formula(
    decay, averaging, wrap, start, gradients, assert_close
):
    rates = [0.02 * (1 - step / 60) ** 2 for step in range(STEPS)]
    ours = NovoGrad(
        keras.optimizers.schedules.PolynomialDecay(0.02, 60, 0.0, power=2.0),
        weight_decay_rate=decay,
        grad_averaging=averaging,
    )
    theirs = open_seq2seq(rates, start, gradients, 0.95, 0.98, 1e-8, decay, averaging)
    assert_same(trajectory(wrap(ours), start, gradients), theirs, assert_close)


@pytest.mark.parametrize("decay", [pytest.param(0.0, marks=pytest.mark.full), 0.02])
def test_novograd_without_epsilon_matches_optax(
    decay, start, gradients, original, assert_close
):
    def run():
        import jax
        import optax

        theirs = optax.novograd(0.02, b1=0.9, b2=0.75, eps=0.0, weight_decay=decay)
        weights = jax.tree.map(jax.numpy.asarray, start)
        state = theirs.init(weights)
        steps = []
        for grads in gradients:
            grads = jax.tree.map(jax.numpy.asarray, grads)
            updates, state = theirs.update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
            steps.append([np.asarray(weights[name]) for name in start])
        return [np.stack(values) for values in zip(*steps[RECORDED], strict=True)]

    ours = NovoGrad(0.02, beta_1=0.9, beta_2=0.75, epsilon=0.0, weight_decay_rate=decay)
    ours = trajectory(ours, start, gradients)[RECORDED]
    theirs = [list(values) for values in zip(*original(run), strict=True)]
    assert_same(ours, theirs, assert_close)
