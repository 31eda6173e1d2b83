"""Models of which training shows what float16 needs: the recommendation knows it.

Each is recommended what a GPU of compute capability 7.5 needs, and trained so, in
float16 on a CPU, beside float32. Those that fail without it are trained without, too.
"""

import pathlib
import runpy

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests.test_float16_report import Y, large_embedding

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.slow


def recommend(model, x, y):
    found = keras_lso.recommend(model, x, y, hardware="gpu:7.5")
    assert found.dtype_policy == "mixed_float16"
    assert found.optimizer == "LossScaleOptimizer"
    return found


def in_float16(model, optimizer):
    """The model in float16, without any of what is recommended."""
    narrow = keras_lso.keep_in_float32(model, [], others="mixed_float16")
    narrow.compile(optimizer, model.loss, auto_scale_loss=False)
    return narrow


def losses_of(model, x, y, steps):
    losses = []
    for _ in range(steps):
        model.reset_metrics()
        losses.append(float(model.train_on_batch(x, y)))
    return losses


def test_recommendation_for_sigmoids_has_high_initial_scale():
    example = runpy.run_path(str(EXAMPLES / "underflow.py"))
    model, images, labels = example["model"], example["images"], example["labels"]
    model.compile("adam", loss="mean_squared_error")
    found = recommend(model, images, labels)
    assert found.layers_in_float32 == []
    # 99 % of the gradients in front of the first dense layer are flushed without.
    assert found.initial_scale >= 2.0**20
    # The first layers, to which the smallest gradients lead.
    for layer in model.layers[2:]:
        layer.trainable = False
    adam = {"learning_rate": 0.05}
    model.compile(keras.optimizers.Adam(**adam), "mean_squared_error")
    applied = found.apply(model)
    narrow = in_float16(model, keras.optimizers.Adam(**adam))
    start = model.layers[0].get_weights()[0]
    fell, moved = {}, {}
    for name, each in (("wide", model), ("applied", applied), ("narrow", narrow)):
        losses = losses_of(each, images, labels, steps=30)
        fell[name] = losses[0] - losses[-1]
        moved[name] = each.layers[0].get_weights()[0] - start
    assert fell["applied"] == pytest.approx(fell["wide"], rel=0.02)
    assert fell["narrow"] < 0.5 * fell["wide"]
    # Without a scale the first layer moves at random.
    error = {name: np.linalg.norm(moved[name] - moved["wide"]) for name in moved}
    distance = np.linalg.norm(moved["wide"])
    assert error["applied"] < 0.02 * distance
    assert error["narrow"] > 0.5 * distance


def test_recommendation_names_overflowing_layer():
    keras.utils.set_random_seed(0)
    parts, (x, culprit) = large_embedding()
    model = keras.Sequential([keras.Input(x.shape[1:], dtype="int32"), *parts])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss)
    found = recommend(model, x, Y)
    assert culprit in found.layers_in_float32
    assert any(r.startswith(f"{culprit}: overflow, above 65504") for r in found.reasons)
    applied = found.apply(model)
    scaled = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.05))
    narrow = in_float16(model, scaled)
    assert not np.isfinite(losses_of(narrow, x, Y, steps=20)).any()
    assert int(scaled.skipped_steps) == 20
    expected = losses_of(model, x, Y, steps=20)
    assert expected[-1] < 0.9 * expected[0]
    losses = losses_of(applied, x, Y, steps=20)
    np.testing.assert_allclose(losses, expected, rtol=0.02)
