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

# What float16 makes of a gradient, and how that is drawn.
LOSSES = {
    "flushed": ("become 0", "C1", 1.0),
    "overflowing": ("become inf", "C3", 1.0),
    "subnormal": ("lose bits", "C0", 0.4),
}


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
        figsize=(6.4, 1.6 + 0.3 * len(names)), layout="constrained"
    )
    exponents = np.log2(report.scales)
    width = np.diff(exponents).min()
    for row, found in enumerate(counts):
        # A cell is filled from below.
        bottom = np.full(len(exponents), row + 0.45)
        for kind, (label, color, alpha) in LOSSES.items():
            shares = 0.9 * np.array(getattr(found, kind))
            style = {"color": color, "alpha": alpha, "label": None if row else label}
            axis.bar(exponents, -shares, width, bottom, **style)
            bottom -= shares
    if report.safe_scales:
        low, high = np.log2(report.safe_scales)
        ends = max(low, exponents[0]), min(high, exponents[-1])
        safe = {"color": "C2", "label": "safe: at most 1% become 0, none inf"}
        axis.plot(ends, [-0.62] * 2, linewidth=4, clip_on=False, **safe)
    axis.set_xticks(exponents[::2], [f"$2^{{{e:g}}}$" for e in exponents[::2]])
    axis.set_yticks(range(len(names)), names)
    axis.set_xlim(exponents[0] - width / 2, exponents[-1] + width / 2)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set(xlabel="loss scale", ylabel="gradients of a layer that ...")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper left", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
