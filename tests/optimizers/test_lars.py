"""What `LARS` alone promises: numbers by hand, bounds of the trust ratio, its norms."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LARS
from testing.layer_wise import assert_close, values_of, variable
from testing.optimizer_steps import apply, in_loss_scale_optimizer
from testing.tensors import tensor


def test_lars_step_matches_hand_computed_values():
    # |w| is 5 and |g| is 10, so that the ratio is 0.5 * 5 / 10.
    w = variable("w", [3.0, 4.0])
    optimizer = LARS(2.0, momentum=0.5, eeta=0.5)
    apply(optimizer, [[0.0, 10.0]], [w])
    assert values_of([w])[0].tolist() == [3.0, -1.0]
    assert values_of(optimizer.momentums)[0].tolist() == [0.0, 5.0]
    # |w| is 0: a ratio of 1.
    w.assign([0.0, 0.0])
    apply(optimizer, [[1.0, 0.0]], [w])
    assert values_of([w])[0].tolist() == [-2.0, -2.5]
    # The count of steps, the learning rate, and one slot.
    assert len(optimizer.variables) == 3


def test_paper_trust_ratio_matches_hand_computed_values():
    # |w| is 5 and |g| is 2: 0.5 * 5 / (2 + 0.4 * 5 + 1) is a half.
    w = variable("w", [3.0, 4.0])
    settings = dict(momentum=0.0, weight_decay_rate=0.4, eeta=0.5)
    optimizer = LARS(1.0, trust_ratio="paper", epsilon=1.0, **settings)
    optimizer.build([w])
    ratios = optimizer.trust_ratios([tensor([2.0, 0.0])])
    assert float(ratios["w"]) == pytest.approx(0.5, rel=1e-6)
    optimizer.apply([tensor([2.0, 0.0])], [w])
    # The gradient with its penalty is 2 + 1.2, 0 + 1.6.
    assert_close([w], [[3.0 - 1.6, 4.0 - 0.8]])


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
            assert_close([w], [[3.0 - ratio * 2.0, 4.0]])


def test_trust_ratios_equal_rescaling_of_next_step():
    # Nesterov-free, undecayed and with a rate of 1, the first step is ratio * g.
    optimizer = LARS(1.0, eeta=0.1, exclude_from_weight_decay=["left_out"])
    names = ["a", "b", "left_out", "unused"]
    variables = [keras.Variable([3.0, 4.0], name=name) for name in names]
    with pytest.raises(ValueError, match="must be built"):
        optimizer.trust_ratios([])
    optimizer.build(variables)
    grads = [ops.array([0.5 * i, 1.0]) for i in range(3)] + [None]
    ratios = optimizer.trust_ratios(grads)
    assert list(ratios) == ["a", "b"]
    before = values_of(variables)
    with pytest.warns(UserWarning, match="do not exist"):
        optimizer.apply(grads)
    for i, ratio in enumerate(ratios.values()):
        step = before[i] - values_of(variables)[i]
        # Differences of float32 numbers below 4.
        np.testing.assert_allclose(step, ratio * np.array([0.5 * i, 1.0]), atol=1e-6)


def test_gradient_with_overflowing_norm_leaves_weights_unchanged(wrap):
    # As in the Model Garden: the ratio is eeta * |w| / inf.
    w, inner = variable("w", [3.0, 4.0]), LARS(0.5, momentum=0.5)
    outer = wrap(inner)
    options = {"scaled": False} if outer is not inner else {}
    outer.apply([tensor([1e25, -1e25])], [w], **options)
    assert values_of([w])[0].tolist() == [3.0, 4.0]
    assert int(inner.iterations) == 1


def test_lr_is_alias_of_learning_rate():
    optimizer = in_loss_scale_optimizer(LARS(lr=0.25))
    assert float(optimizer.lr) == 0.25
    optimizer.lr = 0.5
    assert float(optimizer.inner_optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.125
    assert float(optimizer.lr) == 0.125
    config = optimizer.inner_optimizer.get_config()
    assert config["learning_rate"] == 0.125
    assert "lr" not in config
    assert float(LARS(lr=keras.optimizers.schedules.CosineDecay(0.5, 9)).lr) == 0.5
