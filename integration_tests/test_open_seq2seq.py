"""OpenSeq2Seq's optimizers in training, compared with TF1's."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.compat.open_seq2seq import (
    OPTIMIZER_SUMMARIES,
    AutomaticLossScaler,
    MixedPrecisionOptimizerWrapper,
    optimize_loss,
)
from testing.events import events_in

NESTEROV = {"momentum": 0.9, "use_nesterov": True}
THEIRS = {
    "Adagrad": ("AdagradOptimizer", {"initial_accumulator_value": 0.25}),
    "Adam": ("AdamOptimizer", {"beta1": 0.8, "beta2": 0.95}),
    "Ftrl": ("FtrlOptimizer", {"l1_regularization_strength": 0.01}),
    "Momentum": ("MomentumOptimizer", {"momentum": 0.9}),
    "Momentum, Nesterov": ("MomentumOptimizer", NESTEROV),
    "RMSProp": ("RMSPropOptimizer", {"decay": 0.8, "momentum": 0.5}),
    "RMSProp, centered": ("RMSPropOptimizer", {"centered": True}),
    "SGD": ("GradientDescentOptimizer", {}),
}


@pytest.mark.parametrize("defaults", [False, True])
@pytest.mark.parametrize("name", THEIRS)
def test_named_optimizer_matches_tf1(name, defaults, original):
    their_class, params = THEIRS[name]
    if defaults:  # But for the argument that has none.
        params = {"momentum": 0.9} if name.startswith("Momentum") else {}
    start = np.float32([[1.0, -2.0], [0.5, 3.0]])
    gradients = np.random.default_rng(1).normal(size=(20, 2, 2)).astype("float32")

    def run():
        import tensorflow as tf

        # It falls quickly, because it enters Keras's momentum and not TF1's.
        rate = tf.Variable(0.1)
        theirs = getattr(tf.compat.v1.train, their_class)(rate, **params)
        w = tf.Variable(start)
        for gradient in gradients:
            theirs.apply_gradients([(tf.constant(gradient), w)])
            rate.assign(rate * 0.9)
        return w.numpy()

    w = keras.Variable(start)
    train_op = optimize_loss(
        lambda g: ops.sum(w * g),
        name.split(",")[0],
        params,
        lambda step: ops.power(0.9, ops.cast(step, "float32")) * 0.1,
        var_list=[w],
    )
    for gradient in gradients:
        train_op(gradient)
    # Float32, in another order; Ftrl takes roots and differences of its sums.
    np.testing.assert_allclose(w.numpy(), original(run), rtol=2e-5, atol=2e-6)


def test_adamw_scales_weight_decay_by_learning_rate():
    w = keras.Variable(np.float32([2.0]))
    train_op = optimize_loss(
        lambda: ops.sum(w * 0.0), "AdamW", {"weight_decay": 0.5}, lambda step: 0.25
    )
    train_op()
    np.testing.assert_allclose(w.numpy(), [2.0 * (1 - 0.5 * 0.25)], rtol=1e-6)


def test_tensorboard_reads_every_summary(tmp_path):
    w = keras.Variable(np.float32([3.0, 4.0]), name="w")
    train_op = optimize_loss(
        lambda x: ops.sum(w * x),
        "SGD",
        {},
        lambda step: 0.5 / (1.0 + ops.cast(step, "float32")),
        var_list=[w],
        dtype="mixed",
        loss_scaling="Backoff",
        loss_scaling_params={"scale_max": 64.0},
        summaries=OPTIMIZER_SUMMARIES,
        larc_params={"larc_eta": 0.01},
    )
    train_op.write_summaries(tmp_path, every=1)
    weights = []
    for value in (1.0, 2.0, np.inf, 4.0):
        weights.append(w.numpy())
        train_op(np.full(2, value, "float32"))

    events, path = events_in(tmp_path), w.path
    per_variable = "gradients gradient_norm variables variable_norm larc_ratio"
    tags = {f"{name}/{path}" for name in per_variable.split()}
    assert set(events) == {"learning_rate", "global_gradient_norm", "loss_scale", *tags}
    norms, rates, ratios = (
        [float(value) for _, value in events[tag]]
        for tag in (f"variable_norm/{path}", "learning_rate", f"larc_ratio/{path}")
    )
    np.testing.assert_allclose(norms, np.linalg.norm(weights, axis=1), rtol=1e-6)
    expected = 0.01 * norms[1] / (rates[1] * np.sqrt(2) * 2)
    np.testing.assert_allclose(ratios[1], expected, rtol=1e-5)
    # Histograms are rows of (left edge, right edge, count). Those of the variables show
    # the weights before the update, on every backend.
    for (_, buckets), before in zip(events[f"variables/{path}"], weights, strict=True):
        edges = buckets[0, 0], buckets[-1, 1]
        np.testing.assert_allclose(edges, (before.min(), before.max()), rtol=1e-6)
        assert buckets[:, 2].sum() == 2
    for _, buckets in events[f"gradients/{path}"]:
        assert buckets[:, 2].sum() == 2 and np.all(np.isfinite(buckets))
    # An infinite gradient is written as 0.
    _, buckets = events[f"gradients/{path}"][2]
    assert buckets[:, 0].min() <= 0.0 <= buckets[:, 1].max()


@pytest.mark.parametrize(
    "make_loss_scale",
    [
        lambda: None,
        lambda: 128.0,
        lambda: AutomaticLossScaler("LogMax"),
        lambda: keras_lso.loss_scales.LogMaxLossScale(),
    ],
    ids=["none", "number", "AutomaticLossScaler", "LossScale"],
)
def test_mixed_precision_wrapper_trains_float16_model(
    make_loss_scale, make_model, data
):
    x, y = data
    model = make_model("float16")
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer = MixedPrecisionOptimizerWrapper(inner, make_loss_scale())
    assert optimizer.name == "sgd-MP"
    step = keras.Variable(0, dtype="int32", trainable=False)

    def loss():
        error = ops.cast(model(x), "float32") - ops.convert_to_tensor(y)
        return ops.mean(ops.square(error))

    first = float(ops.stop_gradient(loss()))
    for _ in range(60):
        pairs = optimizer.compute_gradients(loss, model.trainable_variables)
        dtypes = {keras.backend.standardize_dtype(g.dtype) for g, _ in pairs}
        assert dtypes == {"float32"}
        optimizer.apply_gradients(pairs, global_step=step)
    assert int(step.numpy()) == int(optimizer.iterations.numpy()) == 60
    assert float(ops.stop_gradient(loss())) < 0.2 * first
    paths = {w.path for w in model.weights}
    masters = [v for v in optimizer.variables if v.path in paths]
    assert len(masters) == 4
    for master, weight in zip(masters, model.trainable_variables, strict=True):
        assert master.dtype == "float32"
        np.testing.assert_array_equal(
            ops.convert_to_numpy(ops.cast(master, "float16")),
            ops.convert_to_numpy(weight),
        )
