"""The trust ratios of `LARS`: the paper's, the Model Garden's, and their bounds."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LARS
from testing.lars import PATHS, SHARE, assert_close, forms, values_of, variable
from testing.optimizer_steps import apply
from testing.tensors import tensor


@forms
@pytest.mark.parametrize("zero", ["weights", "gradients", "both"])
def test_trust_ratio_is_one_where_norm_is_zero(wrap, form, zero):
    w = np.zeros(2) if zero != "gradients" else np.array([3.0, 4.0])
    g = np.zeros(2) if zero != "weights" else np.array([1.0, -2.0])
    v = variable("w", w)
    optimizer = LARS(0.5, momentum=0.0, **form)
    apply(wrap(optimizer), [g], [v])
    assert values_of([v])[0].tolist() == (w - 0.5 * g).tolist()
    assert np.isfinite(values_of(optimizer.momentums)[0]).all()


class MLPerf:
    """The step of MLPerf's reference, `LARSOptimizer`, in NumPy float64."""

    def __init__(self, weights, skipped, momentum, weight_decay, eeta, epsilon, clip):
        self.weights = [np.asarray(w, "float64") for w in weights]
        self.momentums = [np.zeros_like(w) for w in self.weights]
        self.skipped, self.momentum, self.eeta = skipped, momentum, eeta
        self.weight_decay, self.epsilon, self.clip = weight_decay, epsilon, clip

    def step(self, grads, learning_rate, nesterov):
        for i, (g, w) in enumerate(zip(grads, self.weights, strict=True)):
            g, rate = np.asarray(g, "float64"), learning_rate
            if not self.skipped[i]:
                w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(g)
                if w_norm > 0 and g_norm > 0:
                    ratio = self.eeta * w_norm
                    ratio /= g_norm + self.weight_decay * w_norm + self.epsilon
                    rate *= min(ratio, 1.0) if self.clip else ratio
                g = g + self.weight_decay * w
            v = self.momentums[i] = self.momentum * self.momentums[i] - rate * g
            self.weights[i] = w + (self.momentum * v - rate * g if nesterov else v)


@pytest.mark.exhaustive
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
@pytest.mark.parametrize("eeta", [0.01, 2.0])
def test_paper_trust_ratio_matches_mlperf_reference(
    wrap, start, gradients, eeta, epsilon, clip, nesterov
):
    start[1] = np.zeros_like(start[1])  # |w| is 0
    reference = MLPerf(
        start,
        skipped=["beta" in path or "bias" in path for path in PATHS],
        momentum=0.9,
        weight_decay=0.2,
        eeta=eeta,
        epsilon=epsilon,
        clip=clip,
    )
    optimizer = wrap(
        LARS(
            0.25,
            momentum=0.9,
            weight_decay_rate=0.2,
            eeta=eeta,
            nesterov=nesterov,
            exclude_from_weight_decay=["beta", "bias"],
            trust_ratio="paper",
            epsilon=epsilon,
            trust_clip=clip,
        )
    )
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for step, grads in enumerate(gradients):
        if step == 2:
            grads = [np.zeros_like(grads[0]), *grads[1:]]  # |g| is 0
        apply(optimizer, grads, variables)
        reference.step(grads, 0.25, nesterov)
        assert_close(values_of(variables), reference.weights, 2 * SHARE)


def test_paper_trust_ratio_matches_hand_computed_values():
    # |w| is 5 and |g| is 2: 0.5 * 5 / (2 + 0.4 * 5 + 1) is a half.
    w = variable("w", [3.0, 4.0])
    settings = dict(momentum=0.0, weight_decay_rate=0.4, eeta=0.5)
    LARS(1.0, trust_ratio="paper", epsilon=1.0, **settings).apply(
        [tensor([2.0, 0.0])], [w]
    )
    # The gradient with its penalty is 2 + 1.2, 0 + 1.6.
    assert_close(values_of([w]), [[3.0 - 1.6, 4.0 - 0.8]])


def test_epsilon_and_trust_clip_apply_to_model_garden_ratio(wrap):
    # |w| is 5 and |g| is 2: 0.5 * 5 / (2 + 3), and 2 * 5 / 2, which is above 1.
    for settings, ratio in [
        (dict(eeta=0.5, epsilon=3.0), 0.5),
        (dict(eeta=2.0), 5.0),
        (dict(eeta=2.0, trust_clip=True), 1.0),
        (dict(eeta=0.5, trust_clip=True, epsilon=3.0), 0.5),
    ]:
        for classic in (True, False):
            w = variable("w", [3.0, 4.0])
            optimizer = LARS(1.0, momentum=0.0, classic_momentum=classic, **settings)
            apply(wrap(optimizer), [[2.0, 0.0]], [w])
            assert_close(values_of([w]), [[3.0 - ratio * 2.0, 4.0]])


def test_paper_trust_ratios_include_weight_decay():
    optimizer = keras_lso.LARS(
        1.0, eeta=0.1, weight_decay_rate=0.2, trust_ratio="paper"
    )
    variable = keras.Variable([3.0, 4.0], name="w")
    optimizer.build([variable])
    ratios = optimizer.trust_ratios([ops.array([0.0, 1.0])])
    # 0.1 * |w| / (|g| + 0.2 * |w|), in float32
    assert float(ratios["w"]) == pytest.approx(0.1 * 5 / (1 + 0.2 * 5), rel=1e-6)


def test_trust_ratios_equal_rescaling_of_next_step():
    # Nesterov-free, undecayed and with a rate of 1, the first step is ratio * g.
    optimizer = keras_lso.LARS(1.0, eeta=0.1, exclude_from_weight_decay=["left_out"])
    names = ["a", "b", "left_out", "unused"]
    variables = [keras.Variable([3.0, 4.0], name=name) for name in names]
    with pytest.raises(ValueError, match="must be built"):
        optimizer.trust_ratios([])
    optimizer.build(variables)
    grads = [ops.array([0.5 * i, 1.0]) for i in range(3)] + [None]
    ratios = optimizer.trust_ratios(grads)
    assert list(ratios) == ["a", "b"]
    before = [v.numpy() for v in variables]
    with pytest.warns(UserWarning, match="do not exist"):
        optimizer.apply(grads)
    for i, ratio in enumerate(ratios.values()):
        step = before[i] - variables[i].numpy()
        # Differences of float32 numbers below 4.
        np.testing.assert_allclose(step, ratio * np.array([0.5 * i, 1.0]), atol=1e-6)
