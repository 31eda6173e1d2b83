"""LARS, LAMB and NovoGrad each: numbers by hand, bounds, norms, slots."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LAMB, LARS, NovoGrad
from testing.layer_wise import (
    PATHS,
    SHAPES,
    InNumPyLAMB,
    assert_close,
    make_variables,
    values_of,
    variable,
)
from testing.optimizer_steps import apply, in_loss_scale_optimizer, stepper
from testing.tensors import tensor


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


def test_lars_trust_ratios_equal_rescaling_of_next_step():
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


def test_lars_gradient_with_overflowing_norm_leaves_weights_unchanged(wrap):
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


@pytest.mark.parametrize("zero", ["weights", "gradients", "both"])
def test_lamb_trust_ratio_is_one_where_norm_is_zero_whatever_its_bounds(wrap, zero):
    """As in DeepSpeed, which has bounds."""
    w = np.zeros(2) if zero != "gradients" else np.array([3.0, 4.0])
    g = np.zeros(2) if zero != "weights" else np.array([8.0, -8.0])
    inner = LAMB(0.5, 0.5, 0.75, 4.0, bias_correction=False, min_trust_ratio=3.0)
    [v] = make_variables([w])
    apply(wrap(inner), [g], [v])
    assert values_of([v])[0].tolist() == (w - 0.5 * g / 16).tolist()


@pytest.mark.parametrize("bounds, ratio", [((None, 2.0), 2.0), ((6.0, None), 6.0)])
def test_lamb_trust_ratio_is_clipped_to_bounds(wrap, bounds, ratio):
    # |w| is 5, |d| is 1.
    w = variable("w", [3.0, 4.0])
    lower, upper = bounds
    inner = LAMB(0.125, min_trust_ratio=lower, max_trust_ratio=upper)
    apply(wrap(inner), [[2.0, 0.0]], [w])
    assert_close([w], [[3.0 - 0.125 * ratio, 4.0]])


def test_lamb_epsilon_zero_is_replaced_by_keras_default():
    assert LAMB(epsilon=0).epsilon == keras.config.epsilon()


def test_lamb_trust_ratios_predict_next_step(start, gradients):
    variables, optimizer = make_variables(start), LAMB(0.1, exclude_1d=True)
    optimizer.build(variables)
    for number, grads in enumerate(gradients[:2]):
        ratios = optimizer.trust_ratios([tensor(g) for g in grads])
        [[path, ratio]] = ratios.items()
        assert path == variables[0].path
        before = values_of(variables)[0]
        apply(optimizer, grads, variables)
        step = np.linalg.norm(before - values_of(variables)[0])
        # A step is as long as the rate times |w|, and |d| what it is then divided by.
        moments = InNumPyLAMB(start)
        for g in gradients[: 1 + number]:
            moments.step(g, 0.0)
        m = moments.m[0] / (1 - np.float32(0.9) ** moments.t)
        v = moments.v[0] / (1 - np.float32(0.999) ** moments.t)
        d = np.linalg.norm(m / (np.sqrt(v) + 1e-6))
        assert float(ratio) == pytest.approx(step / 0.1 / d, rel=1e-5)


def test_novograd_has_momentum_and_scalar_second_moment_per_variable(start):
    variables, optimizer = make_variables(start), NovoGrad(0.5)
    optimizer.minimize(lambda: sum(ops.sum(v * v) for v in variables), variables)
    assert optimizer.get_slot_names() == ["m", "v"]
    m, v = ([optimizer.get_slot(w, name) for w in variables] for name in "mv")
    assert [tuple(slot.shape) for slot in m] == SHAPES
    assert [tuple(slot.shape) for slot in v] == [()] * len(SHAPES)
    names = [f"{path.replace('/', '_')}_second_moment" for path in PATHS]
    assert [slot.name for slot in v] == names
    # As tf.keras orders them, and without the learning rate.
    assert [id(w) for w in optimizer.weights[1:]] == [id(slot) for slot in m + v]
    twin = NovoGrad(0.5)
    for _ in "ab":  # The second time adds nothing.
        twin.build(variables)
    twin.set_weights(optimizer.get_weights())
    assert_close(twin.second_moments, values_of(v))


def test_overwritten_variable_has_no_second_moment():
    variables = make_variables([[3.0, 4.0], 1.0])
    variables[1].overwrite_with_gradient = True
    optimizer = NovoGrad(0.5)
    optimizer.build(variables)
    assert optimizer.second_moments[1] is None


@pytest.mark.each_backend
@pytest.mark.exhaustive
@pytest.mark.parametrize("epsilon", [1e-8, 0.0])
def test_first_nonzero_gradient_initializes_second_moment(wrap, compiled, epsilon):
    w, inner = variable("w", [3.0, 4.0]), NovoGrad(0.5, beta_1=0.5, epsilon=epsilon)
    step = stepper(compiled, wrap(inner), [w])
    for _ in range(2):
        step([np.zeros(2)])
        assert values_of([w])[0].tolist() == [3.0, 4.0]
        assert values_of(inner.second_moments) == [0]
    step([np.array([0.0, -100.0])])
    assert_close([w, *inner.second_moments], [[3.0, 4.5], 1e4])
    # Only the momentum moves the weight, and the average falls.
    step([np.zeros(2)])
    assert_close([w, *inner.second_moments], [[3.0, 4.75], 0.98e4])


@pytest.mark.each_backend
def test_novograd_gradient_with_overflowing_norm_enters_neither_moment(wrap):
    w, inner = variable("w", [3.0, 4.0]), NovoGrad(0.5, beta_1=0.5)
    outer = wrap(inner)
    options = {"scaled": False} if outer is not inner else {}
    for gradient, expected in (
        ([1e25, -1e25], [3.0, 4.0]),
        ([0.0, 8.0], [3.0, 3.5]),
        ([1e25, -1e25], [3.0, 3.25]),
        ([0.0, 0.0], [3.0, 3.125]),
    ):
        outer.apply([tensor(gradient)], [w], **options)
        assert_close([w], [expected])
    # The last gradient has let it fall; an inf would have stayed.
    assert_close(inner.second_moments, [64 * 0.98])
    assert int(inner.iterations) == 4
