"""Where a small Transformer does not fit into float16, and that it trains without.

python examples/float16_report.py [PICTURE]
"""

import sys

import keras
import matplotlib
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

import keras_lso

matplotlib.use("Agg")
import matplotlib.pyplot as plt

keras.utils.set_random_seed(0)
keras.config.set_dtype_policy("mixed_float16")

digits = load_digits()
rows, labels = digits.images.astype("float32"), digits.target

# Each row of an image is a token of 8 pixels from 0 to 16. Nobody normalizes them, so
# that the products of queries and keys are large; and a norm of one's own squares them.
inputs = keras.Input((8, 8))
tokens = layers.Dense(32, kernel_initializer="he_normal", name="embedding")(inputs)
start = keras.initializers.RandomNormal(stddev=1.0)
attention = layers.MultiHeadAttention(
    2, 16, kernel_initializer=start, dropout=0.1, name="attention"
)


class RootMeanSquare(layers.Layer):
    """A normalization that computes in the dtype of its layer."""

    def call(self, x):
        return x / ops.sqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + 1e-3)


values = RootMeanSquare(name="norm")(tokens + attention(tokens, tokens))
mlp = keras.Sequential(
    [layers.Dense(64, activation="gelu", name="wide"), layers.Dense(32, name="narrow")],
    name="mlp",
)
pooled = layers.GlobalAveragePooling1D(name="pool")(values + mlp(values))
logits = layers.Dense(10, dtype="float32", name="logits")(pooled)
model = keras.Model(inputs, logits, name="transformer")
model.compile(
    keras_lso.LossScaleOptimizer(keras.optimizers.Adam(1e-3)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)


def main():
    report = keras_lso.float16_report(model, rows[:256], labels[:256])
    print(report)
    for name, trained in (("as it was", model), ("applied", report.apply(model))):
        logs = trained.fit(rows, labels, epochs=5, batch_size=64, verbose=0).history
        skipped = int(trained.optimizer.skipped_steps)
        print(f"{name}: loss {logs['loss'][-1]:.3f}, {skipped} steps skipped")
    path = sys.argv[1] if len(sys.argv) > 1 else "float16_report.png"
    draw(report, path)
    print(f"Wrote {path}")


def draw(report, path):
    """Draws what each layer holds next to the range of float16, and its gradients."""
    names, ranges = list(report.layers), report.layers.values()
    figure, (peaks, flushed) = plt.subplots(
        1,
        2,
        sharey=True,
        figsize=(6.4, 1.5 + 0.26 * len(names)),
        width_ratios=(3, 1.2),
        layout="constrained",
    )
    draw_peaks(peaks, ranges)
    shares = [r.gradients.flushed[0] if r.gradients else 0.0 for r in ranges]
    bars = flushed.barh(range(len(names)), shares, color="C1")
    flushed.bar_label(bars, [f"{v:.0%}" if v else "" for v in shares], padding=2)
    flushed.set_xlim(0, 1)
    flushed.set_xticks([])
    exponent = f"{np.log2(report.loss_scale):g}"
    flushed.set_xlabel(f"gradients that\nbecome 0 at $2^{{{exponent}}}$")
    peaks.set_yticks(range(len(names)), names)
    peaks.set_ylim(len(names) - 0.5, -0.5)
    for axis in (peaks, flushed):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.33, linewidth=0.6)
    for found, label in zip(ranges, peaks.get_yticklabels(), strict=True):
        if found.reasons:
            label.set(color="C1", fontweight="bold")
    figure.legend(frameon=False, loc="outside upper left", ncols=3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_peaks(axis, ranges):
    """Draws the largest magnitude of all that a layer holds, of each kind."""
    largest = []
    for kind, marker, size in (
        ("inputs", "|", 9),
        ("weights", "s", 3),
        ("ops", "x", 5),
        ("outputs", "o", 6),
    ):
        points = []
        for row, found in enumerate(ranges):
            values = getattr(found, kind)
            values = values.values() if kind == "ops" else [values]
            points += [(m.largest, row) for m in values if m and m.is_float16]
        largest += [magnitude for magnitude, _ in points]
        # Hollow markers do not hide the ones below.
        axis.plot(
            *zip(*points, strict=True),
            marker,
            color=plt.rcParams["text.color"],
            markersize=size,
            markerfacecolor="none",
            label=kind,
        )
    high = 4 * max(*largest, 65504.0)
    axis.set_xscale("log", base=2)
    axis.set_xlim(min(largest) / 4, high)
    label = "becomes inf in float16"
    axis.axvspan(65504.0, high, color="C1", alpha=0.25, linewidth=0, label=label)
    axis.set_xlabel("largest magnitude in float32")


if __name__ == "__main__":
    main()
