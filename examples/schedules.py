"""The learning rates of the schedules, at the same rate and the same length.

    python examples/schedules.py [--output .]

No model is trained. Prints the rate at the middle and at the end of the run, and draws
`schedules.png`: a panel for each class.
"""

import argparse
import pathlib

import keras
import matplotlib
import numpy as np
from keras import ops

from keras_lso.schedules import (
    Cyclical,
    InverseSquareRoot,
    JoinedSchedules,
    LinearWarmup,
    OneCycle,
    WarmupCosine,
    WarmupStableDecay,
)

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RATE, WARMUP, STEPS = 1e-3, 1_000, 10_000
DECAY = STEPS - WARMUP


def stable(decay, end=0.0):
    return WarmupStableDecay(RATE, WARMUP, 6_000, 3_000, decay, end)


def polynomial(power):
    decay = keras.optimizers.schedules.PolynomialDecay(RATE, DECAY, 0.0, power)
    return JoinedSchedules([LinearWarmup(RATE, WARMUP), decay], [WARMUP])


# By the name of the class: its arguments, as the legend has them, and the schedule.
PANELS = {
    "WarmupCosine": {
        "default": WarmupCosine(RATE, WARMUP, DECAY),
        "end_learning_rate=1e-4": WarmupCosine(RATE, WARMUP, DECAY, 1e-4),
    },
    "WarmupStableDecay": {
        'decay="1-sqrt"': stable("1-sqrt"),
        '"linear"': stable("linear"),
        '"cosine"': stable("cosine"),
        '"exponential", to 1e-5': stable("exponential", 1e-5),
    },
    "InverseSquareRoot": {
        "default": InverseSquareRoot(RATE, WARMUP),
        "timescale=5_000": InverseSquareRoot(RATE, WARMUP, 5_000),
    },
    "OneCycle": {
        "default": OneCycle(RATE, STEPS),
        'anneal="linear"': OneCycle(RATE, STEPS, anneal="linear"),
    },
    "Cyclical": {
        'mode="triangular"': Cyclical(RATE / 10, RATE, 1_000),
        '"triangular2"': Cyclical(RATE / 10, RATE, 1_000, "triangular2"),
        '"exponential", gamma=0.9998': Cyclical(
            RATE / 10, RATE, 1_000, "exponential", 0.9998
        ),
    },
    "JoinedSchedules": {
        "PolynomialDecay, power=1.0": polynomial(1.0),
        "power=2.0": polynomial(2.0),
        "power=0.5": polynomial(0.5),
    },
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("."))
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    panels = {name: rates_of(schedules) for name, schedules in PANELS.items()}
    for name, curves in panels.items():
        for label, rates in curves.items():
            middle, end = rates[STEPS // 2], rates[-1]
            print(f"{name}, {label}: {middle:.1e} at the middle, {end:.1e} at the end")
    draw(panels, output / "schedules.png")


def rates_of(schedules):
    """Returns the rates of all steps of each schedule. One call computes them."""
    steps = ops.convert_to_tensor(np.arange(STEPS + 1, dtype="int32"))
    return {
        label: ops.convert_to_numpy(schedule(steps))
        for label, schedule in schedules.items()
    }


def draw(panels, path):
    figure, axes = plt.subplots(
        2, 3, figsize=(10.5, 5.6), sharex=True, sharey=True, layout="constrained"
    )
    thousands = np.arange(STEPS + 1) / 1_000
    for axis, (name, curves) in zip(axes.flat, panels.items(), strict=True):
        for i, (label, rates) in enumerate(curves.items()):
            axis.plot(thousands, 1e3 * rates, color=f"C{i}", label=label, linewidth=1.5)
        axis.set_title(name, fontsize=9.5)
        # The legend is above the curves.
        axis.set(xlim=(0, STEPS / 1_000), ylim=(0, 1.55e3 * RATE))
        axis.set_yticks([0.0, 0.5, 1.0])
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, loc="upper right")
    for axis in axes[-1]:
        axis.set_xlabel("step in thousands")
    for axis in axes[:, 0]:
        axis.set_ylabel("rate in thousandths")
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
