"""Runs an example that compares, and records its results for the documentation.

    KERAS_BACKEND=jax python -m benchmarks.of_example bfloat16_transformer

runs `examples/bfloat16_transformer.py`, which writes its results and pictures into
`build/bfloat16_transformer/`, and copies the results into `benchmarks/results/`.
Further arguments are the example's.
"""

import pathlib
import shlex
import subprocess
import sys

import keras

from benchmarks import evidence, machine

ROOT = pathlib.Path(__file__).parents[1]


def main(name, *arguments):
    """Runs the example, and writes the file."""
    backend, folder = keras.backend.backend(), ROOT / "build" / name
    program = str(ROOT / "examples" / f"{name}.py")
    subprocess.run(
        [sys.executable, program, *arguments, "--output", str(folder)], check=True
    )
    command = shlex.join(["python", "-m", "benchmarks.of_example", name, *arguments])
    part = "_".join([backend, *(a.strip("-") for a in arguments)])
    evidence.write(
        evidence.RESULTS / name / f"{part}.json",
        f"KERAS_BACKEND={backend} {command}",
        machine.facts(backend),
        evidence.read(folder / f"{name}.json"),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
