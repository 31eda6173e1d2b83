"""The counters of a `LossScaleOptimizer`: steps applied and skipped, and stalls."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LARC, GuardedOptimizer, LossScaleOptimizer, SpikeGuard
from testing.trained_optimizers import (
    new_optimizer,
    new_weights,
    number,
    saved,
    step,
    trained,
)


def test_counters_track_applied_and_skipped_steps(compiled):
    optimizer = new_optimizer(new_weights())
    run = compiled(
        lambda *grads: optimizer.apply(list(grads)),
        [*optimizer._trainable_variables, *optimizer.variables],
    )
    counts = []
    for bad in [0.0, np.inf, np.nan, 0.0, 0.0, -np.inf]:
        run(ops.convert_to_tensor([1.0, bad]), ops.convert_to_tensor(1.0))
        counts.append(
            (
                number(optimizer.iterations),
                number(optimizer.skipped_steps),
                number(optimizer.last_step_applied),
                number(optimizer.dynamic_counter),
                number(optimizer.loss_scale),
            )
        )
    assert counts == [
        (1, 0, True, 1, 8.0),
        (1, 1, False, 0, 4.0),
        (1, 2, False, 0, 2.0),
        (2, 2, True, 1, 2.0),
        (3, 2, True, 2, 2.0),
        (3, 3, False, 0, 1.0),
    ]


def test_counters_and_scale_are_scalar_tensors_of_expected_dtype():
    optimizer = trained()
    expected = {
        "loss_scale": "float",
        "skipped_steps": "int",
        "last_step_applied": "bool",
        "dynamic_counter": "int",
    }
    for name, kind in expected.items():
        value = getattr(optimizer, name)
        assert ops.is_tensor(value), name
        assert tuple(value.shape) == (), name
        dtype = keras.backend.standardize_dtype(value.dtype)
        assert dtype.startswith(kind), name


def test_returned_counters_do_not_change_with_later_steps():
    # On PyTorch a variable's tensor changes in place.
    optimizer = trained()
    names = ["loss_scale", "skipped_steps", "last_step_applied", "dynamic_counter"]
    read = [getattr(optimizer, name) for name in names]
    before = [number(value) for value in read]
    step(optimizer, finite=False)
    assert [number(value) for value in read] == before
    assert before != [number(getattr(optimizer, name)) for name in names]


def test_skipped_micro_batches_are_counted_and_lower_scale():
    weights = new_weights()
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer.build(weights)
    for finite in [True, False, False, True]:
        step(optimizer, finite)
    # The window waited for the second finite micro-batch.
    assert number(optimizer.iterations) == 1
    assert number(optimizer.skipped_steps) == 2
    np.testing.assert_array_equal(ops.convert_to_numpy(weights[0])[1], 2.0)
    # (8 / 8 + 8 / 2) / 2, the scale being halved twice in between.
    np.testing.assert_array_equal(ops.convert_to_numpy(weights[0])[0], 1.0 - 2.5)


def test_dynamic_counter_and_growth_steps_are_none_for_fixed_scale():
    fixed = new_optimizer(new_weights(), dynamic=False)
    assert fixed.dynamic is False
    assert fixed.dynamic_counter is None
    assert fixed.dynamic_growth_steps is None
    assert fixed.initial_scale == 8.0
    dynamic = new_optimizer(new_weights(), dynamic_growth_steps=5)
    assert dynamic.dynamic is True
    assert dynamic.dynamic_growth_steps == 5
    assert dynamic.initial_scale == 8.0


def test_overflow_without_scale_update_lowers_scale_at_next_update(compiled):
    weight = keras.Variable(np.array([1.0], "float32"))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=1024.0)
    optimizer.build([weight])
    variables = [weight, *optimizer.variables]

    def apply(update_scale):
        return compiled(
            lambda grad: optimizer.apply([grad], [weight], update_scale=update_scale),
            variables,
        )

    first, last = apply(False), apply(True)
    scales = []
    for values in [(np.inf, 0.0), (0.0, 0.0), (0.0, np.inf), (np.nan, np.nan)]:
        for apply_one, value in zip((first, last), values, strict=True):
            apply_one(ops.convert_to_tensor(np.array([value], "float32")))
        scales.append(float(optimizer.loss_scale))
    assert scales == [512.0, 512.0, 256.0, 128.0]
    assert int(optimizer.skipped_steps) == 4


def test_check_stalled_raises_after_patience_skips_at_lowest_scale():
    optimizer = new_optimizer(new_weights(), min_scale=2.0)
    # 8 -> 4 -> 2: none of these two was at the lowest scale.
    for _ in range(2):
        step(optimizer, finite=False)
        optimizer.check_stalled(patience=1)
    for skips in range(1, 6):
        step(optimizer, finite=False)
        optimizer.check_stalled(patience=skips + 1)
        for patience in range(1, skips + 1):
            with pytest.raises(FloatingPointError, match=f"last {skips} steps"):
                optimizer.check_stalled(patience=patience)


def test_check_stalled_has_default_patience_of_fifty():
    optimizer = new_optimizer(new_weights(), dynamic=False)
    for _ in range(49):
        step(optimizer, finite=False)
    optimizer.check_stalled()
    step(optimizer, finite=False)
    with pytest.raises(FloatingPointError, match=r"lowest loss scale \(8.0\)"):
        optimizer.check_stalled()


def test_applied_step_ends_stall():
    optimizer = new_optimizer(new_weights(), dynamic=False)
    for _ in range(3):
        step(optimizer, finite=False)
    step(optimizer, finite=True)
    step(optimizer, finite=False)
    optimizer.check_stalled(patience=2)
    with pytest.raises(FloatingPointError, match="last 1 steps"):
        optimizer.check_stalled(patience=1)


@pytest.mark.parametrize("min_scale, counted", [(2.0, 0), (8.0, 3)])
def test_check_stalled_counts_skips_without_scale_update_at_lowest_scale_alone(
    min_scale, counted
):
    optimizer = new_optimizer(new_weights(), min_scale=min_scale)
    for _ in range(3):
        step(optimizer, finite=False, update_scale=False)
    assert number(optimizer.skipped_steps) == 3
    optimizer.check_stalled(patience=counted + 1)
    if counted:
        with pytest.raises(FloatingPointError, match="last 3 steps"):
            optimizer.check_stalled(patience=3)


def test_check_stalled_recognizes_lowest_scale_rounded_to_float32():
    for lowest in (0.1, 0.7):  # rounded up and down
        optimizer = new_optimizer(new_weights(), initial_scale=lowest, min_scale=lowest)
        step(optimizer, finite=False)
        with pytest.raises(FloatingPointError, match="last 1 steps"):
            optimizer.check_stalled(patience=1)


def test_check_stalled_counts_skips_of_compiled_steps(compiled):
    optimizer = new_optimizer(new_weights(), min_scale=4.0)
    run = compiled(
        lambda *grads: optimizer.apply(list(grads)),
        [*optimizer._trainable_variables, *optimizer.variables],
    )
    for bad in [np.nan, np.nan, np.inf]:
        run(ops.convert_to_tensor([1.0, bad]), ops.convert_to_tensor(1.0))
    optimizer.check_stalled(patience=3)
    with pytest.raises(FloatingPointError, match="last 2 steps"):
        optimizer.check_stalled(patience=2)


SGD = keras.optimizers.SGD
WRAPPERS = {
    "scaled": lambda: LossScaleOptimizer(SGD(0.1)),
    "guarded": lambda: GuardedOptimizer(SGD(0.1)),
    "in LARC": lambda: LARC(LossScaleOptimizer(SGD(0.1))),
    "windows": lambda: GuardedOptimizer(SGD(0.1, gradient_accumulation_steps=2)),
    "spikes": lambda: GuardedOptimizer(SGD(0.1), spike_guard=SpikeGuard(max_norm=50.0)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_fit_that_applies_no_step_says_so_at_its_end(name):
    def model_with(optimizer):
        layer = keras.layers.Dense(1, kernel_initializer="zeros", dtype="mixed_float16")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(optimizer, loss="mse")
        return model

    def said(*targets):
        y = np.array(targets, "float32")[:, None]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model.fit(np.ones_like(y), y, batch_size=1, shuffle=False, verbose=0)
        texts = [str(w.message) for w in seen]
        return [t for t in texts if t.startswith("No step of this `fit` was applied")]

    model, bad = model_with(WRAPPERS[name]()), 100.0 if name == "spikes" else np.nan
    [text] = said(bad, bad)
    assert "all 2 were skipped" in text
    assert ("outliers" in text) == (name == "spikes")
    assert said(bad, 1.0, 1.0, bad) == []
    [text] = said(bad)
    assert "all 1 were skipped" in text
    # The next run begins with the counts of the last one.
    state = saved(model.optimizer)
    model = model_with(WRAPPERS[name]())
    model.optimizer.build(model.trainable_variables)
    model.optimizer.load_own_variables(state)
    assert len(said(bad, bad)) == 1
    assert said(1.0, 1.0) == []
