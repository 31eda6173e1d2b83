"""The effect of one overflow on OpenSeq2Seq's LogMax and on that of keras_lso.

    python examples/log_max.py [--output .]

Both see the same gradients. Only the largest magnitude matters: its logarithm is
normally distributed, and one step overflows. No model is trained. The script prints
the results and draws the scales into `log_max.png`.
"""

import argparse
import pathlib

import keras
import matplotlib
import numpy as np

from keras_lso.loss_scales import LogMaxLossScale

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS, OVERFLOW = 20_000, 1_000
MEAN, DEVIATION = 2.0, 1.0  # of log2 of the largest magnitude

# "C0" and "C1" are the first colours of matplotlib's style.
STYLES = {
    False: {"label": "LogMaxLossScale()", "color": "C0"},
    True: {"label": "LogMaxLossScale(original_overflow=True)", "color": "C1"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    scales = {original: trace(original) for original in STYLES}
    for original, values in scales.items():
        print(f"{STYLES[original]['label']}: {describe(values)}")
    draw(scales, output / "log_max.png")


def trace(original_overflow, steps=STEPS):
    """Returns the scale of each step."""
    amax = 2 ** np.random.default_rng(0).normal(MEAN, DEVIATION, steps)
    policy = LogMaxLossScale(original_overflow=original_overflow)
    policy.build()
    scales = []
    for step, magnitude in enumerate(amax):
        scales.append(float(policy()))
        finite = step != OVERFLOW
        policy.step(finite, keras.ops.convert_to_tensor(magnitude, dtype="float32"))
    return np.array(scales)


def describe(scales):
    before = np.median(scales[OVERFLOW - 200 : OVERFLOW])
    after = scales[OVERFLOW + 1 :]
    return (
        f"{before:.0f} before the overflow and {after[0]:.0f} after it; at its lowest "
        f"for {np.sum(after == 1.0):,} steps, below half of {before:.0f} for "
        f"{np.sum(after < before / 2):,}; {scales[-1]:.0f} at the end"
    )


def draw(scales, path):
    figure, axis = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    for original, values in scales.items():
        axis.plot(values, linewidth=1.4, **STYLES[original])
    ink = plt.rcParams["text.color"]
    axis.axvline(OVERFLOW, color=ink, linewidth=0.8, linestyle=":")
    axis.annotate(
        "one step overflows",
        (OVERFLOW, 1.0),
        xycoords=axis.get_xaxis_transform(),
        xytext=(4, -10),
        textcoords="offset points",
        fontsize=9,
    )
    axis.set_yscale("log", base=2)
    axis.set_xlabel("step")
    axis.set_ylabel("loss scale")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc=(0.1, 0.45))
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
