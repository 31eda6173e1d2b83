"""The command `keras-lso info`, also `python -m keras_lso info`."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status.

    Args:
        argv: List of strings, the arguments of the command. Defaults to `None`: those
            of the process.
    """
    parser = argparse.ArgumentParser(
        prog="keras-lso", description="Prints the facts for a bug report."
    )
    parser.add_argument(
        "command",
        choices=["info"],
        help="the versions, the backend, the devices and the kind of step of each "
        "optimizer",
    )
    parser.parse_args(argv)

    from keras_lso.diagnostics.info import print_info

    print_info()
    return 0


if __name__ == "__main__":
    sys.exit(main())
