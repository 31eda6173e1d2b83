"""The counters of a `LossScaleOptimizer`: steps applied and skipped, and stalls."""

import logging
import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LARC, GuardedOptimizer, LossScaleOptimizer, SpikeGuard
from testing.harness import Harness
from testing.trained_optimizers import new_run, number, saved, trained

SGD = keras.optimizers.SGD


def test_counters_track_applied_and_skipped_steps(compiled):
    run, counts = new_run(compiled), []
    for bad in [0.0, np.inf, np.nan, 0.0, 0.0, -np.inf]:
        run.step([np.float32([1.0, bad]), np.float32(1.0)])
        counts.append(
            (
                number(run.optimizer.iterations),
                number(run.optimizer.skipped_steps),
                number(run.optimizer.last_step_applied),
                number(run.optimizer.dynamic_counter),
                number(run.optimizer.loss_scale),
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


COUNTERS = {
    "loss_scale": "float",
    "skipped_steps": "int",
    "last_step_applied": "bool",
    "dynamic_counter": "int",
}


def test_counters_are_scalar_tensors_that_later_steps_do_not_change():
    # On PyTorch a variable's tensor changes in place.
    run = trained()
    tensors = [getattr(run.optimizer, name) for name in COUNTERS]
    before = list(map(number, tensors))
    for tensor, dtype in zip(tensors, COUNTERS.values(), strict=True):
        assert ops.is_tensor(tensor) and tuple(tensor.shape) == ()
        assert keras.backend.standardize_dtype(tensor.dtype).startswith(dtype)
    run.overflow()
    assert list(map(number, tensors)) == before
    assert before != [number(getattr(run.optimizer, name)) for name in COUNTERS]


def test_skipped_micro_batches_are_counted_and_lower_scale():
    inner = SGD(1.0, gradient_accumulation_steps=2)
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    run = Harness(optimizer, [keras.Variable([1.0, 2.0])])
    for size, scale in [(1.0, 8.0), (np.inf, 8.0), (np.nan, 4.0), (4.0, 2.0)]:
        assert run.scale == scale
        run.step([np.float32([size, 0.0])])
    # The accumulation has waited for the second finite micro-batch.
    assert number(optimizer.iterations) == 1
    assert run.skipped == 2
    np.testing.assert_array_equal(run.values(), [[1.0 - 2.5, 2.0]])


def test_dynamic_counter_and_growth_steps_are_none_for_fixed_scale():
    fixed = new_run(dynamic=False).optimizer
    assert fixed.dynamic is False
    assert fixed.dynamic_counter is None
    assert fixed.dynamic_growth_steps is None
    assert fixed.initial_scale == 8.0
    dynamic = new_run(dynamic_growth_steps=5).optimizer
    assert dynamic.dynamic is True
    assert dynamic.dynamic_growth_steps == 5
    assert dynamic.initial_scale == 8.0


def test_overflow_without_scale_update_lowers_scale_at_next_update(compiled):
    optimizer = LossScaleOptimizer(SGD(0.5), initial_scale=1024.0)
    weight = keras.Variable(np.array([1.0], "float32"))
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


# --- `check_stalled` ----------------------------------------------------------------


def assert_stalled(run, skips):
    """Expects that so many steps in a row were skipped at the lowest scale."""
    run.optimizer.check_stalled(patience=skips + 1)
    for patience in range(1, skips + 1):
        with pytest.raises(FloatingPointError, match=f"last {skips} steps"):
            run.optimizer.check_stalled(patience=patience)


def test_check_stalled_raises_after_patience_skips_at_lowest_scale(compiled):
    run = new_run(compiled, min_scale=2.0)
    # 8 -> 4 -> 2: neither of these two was at the lowest scale.
    for skips in (0, 0, 1, 2, 3):
        run.overflow([np.nan, np.inf][skips % 2])
        assert_stalled(run, skips)
    run.step()
    assert_stalled(run, 0)
    run.overflow()
    assert_stalled(run, 1)


def test_check_stalled_has_default_patience_of_fifty():
    run = new_run(dynamic=False)
    for _ in range(49):
        run.overflow()
    run.optimizer.check_stalled()
    run.overflow()
    with pytest.raises(FloatingPointError, match=r"lowest loss scale \(8.0\)"):
        run.optimizer.check_stalled()


@pytest.mark.parametrize("min_scale, counted", [(2.0, 0), (8.0, 3)])
def test_check_stalled_counts_skips_without_scale_update_at_lowest_scale_alone(
    min_scale, counted
):
    run = new_run(min_scale=min_scale)
    for _ in range(3):
        run.apply([ops.full((2,), np.inf), ops.ones(())], update_scale=False)
    assert run.skipped == 3
    assert_stalled(run, counted)
    run.apply([ops.ones(2), ops.ones(())], update_scale=False)
    assert_stalled(run, 0)


@pytest.mark.parametrize("lowest", [0.1, 0.7])  # rounded up and down
def test_check_stalled_recognizes_lowest_scale_rounded_to_float32(lowest):
    run = new_run(initial_scale=lowest, min_scale=lowest)
    run.overflow()
    assert_stalled(run, 1)


# --- The end of `fit` ---------------------------------------------------------------


def test_messages_reach_loggers_that_capture_warnings(caplog):
    logging.captureWarnings(True)
    try:
        LossScaleOptimizer(SGD(0.1, loss_scale_factor=8.0))
    finally:
        logging.captureWarnings(False)
    [record] = [r for r in caplog.records if "has loss_scale_factor" in r.getMessage()]
    assert record.name == "py.warnings"
    assert "UserWarning" in record.getMessage() and __file__ in record.getMessage()


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="A step takes values")
def test_fit_with_optimizer_of_other_model_warns_at_its_end():
    def model():
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

    optimizer, x = GuardedOptimizer(SGD(0.1)), np.ones((1, 1), "float32")
    first, second = model(), model()
    first.compile(optimizer, loss="mse")
    first.fit(x, x, verbose=0)
    second.compile(optimizer, loss="mse")
    words = f"state of others.*new optimizer.*{second.layers[0].kernel.path}"
    with pytest.warns(UserWarning, match=words):
        second.fit(x, x, verbose=0)


WRAPPERS = {
    "scaled": lambda: LossScaleOptimizer(SGD(0.1)),
    "guarded": lambda: GuardedOptimizer(SGD(0.1)),
    "in LARC": lambda: LARC(LossScaleOptimizer(SGD(0.1))),
    "windows": lambda: GuardedOptimizer(SGD(0.1, gradient_accumulation_steps=2)),
    "spikes": lambda: GuardedOptimizer(SGD(0.1), spike_guard=SpikeGuard(max_norm=50.0)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_fit_that_applies_no_step_warns_at_its_end(name):
    def model_with(optimizer):
        layer = keras.layers.Dense(1, kernel_initializer="zeros", dtype="mixed_float16")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(optimizer, loss="mse")
        return model

    def messages_of(*targets):
        y = np.array(targets, "float32")[:, None]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model.fit(np.ones_like(y), y, batch_size=1, shuffle=False, verbose=0)
        texts = [str(w.message) for w in seen]
        return [t for t in texts if t.startswith("No step of this `fit` was applied")]

    model, bad = model_with(WRAPPERS[name]()), 100.0 if name == "spikes" else np.nan
    [text] = messages_of(bad, bad)
    assert "all 2 were skipped" in text
    assert ("outliers" in text) == (name == "spikes")
    assert messages_of(bad, 1.0, 1.0, bad) == []
    [text] = messages_of(bad)
    assert "all 1 were skipped" in text
    # The next run begins with the counts of the last one.
    state = saved(model.optimizer)
    model = model_with(WRAPPERS[name]())
    model.optimizer.build(model.trainable_variables)
    model.optimizer.load_own_variables(state)
    assert len(messages_of(bad, bad)) == 1
    assert messages_of(1.0, 1.0) == []
