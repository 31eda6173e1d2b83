"""The effect of float16 on a small network's gradients, at each loss scale.

python examples/underflow.py [PICTURE]
"""

import sys

import keras
import matplotlib
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import keras_lso

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb

keras.utils.set_random_seed(0)

digits = load_digits()
images = (digits.images[..., None] / 16).astype("float32")
labels = keras.utils.to_categorical(digits.target, 10)

# Sigmoids make gradients smaller from layer to layer, and so the first ones tiny. The
# squared error, a mean over ten classes, begins with gradients that are small already.
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(8, 3, activation="sigmoid", name="conv"),
        layers.BatchNormalization(name="norm"),
        layers.Flatten(name="flatten"),
        layers.Dense(32, activation="sigmoid", name="hidden_1"),
        layers.Dense(32, activation="sigmoid", name="hidden_2"),
        layers.Dense(32, activation="sigmoid", name="hidden_3"),
        layers.Dense(10, activation="softmax", name="output"),
    ]
)


def main():
    model.compile("adam", loss="mean_squared_error")

    report = keras_lso.underflow_report(model, images, labels)
    print(report)
    path = sys.argv[1] if len(sys.argv) > 1 else "underflow.png"
    draw(report, path)
    print(f"Wrote {path}")


def draw(report, path):
    """Draws the shares of each layer's gradients that are lost, against the scale."""
    names, counts = list(report.layers), report.layers.values()
    figure, axis = plt.subplots(
        figsize=(6.4, 1.3 + 0.24 * len(names)), layout="constrained"
    )
    # A subnormal value keeps some of its digits, so it counts half.
    lost = np.array([np.add(c.flushed, np.divide(c.subnormal, 2)) for c in counts])
    overflowing = np.array([c.overflowing for c in counts])
    # The square root makes a share of 1% visible. The rest is transparent.
    for shares, color in ((lost, "C0"), (overflowing, "C1")):
        cells = np.empty((*shares.shape, 4))
        cells[..., :3], cells[..., 3] = to_rgb(color), np.sqrt(shares)
        axis.imshow(cells, aspect="auto", interpolation="nearest")
    exponents = np.log2(report.scales)
    labels = [f"$2^{{{exponent:g}}}$" for exponent in exponents]
    axis.set_xticks(range(0, len(labels), 2), labels[::2])
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xlabel("loss scale")
    axis.spines[["top", "right"]].set_visible(False)
    if report.safe_scales:
        ends = np.interp(np.log2(report.safe_scales), exponents, range(len(exponents)))
        axis.plot(ends, [-0.62] * 2, color="C2", linewidth=4, clip_on=False)
    for color, label in {
        "C0": "flushed to zero, or subnormal (fainter)",
        "C1": "overflow",
        "C2": "safe for all layers",
    }.items():
        axis.plot([], [], color=color, linewidth=4, label=label)
    figure.legend(frameon=False, fontsize=8, loc="outside upper left", ncols=3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
