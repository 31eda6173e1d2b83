"""Models that overflow in float16 train as in float32, once the report was applied."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_lso

STEPS = 20
X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
Y = (X[:, :1] > X[:, 1:2]).astype("int32")


def large_embedding():
    """Embeddings of some hundreds, times a kernel of some hundreds."""
    start = keras.initializers.RandomUniform(-400, 400, seed=0)
    return [
        layers.Embedding(8, 16, embeddings_initializer=start, name="embedding"),
        layers.Flatten(name="flatten"),
        layers.Dense(16, kernel_initializer=start, name="projection"),
        layers.LayerNormalization(name="norm"),
        layers.Dense(2, name="logits", dtype="float32"),
    ], (np.argsort(X)[:, :4], "projection")


def norm_of_large_inputs():
    """A normalization whose inputs are larger than float16's largest number."""
    return [
        layers.Rescaling(1e5, name="units"),
        layers.LayerNormalization(name="norm"),
        layers.Dense(16, "tanh", name="hidden"),
        layers.Dense(2, name="logits", dtype="float32"),
    ], (X, "norm")


def compiled(model):
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.05))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


def losses_of(model, x):
    return [float(model.train_on_batch(x, Y)) for _ in range(STEPS)]


@pytest.mark.parametrize("make", [large_embedding, norm_of_large_inputs])
def test_applied_report_makes_overflowing_model_train_like_float32(make, tmp_path):
    keras.utils.set_random_seed(0)
    parts, (x, culprit) = make()
    dtype = "int32" if x.dtype.kind == "i" else "float32"
    wide = keras.Sequential([keras.Input(x.shape[1:], dtype=dtype), *parts])
    # All of it in float16, which is what fails.
    narrow = compiled(
        keras_lso.keep_in_float32(compiled(wide), [], others="mixed_float16")
    )
    report = keras_lso.float16_report(narrow, x, Y)
    assert culprit in report.layers_to_keep
    # Layers that have nothing to do with it are not blamed.
    assert "logits" not in report.layers_to_keep
    fixed = report.apply(narrow)
    fixed.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not np.isfinite(losses_of(narrow, x)).all()
    expected = losses_of(wide, x)
    assert expected[-1] < 0.9 * expected[0]
    for model in (fixed, loaded):
        # Rounding to 11 bits, step after step.
        np.testing.assert_allclose(losses_of(model, x), expected, rtol=0.02)
        assert int(model.optimizer.skipped_steps) <= 3
