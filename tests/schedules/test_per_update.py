"""Schedules under gradient accumulation: `PerUpdate`, and the warning without it."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.compat.open_seq2seq import FixedLR
from keras_lso.schedules import LinearWarmup, PerUpdate
from testing.schedules import ALL

K = keras.optimizers
WARMUP = LinearWarmup(0.5, 4, 0.1)


def wrap(rate, wrapper=keras_lso.LossScaleOptimizer, window=3, **options):
    return wrapper(K.SGD(rate, gradient_accumulation_steps=window), **options)


def rates_of_updates(optimizer, gradients):
    """Returns the rate of each update: the weight moves by it, of means of 1."""
    weight = keras.Variable([0.0])
    found, before = [], 0.0
    for gradient in gradients:
        optimizer.apply([ops.array([gradient])], [weight], scaled=False)
        moved = before - float(ops.convert_to_numpy(weight)[0])
        before -= moved
        if moved:
            found.append(moved)
    return found


INF = float("inf")


@pytest.mark.parametrize(
    "gradients", [[1.0] * 12, [1.0, INF, 1.0, 1.0, INF, INF, *[1.0] * 8, INF, 1.0]]
)
@pytest.mark.parametrize(
    "wrapper", [keras_lso.LossScaleOptimizer, keras_lso.GuardedOptimizer]
)
def test_per_update_rate_follows_update_count_despite_skips(wrapper, gradients):
    optimizer = wrap(PerUpdate(WARMUP, 3), wrapper)
    found = rates_of_updates(optimizer, gradients)
    np.testing.assert_allclose(found, [0.1, 0.2, 0.3, 0.4], rtol=1e-5)
    # That of the next update.
    assert float(ops.convert_to_numpy(optimizer.learning_rate)) == 0.5


def test_update_uses_rate_of_last_micro_batch_without_per_update():
    with pytest.warns(UserWarning, match="counts micro-batches"):
        found = rates_of_updates(wrap(WARMUP), [1.0] * 6)
    np.testing.assert_allclose(found, [0.3, 0.5], rtol=1e-5)


def test_keras_optimizer_accepts_per_update():
    optimizer = K.SGD(PerUpdate(WARMUP, 2), gradient_accumulation_steps=2)
    weight = keras.Variable([0.0])
    for _ in range(6):
        optimizer.apply([ops.ones(1)], [weight])
    moved = -float(ops.convert_to_numpy(weight)[0])
    assert moved == pytest.approx(0.1 + 0.2 + 0.3, rel=1e-5)


def warnings_of_build(optimizer, variables=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.build(variables or [keras.Variable([0.0])])
        optimizer.build(variables or [keras.Variable([0.0])])
    found = [w for w in caught if "micro-batches" in str(w.message)]
    # At the line of the user's.
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


def test_schedule_that_counts_micro_batches_warns_once():
    [message] = warnings_of_build(wrap(WARMUP, window=8))
    assert "`gradient_accumulation_steps=8`" in message
    assert "800 of its steps are 100 updates" in message
    assert "`keras_lso.schedules.PerUpdate(schedule, 1)`" in message
    assert message.endswith(f"Received: learning_rate={WARMUP!r}")
    line = (
        "SGD(keras_lso.schedules.PerUpdate(schedule, 8), gradient_accumulation_steps=8)"
    )
    assert f"`{line}`" in message
    names = {"SGD": K.SGD, "keras_lso": keras_lso, "schedule": WARMUP}
    assert not warnings_of_build(keras_lso.LossScaleOptimizer(eval(line, names)))


@pytest.mark.parametrize(
    "rate, window",
    [
        (0.1, 3),
        (lambda: 0.1, 3),
        (FixedLR(0.1), 3),
        (PerUpdate(WARMUP, 3), 3),
        (PerUpdate(WARMUP, 1), 3),
        (keras_lso.schedules.Scaled(PerUpdate(WARMUP, 3), 0.5), 3),
        (WARMUP, None),
    ],
)
def test_rate_that_counts_no_micro_batches_does_not_warn(rate, window):
    assert not warnings_of_build(wrap(rate, window=window))


def test_every_schedule_except_fixed_lr_and_per_update_warns():
    found = {n for n, make in ALL.items() if not warnings_of_build(wrap(make()))}
    assert found == {"FixedLR", "PerUpdate"}
    # What it holds may count updates; its own boundary counts micro-batches.
    joined = keras_lso.schedules.JoinedSchedules([PerUpdate(WARMUP, 3), 0.1], [8])
    assert warnings_of_build(wrap(joined))
    assert warnings_of_build(wrap(K.schedules.CosineDecay(0.1, 10)))


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: keras_lso.GuardedOptimizer(inner),
        lambda inner: keras_lso.LossScaleOptimizer(keras_lso.LARC(inner)),
        lambda inner: keras_lso.LARC(keras_lso.LossScaleOptimizer(inner)),
    ],
)
def test_warning_finds_schedule_in_nested_wrappers(make):
    def inner(rate):
        return K.SGD(rate, gradient_accumulation_steps=2)

    assert len(warnings_of_build(make(inner(WARMUP)))) == 1
    assert not warnings_of_build(make(inner(PerUpdate(WARMUP, 2))))


@pytest.mark.skipif(
    not hasattr(K, "MultiOptimizer"), reason="the oldest Keras has no MultiOptimizer"
)
def test_multi_optimizer_warns_once_for_all_members():
    def multi(rate):
        first = K.SGD(rate, gradient_accumulation_steps=2)
        second = K.Adam(rate, gradient_accumulation_steps=2)
        maps = K.OptimizerMap(first, {"first": second})
        return keras_lso.LossScaleOptimizer(K.MultiOptimizer(maps))

    variables = [keras.Variable([0.0], name=name) for name in ("first", "other")]
    assert len(warnings_of_build(multi(WARMUP), variables)) == 1
    assert not warnings_of_build(multi(PerUpdate(WARMUP, 2)), variables)
