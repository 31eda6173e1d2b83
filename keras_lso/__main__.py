"""The command `keras-lso`, also `python -m keras_lso`.

Its subcommands are in `diagnostics/info.py`, `compat/saved_files.py` and
`compat/precision_command.py`, which are imported when they are used.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence

_EXIT_STATUS = """\
exit status:
  0  success; report: every layer fits into float16
  1  report: layers must stay in float32, or a value is inf or NaN
  2  an argument is wrong, or a file cannot be read or written
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status.

    Args:
        argv: List of strings, the arguments of the command. Defaults to `None`: those
            of the process.
    """
    arguments = _parser().parse_args(argv)
    _escape_unencodable()
    try:
        status = arguments.run(arguments)
        # Here rather than at exit, where Python reports a closed pipe.
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # As rich does with the tables of `info`.
        _discard_output()
        return 1
    except (OSError, ValueError) as error:
        from keras_lso.diagnostics.tables import printable

        # One line, whatever text of a file is in it.
        line = printable(" ".join(str(error).split()))
        print(f"keras-lso: error: {line}", file=sys.stderr)
        return 2


def _discard_output():
    """Lets Python discard what the standard output still holds in its buffer."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _escape_unencodable():
    """Lets the standard output escape the characters that its encoding lacks.

    Names of files and layers may contain any character.
    """
    # Another handler is the user's choice, and a program may have replaced the stream.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _parser():
    parser = argparse.ArgumentParser(
        prog="keras-lso",
        description="Loss scaling for Keras 3. Prints the facts for a bug report, the "
        "contents of a saved\nfile, or the effect of float16 on a saved model.",
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info = commands.add_parser(
        "info",
        help="print the facts for a bug report",
        description="Prints the versions, the backend, the devices and the kind of "
        "step of each optimizer.",
    )
    info.set_defaults(run=_info)
    _add_show(commands)
    _add_report(commands)
    return parser


def _add_show(commands):
    show = commands.add_parser(
        "show",
        help="print the contents of a saved model or of saved weights",
        description="Prints the loss scale, the counters, the dtype policies and the "
        "master weights in a file. Creates no model, and runs no code from the file.",
    )
    show.add_argument("file", metavar="FILE", help=".keras, .h5 or .weights.h5")
    show.add_argument("--json", action="store_true", help="print the contents as JSON")
    show.set_defaults(run=_show)


def _add_report(commands):
    report = commands.add_parser(
        "report",
        help="print the effect of float16 on a saved model, and a dtype policy for it",
        description="Loads a model in safe mode, and runs it on a batch. Prints the "
        "report on float16,\nthe report on gradients, and the recommendation.",
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("model", metavar="MODEL", help=".keras or .h5")
    report.add_argument(
        "batch",
        metavar="BATCH",
        help=".npz with x, y and sample_weight; with an x_NAME for each of several "
        "inputs, and a y_NAME for each of several targets",
    )
    report.add_argument(
        "--hardware",
        default="auto",
        metavar="H",
        help="cpu, tpu, gpu:7.5 (with the compute capability) or auto, the default: "
        "the hardware of this machine",
    )
    report.add_argument("--json", metavar="PATH", help="write all results to this file")
    report.set_defaults(run=_report)


def _info(arguments):
    from keras_lso.diagnostics.info import print_info

    print_info()
    return 0


def _show(arguments):
    from keras_lso.compat.saved_files import contents_of

    found = contents_of(arguments.file)
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else found)
    return 0


def _report(arguments):
    from keras_lso.compat.precision_command import precision_of

    found = precision_of(arguments.model, arguments.batch, arguments.hardware)
    try:
        if arguments.json is not None:
            found.write(arguments.json)
    finally:
        # The results are not lost if the file cannot be written.
        print(found)
    return 1 if found.has_findings else 0


if __name__ == "__main__":
    sys.exit(main())
