"""Checks that a type checker knows the type of every public name of the package.

    python -m tools.type_completeness

It runs basedpyright's `--verifytypes`, with `tools/typings/` for Keras:
without types of its base classes and decorators it would skip each class that is
registered with Keras.
"""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A program, which is not imported.
_NO_INTERFACE = "keras_lso.__main__."


def report():
    """Returns the JSON of basedpyright, a dict."""
    command = [sys.executable, "-m", "basedpyright", "--verifytypes", "keras_lso"]
    command += ["--ignoreexternal", "--outputjson", "--pythonpath", sys.executable]
    paths = [str(ROOT), str(ROOT / "tools/typings"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    # It exits with 1 if a type is missing, and Python if it has no such module.
    if not done.stdout.startswith("{"):
        raise SystemExit(done.stderr or done.stdout)
    return json.loads(done.stdout)


def messages_of(symbol):
    """Yields a line for each type of a name that is missing or not written down."""
    errors = [d for d in symbol["diagnostics"] if d["severity"] == "error"]
    # An unknown type of a base class is reported for the class that defines it.
    for error in errors or [{"message": "Type unknown"}]:
        line = error["range"]["start"]["line"] + 1 if "range" in error else 0
        file = os.path.relpath(error.get("file", "."), ROOT)
        yield f"{file}:{line}: {symbol['name']}: {error['message']}"


def main():
    found = report()
    symbols = found["typeCompleteness"]["symbols"]
    symbols = [s for s in symbols if not s["name"].startswith(_NO_INTERFACE)]
    lacking = [s for s in symbols if not s["isTypeKnown"] or s["isTypeAmbiguous"]]
    lines = [error["message"] for error in found["generalDiagnostics"]]
    lines += [line for symbol in lacking for line in messages_of(symbol)]
    known = len(symbols) - len(lacking)
    print("\n".join([*lines, f"{known} of {len(symbols)} types are known."]))
    return 1 if lines or not symbols else 0


if __name__ == "__main__":
    sys.exit(main())
