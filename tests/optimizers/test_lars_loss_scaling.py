"""`LARS` in a `LossScaleOptimizer`: neither scaling nor a skipped step shows."""

import numpy as np
import pytest

from keras_lso import LARS, LossScaleOptimizer
from testing.lars import FORMS, PATHS, assert_close, values_of, variable
from testing.optimizer_steps import SCALE, in_loss_scale_optimizer
from testing.tensors import tensor

IN_EVERY_WAY = {
    **FORMS,
    "without decay": dict(weight_decay_rate=0.0),
    "paper": dict(trust_ratio="paper", epsilon=1e-3),
    "excluded": dict(exclude_1d=True),
    "clipped": dict(clipnorm=1.0),
}


def one_side(compiled, start, settings, wrap):
    """A step of LARS, its variables and slots, and the LARS itself."""
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    inner = LARS(0.5, **{"weight_decay_rate": 0.1, "eeta": 0.1, **settings})
    optimizer = wrap(inner)
    optimizer.build(variables)

    def step(grads):
        optimizer.apply(grads, variables)

    call = compiled(step, [*variables, *optimizer.variables])
    return call, [*variables, *inner.momentums], inner


def in_a_fixed_scale(optimizer):
    return LossScaleOptimizer(optimizer, dynamic=False, initial_scale=SCALE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", IN_EVERY_WAY.values(), ids=IN_EVERY_WAY)
def test_loss_scaled_steps_match_unscaled_steps_despite_skipped_steps(
    compiled, start, gradients, settings, snapshot
):
    # One compiled step for both, with a skipped one before each that is applied.
    plain, state, _ = one_side(compiled, start, settings, lambda o: o)
    scaled, state_inside, inner = one_side(compiled, start, settings, in_a_fixed_scale)
    for number, grads in enumerate(gradients):
        if number == 1:
            # Zeros of both signs are among what must stay.
            for side in (state, state_inside):
                for v in side[1], side[len(PATHS) + 1]:
                    v.assign(np.array([-0.0, 0.0, -0.0], "float32"))
        before = snapshot([*state_inside, *inner.variables])
        # Each of them anywhere: `tests/_backend/test_measure.py`.
        bad, where = (np.inf, -np.inf, np.nan)[number % 3], number % len(PATHS)
        poisoned = [np.array(g) for g in grads]
        poisoned[where].flat[-1] = bad
        scaled([tensor(g) for g in poisoned])
        assert snapshot([*state_inside, *inner.variables]) == before, (bad, where)
        plain([tensor(g) for g in grads])
        scaled([tensor(g * SCALE) for g in grads])
        assert_close(values_of(state_inside), values_of(state), 2e-6)
    assert int(inner.iterations) == len(gradients)


@pytest.mark.parametrize("settings", IN_EVERY_WAY.values(), ids=IN_EVERY_WAY)
def test_eager_loss_scaled_steps_are_bitwise_equal_to_unscaled_steps(
    start, gradients, settings, snapshot
):
    # A compiler contracts products and sums, here and there another way.
    plain, state, _ = one_side(_as_it_is, start, settings, lambda o: o)
    scaled, state_inside, _ = one_side(
        _as_it_is, start, settings, in_loss_scale_optimizer
    )
    for grads in gradients:
        plain([tensor(g) for g in grads])
        scaled([tensor(g * SCALE) for g in grads])
        assert snapshot(state_inside) == snapshot(state)


def _as_it_is(function, variables):
    return function


def test_trust_ratios_use_unscaled_gradients():
    # Of scaled ones, the decay would weigh a thousandth in the norm.
    w = variable("w", [3.0, 4.0])
    optimizer = in_loss_scale_optimizer(
        LARS(1.0, momentum=0.0, weight_decay_rate=1.0, eeta=0.5)
    )
    optimizer.apply([tensor([SCALE * 3.0, SCALE * 4.0])], [w])
    # d is 6, 8; the ratio 0.5 * 5 / 10.
    assert_close(values_of([w]), [[1.5, 2.0]])


def test_gradient_norm_that_overflows_only_when_scaled_skips_no_step():
    # 1e20 squared overflows float32; unscaled, the norm does not.
    w = variable("w", [3.0, 4.0])
    optimizer = LossScaleOptimizer(LARS(1.0, eeta=0.5), initial_scale=2.0**20)
    optimizer.apply([tensor([0.0, 2.0**70])], [w])
    assert_close(values_of([w]), [[3.0, 1.5]])
    assert bool(optimizer.last_step_applied)
