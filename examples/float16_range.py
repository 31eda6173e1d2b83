"""The gradients of a model on float16's number line, unscaled and scaled.

    python examples/float16_range.py [--output .]

The model is the LeNet with sigmoids of `make demo`, after 12 epochs of float32. The
gradients of one batch are computed in float32, for the outputs of all layers but the
last. The backward pass hands these from layer to layer in float16. The script prints
the effect of float16 on the values before and after they are multiplied by 2**15, the
default first loss scale, and draws both histograms into `float16_range.png`.
"""

import argparse
import pathlib

import keras
import matplotlib
import numpy as np
from digits_worker import BATCH_SIZE, LEARNING_RATE, build_model, gradients, load_data

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EPOCHS, SCALE = 12, 2.0**15
COLORS = {"before": "C1", "after": "C0"}  # of matplotlib's style
# The powers of two between which a value lies, what becomes of it, and a colour.
ZONES = (
    (-56, -25, "becomes 0", "tab:red"),
    (-25, -14, "loses bits", "tab:olive"),
    (-14, 16, "has all of its 11 bits", "tab:green"),
    (16, 32, "becomes inf", "tab:red"),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    values = gradient_values()
    for title, scale in (("unscaled", 1.0), ("times 2**15", SCALE)):
        lost, short, infinite = shares(values * scale)
        print(
            f"{title}: {lost:.1%} become 0, {short:.1%} lose bits, "
            f"{infinite:.1%} become inf"
        )
    draw(values, output / "float16_range.png")
    print(f"{len(values):,} values. Wrote {output / 'float16_range.png'}")


def gradient_values(epochs=EPOCHS):
    """Returns the magnitudes of the gradients that are not zero in float32."""
    (images, labels), _ = load_data()
    model = build_model(0, "float32")
    model.compile(keras.optimizers.Adam(LEARNING_RATE), loss="mean_squared_error")
    model.fit(images, labels, batch_size=BATCH_SIZE, epochs=epochs, verbose=0)
    probed = [keras.Input(batch_shape=(BATCH_SIZE, *images.shape[1:]))]
    for layer in model.layers[:-1]:
        probed += [layer, Probe()]
    model = keras.Sequential([*probed, model.layers[-1]])
    found = gradients(model, (images[:BATCH_SIZE], labels[:BATCH_SIZE]))
    names = [variable.path for variable in model.trainable_variables]
    parts = [g.ravel() for g, name in zip(found, names, strict=True) if "zero" in name]
    values = np.abs(np.concatenate(parts))
    return values[values > 0]


class Probe(keras.layers.Layer):
    """Adds zeros to the output of a layer: their gradient is that of the output."""

    def build(self, shape):
        self.zero = self.add_weight(shape=shape, initializer="zeros", name="zero")

    def call(self, inputs):
        return inputs + self.zero


def shares(values):
    """Returns which share float16 makes 0, holds with fewer bits, and makes inf."""
    with np.errstate(over="ignore"):
        halves = values.astype("float16")
    lost, infinite = halves == 0, np.isinf(halves)
    short = ~lost & (halves < np.finfo("float16").smallest_normal)
    return lost.mean(), short.mean(), infinite.mean()


def draw(values, path):
    figure, axes = plt.subplots(
        2, 1, figsize=(6.4, 4.8), sharex=True, sharey=True, layout="constrained"
    )
    low, high = ZONES[0][0], ZONES[-1][1]
    parts = (("before", "loss", 1.0), ("after", "loss * 2**15", SCALE))
    for axis, (name, loss, scale) in zip(axes, parts, strict=True):
        exponents = np.log2(values * scale)
        axis.hist(exponents, bins=np.arange(low, high + 1), color=COLORS[name])
        lost, short, _ = shares(values * scale)
        title = f"gradients of {loss}: {lost:.0%} become 0, {short:.0%} lose bits"
        axis.set_title(title, fontsize=11)
        draw_zones(axis)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_ylabel("values")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(top=1.15 * axes[0].get_ylim()[1])
    ticks = np.arange(-48, high, 16)
    axes[1].set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    axes[1].set_xlim(low, high)
    axes[1].set_xlabel("magnitude of a gradient, and what float16 makes of it")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_zones(axis):
    for low, high, text, color in ZONES:
        axis.axvspan(low, high, color=color, alpha=0.2, linewidth=0, zorder=0)
        axis.annotate(
            text,
            ((low + high) / 2, 1.0),
            xycoords=axis.get_xaxis_transform(),
            xytext=(0, -12),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
        )


if __name__ == "__main__":
    main()
