"""Holds that a type checker knows the type of every public name of the package.

    python -m tools.type_completeness

It runs basedpyright's `--verifytypes`, as Pyright has it, and prints what is not known.
The checker takes what is Keras's for what `tools/typings/` says: neither base classes
nor decorators of Keras have types of their own, and without any it would look into no
class that is registered with Keras.
"""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "keras_lso"
# It is run, and nobody imports it.
_NO_INTERFACE = "keras_lso.__main__."


def report():
    """Returns what basedpyright found, the dict of its JSON."""
    command = ["--verifytypes", PACKAGE, "--ignoreexternal", "--outputjson"]
    command += ["--pythonpath", sys.executable]
    found = os.environ.get("PYTHONPATH")
    paths = [str(ROOT), str(ROOT / "tools/typings"), *([found] if found else [])]
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    # It exits with 1 if a type is missing, and Python if it has no such module.
    if not done.stdout.startswith("{"):
        raise SystemExit(done.stderr or done.stdout)
    return json.loads(done.stdout)


def symbols_of(found):
    """Returns the names that users see, and those that these lead to."""
    symbols = found["typeCompleteness"]["symbols"]
    return [s for s in symbols if not s["name"].startswith(_NO_INTERFACE)]


def is_complete(symbol):
    return symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]


def messages(found):
    """Yields a line for each type that is missing, or that is not written down."""
    for symbol in symbols_of(found):
        if not is_complete(symbol):
            yield from _messages_of(symbol)


def _messages_of(symbol):
    errors = [d for d in symbol["diagnostics"] if d["severity"] == "error"]
    # What is unknown of a base class is said of the class where it is.
    for error in errors or [{"message": "Type unknown"}]:
        place = ""
        if error.get("file") and "range" in error:
            file = os.path.relpath(error["file"], ROOT)
            place = f"{file}:{error['range']['start']['line'] + 1}: "
        yield f"{place}{symbol['name']}: {error['message']}"


def main():
    found = report()
    for error in found["generalDiagnostics"]:
        print(error["message"])
    symbols, missing = symbols_of(found), list(messages(found))
    known = sum(map(is_complete, symbols))
    print("\n".join([*missing, f"{known} of {len(symbols)} types are known."]))
    return 1 if missing or not symbols or found["generalDiagnostics"] else 0


if __name__ == "__main__":
    sys.exit(main())
