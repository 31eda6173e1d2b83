"""Draws a picture of docs/images/, in light and in dark, of one run of its example.

    python -m tools.pictures log_max [ARGUMENTS OF THE EXAMPLE]

runs examples/log_max.py, and draws its pictures twice: in the style of
tools/light.mplstyle as docs/images/log_max.png, and in that of tools/dark.mplstyle as
docs/images/log_max-dark.png. An example whose results are in
benchmarks/results/ draws those, and does not train again.
"""

import functools
import importlib
import json
import operator
import os
import pathlib
import sys
from unittest import mock

import matplotlib
import matplotlib.style

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES, IMAGES = ROOT / "examples", ROOT / "docs/images"
STYLES = {"": ROOT / "tools/light.mplstyle", "-dark": ROOT / "tools/dark.mplstyle"}
# For examples that train on one backend.
BACKENDS = {"large_batch_digits": "jax"}


def in_both_styles(draw):
    """Returns a function that calls `draw` twice, with the path of each style."""

    def draw_twice(*arguments):
        *results, path = arguments
        name = pathlib.Path(path)
        for suffix, style in STYLES.items():
            path = IMAGES / f"{name.stem}{suffix}.png"
            with matplotlib.style.context(["default", str(style)]):
                draw(*results, path)
            print(f"Drew {path.relative_to(IMAGES.parent.parent)}")

    return draw_twice


def run(name):
    """Runs an example, which draws in both styles."""
    example = importlib.import_module(name)
    written = sorted((ROOT / "benchmarks/results" / name).glob("*.json"))
    draws = [n for n in ("draw", "draw_record") if hasattr(example, n)]
    twice = {n: in_both_styles(getattr(example, n)) for n in draws}
    with mock.patch.multiple(example, **twice):
        if written:
            parts = [json.loads(path.read_text())["results"] for path in written]
            example.draw(functools.reduce(operator.add, parts), name)
        else:
            example.main()


def main(name, *arguments):
    matplotlib.use("Agg")
    os.environ.setdefault("KERAS_BACKEND", BACKENDS.get(name, "torch"))
    path = [str(EXAMPLES), *sys.path]
    with mock.patch.multiple(sys, path=path, argv=[name, *arguments]):
        run(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
