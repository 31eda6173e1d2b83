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


@pytest.mark.full
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
