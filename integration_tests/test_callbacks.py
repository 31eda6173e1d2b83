"""Keras's callbacks work with the wrapper as with any optimizer."""

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests.saved_models import Interruption


def make_optimizer(**inner):
    return keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(0.125, momentum=0.5, **inner), dynamic_growth_steps=3
    )


@pytest.fixture(scope="module")
def models():
    """The models so far, by what they were made of, and what puts each back."""
    return {}


@pytest.fixture
def compiled(make_model, remember, models):
    """A compiled model as if it were a new one; there is one at a time of each kind."""

    def build(dtype_policy="mixed_float16", **inner):
        kind = dtype_policy, *inner.items()
        if kind not in models:
            model = make_model(dtype_policy)
            model.compile(make_optimizer(**inner), loss="mse")
            models[kind] = model, remember(model)
        model, put_back = models[kind]
        put_back()
        return model

    return build


def test_learning_rate_scheduler_sets_inner_learning_rate(compiled, data, fit):
    model = compiled()
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    history = fit(model, *data, epochs=3, callbacks=[scheduler])
    assert history.history["learning_rate"] == [0.0625, 0.03125, 0.015625]
    assert float(model.optimizer.inner_optimizer.learning_rate) == 0.015625


def test_backup_and_restore_resumes_interrupted_run(
    compiled, models, data, fit, with_overflows, bits, tmp_path
):
    x, y = data
    x = with_overflows(x, [1])
    uninterrupted = compiled()
    fit(uninterrupted, x, y, epochs=5)
    weights = bits(uninterrupted.trainable_variables)
    state = bits(uninterrupted.optimizer.variables)

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    with pytest.raises(KeyboardInterrupt):
        fit(compiled(), x, y, epochs=5, callbacks=[backup(), Interruption()])
    assert (tmp_path / "backup").exists()

    resumed = compiled()
    # Keras leaves in the model at which epoch it is to begin: not for other tests.
    models.clear()
    first_epochs = []
    seen = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: first_epochs.append(epoch)
    )
    fit(resumed, x, y, epochs=5, callbacks=[backup(), seen])
    assert first_epochs == [2, 3, 4]
    assert bits(resumed.trainable_variables) == weights
    assert bits(resumed.optimizer.variables) == state
    assert int(resumed.optimizer.skipped_steps) == 5
    assert int(resumed.optimizer.iterations) == 15


SWAPS = {
    "Keras's": (keras.callbacks.SwapEMAWeights, "mixed_float16"),
    "ours": (keras_lso.callbacks.SwapEMAWeights, "mixed_float16"),
    "ours, with masters": (keras_lso.callbacks.SwapEMAWeights, "float16"),
}


@pytest.mark.parametrize("swap, policy", SWAPS.values(), ids=SWAPS)
def test_swap_ema_weights_evaluates_averages(
    swap, policy, compiled, data, make_model, values
):
    x, y = data
    model = compiled(policy, use_ema=True, ema_momentum=0.75)
    # `fit` would end with the averages in place of the weights.
    for _ in range(4):
        model.train_on_batch(x, y)
    averages = [
        v for v in model.optimizer.inner_optimizer.variables if "average" in v.name
    ]
    weights, averages = values(model.trainable_variables), values(averages)
    assert all((w != a).any() for w, a in zip(weights, averages, strict=True))

    averaged = make_model(policy)
    averaged.set_weights(averages)
    averaged.compile(loss="mse")
    expected = averaged.evaluate(x, y, batch_size=8, verbose=0)
    assert expected != model.evaluate(x, y, batch_size=8, verbose=0)

    loss = model.evaluate(x, y, batch_size=8, verbose=0, callbacks=[swap()])
    # TensorFlow swaps by adding and subtracting: one rounding of the float32
    # weights, which float16 may turn into one of its own (2**-11).
    assert loss == pytest.approx(expected, rel=2 * 2.0**-11)
    # A float16 weight below 1 may then be the next one.
    atol = 2.0**-11 if policy == "float16" else 1e-6
    for now, before in zip(values(model.trainable_variables), weights, strict=True):
        np.testing.assert_allclose(now, before, rtol=0, atol=atol)


@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_swap_ema_weights_keeps_weights_if_every_step_is_skipped(
    policy, compiled, data, bits
):
    x, y = data
    model = compiled(policy, use_ema=True)
    before = bits(model.trainable_variables)
    swap = keras_lso.callbacks.SwapEMAWeights(swap_on_epoch=True)
    model.fit(x * np.inf, y, epochs=2, callbacks=[swap], verbose=0)
    assert int(model.optimizer.skipped_steps) > 0
    assert int(model.optimizer.iterations) == 0
    assert bits(model.trainable_variables) == before


@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_swap_ema_weights_ends_early_stopped_runs_with_averages(
    policy, compiled, data, values
):
    x, y = data

    class StopAtOnce(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    model = compiled(policy, use_ema=True, ema_momentum=0.75)
    callbacks = [keras_lso.callbacks.SwapEMAWeights(swap_on_epoch=True), StopAtOnce()]
    for _ in range(2):
        model.fit(x, y, epochs=3, batch_size=8, callbacks=callbacks, verbose=0)
        averages = [
            v for v in model.optimizer.inner_optimizer.variables if "average" in v.name
        ]
        for weight, average in zip(
            values(model.trainable_variables), values(averages), strict=True
        ):
            np.testing.assert_array_equal(weight, average.astype(weight.dtype))
    optimizer = model.optimizer
    assert int(optimizer.iterations) + int(optimizer.skipped_steps) == 8


def test_swap_ema_weights_without_averages_raises(compiled):
    swap = keras_lso.callbacks.SwapEMAWeights()
    swap.set_model(compiled())
    with pytest.raises(ValueError, match="`use_ema=True`"):
        swap.on_test_begin()


def test_predict_with_averages_leaves_weights_unchanged(compiled, data, bits):
    x, y = data
    model = compiled("float16", use_ema=True, ema_momentum=0.75)
    model.train_on_batch(x, y)
    model.train_on_batch(x, y)
    before = bits(model.trainable_variables)
    plain = model.predict(x, verbose=0)
    swap = keras_lso.callbacks.SwapEMAWeights()
    averaged = model.predict(x, verbose=0, callbacks=[swap])
    assert np.any(averaged != plain)
    assert bits(model.trainable_variables) == before
