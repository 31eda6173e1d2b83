"""Times a step that two participants make together: replicas, devices or processes.

They share the cores of a machine, so the milliseconds are no guide to a cluster. What
loss scaling adds to the step of the bare inner optimizer is.

    KERAS_BACKEND=torch python -m benchmarks.participants --inner Adam --rounds 10

It prints JSON. Engines must be set up before a framework starts: `measure.py` runs this
in a process of its own.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys

from benchmarks.timing import summarize

PARTICIPANTS = 2
INNER = ("SGD+momentum", "Adam", "LARS")


def measure(backend, shapes, inner, rounds):
    """Returns the rows of a backend in groups, for each engine and inner optimizer."""
    command = [sys.executable, "-m", "benchmarks.participants", "--shapes", shapes]
    command += ["--inner", *inner, "--rounds", str(rounds)]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return {"number": PARTICIPANTS, "groups": json.loads(run.stdout.splitlines()[-1])}


def optimizers(make_inner):
    """Returns each row's role, and its optimizer."""
    import keras

    import keras_lso

    return {
        "inner alone": ("inner", make_inner()),
        "Keras's wrapper": ("keras", keras.optimizers.LossScaleOptimizer(make_inner())),
        "keras_lso": ("ours", keras_lso.LossScaleOptimizer(make_inner())),
    }


def make_group(engine, inner, shapes, roles, seconds):
    """Returns a group as the tables want it.

    Args:
        engine: String, what brings the participants together.
        inner: String, the name of the inner optimizer.
        shapes: String, the name of the shapes.
        roles: Dict of the rows' names to their roles.
        seconds: What `time_in_turn` returned.
    """
    rows = [
        {"name": name, "role": role, **summarize(seconds[name])}
        for name, role in roles.items()
    ]
    return {"engine": engine, "inner": inner, "shapes": shapes, "rows": rows}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default="resnet50")
    parser.add_argument("--inner", nargs="+", default=INNER)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    engine = importlib.import_module(f"benchmarks.participants_{backend}")
    print(json.dumps(engine.measure(options.shapes, options.inner, options.rounds)))


if __name__ == "__main__":
    main()
