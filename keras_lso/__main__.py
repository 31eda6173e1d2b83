"""The command `keras-lso info`, also `python -m keras_lso info`."""

import argparse
import importlib.util
import sys
import textwrap
from collections.abc import Sequence

from keras_lso._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with arguments, or the process's, and returns its status."""
    parser = argparse.ArgumentParser(
        prog="keras-lso",
        description="Prints the facts for a bug report.",
        epilog="Exit status: 2 if an argument is wrong, 3 if Keras cannot be imported.",
    )
    help = "the versions, the backend, the devices and the step of each optimizer"
    parser.add_argument("command", choices=["info"], help=help)
    version = f"%(prog)s {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.parse_args(argv)
    try:
        # Only now: it takes seconds, and fails where Keras's backend is missing.
        import keras  # noqa: F401
    except Exception as error:
        found = filter(importlib.util.find_spec, ("jax", "tensorflow", "torch"))
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        print(
            f"keras-lso: Keras cannot be imported ({cause}). Set the environment "
            "variable KERAS_BACKEND to a backend that is installed: "
            f"{', '.join(found) or 'none of jax, tensorflow and torch'}.",
            file=sys.stderr,
        )
        return 3
    # Before our other modules, which an unsupported version of Keras could break.
    importlib.import_module("keras_lso._keras_internals.keras_version")
    from keras_lso import _info

    lines = textwrap.TextWrapper(80, subsequent_indent=" " * 11, break_on_hyphens=False)
    for name, value in _info.facts().items():
        print(lines.fill(f"{name:<10} {value}"))
    print("\ninner optimizer      step in LossScaleOptimizer, with float32 variables")
    for name, step in _info.steps().items():
        print(f"{name:<20} {step}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
