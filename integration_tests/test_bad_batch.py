"""`LossScaleMonitor(save_bad_batch=...)`: the batch that a stall began with."""

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import callbacks
from testing.full_disk import full_disk

SIZE = 4


def make_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras_lso.GuardedOptimizer(keras.optimizers.SGD(0.01))
    eagerly = {"run_eagerly": keras.backend.backend() == "tensorflow"}
    model.compile(optimizer, loss="mse", **eagerly)
    return model


def data(batches, bad=slice(0)):
    """Returns inputs and targets; a slice of the batches is NaN."""
    x = np.random.default_rng(0).normal(size=(batches, SIZE, 4)).astype("float32")
    y = x[..., :1].copy()
    x[bad] = np.nan
    return x, y


def fit(model, x, y, *with_callbacks, epochs=1):
    x, y = (a.reshape(-1, a.shape[-1]) for a in (x, y))
    arguments = {"batch_size": SIZE, "shuffle": False, "verbose": 0}
    return model.fit(x, y, epochs=epochs, callbacks=list(with_callbacks), **arguments)


@pytest.mark.parametrize("is_same", [True, False])
def test_monitor_after_error_saves_batch_of_second_stall(is_same, tmp_path):
    path = tmp_path / "bad.npz"
    arguments = {"patience": 3, "on_stall": "raise", "save_bad_batch": path}
    model, monitor = make_model(), callbacks.LossScaleMonitor(**arguments)
    with pytest.raises(FloatingPointError):
        fit(model, *data(16, slice(2, 16)), monitor)
    fit(model, *data(4))
    path.unlink()
    x, y = data(16, slice(5, 16))
    with pytest.raises(ZeroDivisionError):
        fails = keras.callbacks.LambdaCallback
        fit(model, x, y, monitor, fails(on_train_batch_begin=lambda *_, **__: 1 / 0))
    with pytest.raises(FloatingPointError):
        again = monitor if is_same else callbacks.LossScaleMonitor(**arguments)
        fit(model, x, y, again)
    with np.load(path) as saved:
        np.testing.assert_array_equal(saved["x"], x[5])
        np.testing.assert_array_equal(saved["y"], y[5])


def test_stall_across_epochs_saves_first_batch(tmp_path):
    path = tmp_path / "bad.npz"
    monitor = callbacks.LossScaleMonitor(patience=5, save_bad_batch=path)
    x, y = data(8, slice(5, 8))
    x[:4] = np.nan
    with pytest.warns(UserWarning, match="All steps since step 6 were skipped"):
        fit(make_model(), x, y, monitor, epochs=2)
    with np.load(path) as saved:
        assert saved["step"] == 6
        np.testing.assert_array_equal(saved["x"], x[5])


@pytest.mark.parametrize("on_stall", ["warn", "raise", "restore"])
@pytest.mark.parametrize("obstacle", ["full disk", "folder", "batch"])
def test_stall_is_reported_though_batch_cannot_be_saved(
    obstacle, on_stall, tmp_path, monkeypatch
):
    path, room = tmp_path / "bad.npz", 2**30
    if obstacle == "full disk":
        room = 100
    elif obstacle == "folder":
        path.mkdir()
    else:
        monkeypatch.setattr(keras.utils, "unpack_x_y_sample_weight", lambda _: 1 / 0)
    options = {"patience": 3, "on_stall": on_stall, "retries": 0}
    monitor = callbacks.LossScaleMonitor(save_bad_batch=path, **options)
    expected = (
        pytest.warns(UserWarning, match="Training has stalled")
        if on_stall == "warn"
        else pytest.raises(FloatingPointError, match="Training has stalled")
    )
    with full_disk(room), expected as caught:
        fit(make_model(), *data(9, slice(2, 9)), monitor)
    text = " ".join(map(str, caught)) if on_stall == "warn" else str(caught.value)
    assert "bad batch could not be saved to" in " ".join(text.split())
    assert path.is_dir() or not path.exists()
