"""Runs code in forks of a process that has imported Keras, but not this package.

Tests of the package's import use it: importing Keras and a framework takes longer than
all these tests. The process is started with

    python -m testing.forked

and reads its orders from standard input, one JSON object per line.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback

ROOT = pathlib.Path(__file__).parent.parent


def run(code, backend, **environment):
    """Runs code as `python -c` would, after `import keras`."""
    server = _start(backend)
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, name) for name in ("out", "err")]
        order = [code, environment, [str(file) for file in files]]
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            raise RuntimeError("The process that is forked has died.")
        printed = [file.read_text() for file in files]
    return subprocess.CompletedProcess(code, int(answer), *printed)


@functools.cache
def _start(backend):
    """Starts the process. It ends when its input ends, with this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "testing.forked"],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Frameworks print greetings there.
        stderr=subprocess.DEVNULL,
        text=True,
    )


def main():
    # The children find the package as `python -c` does.
    sys.path[0] = ""
    import keras  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if not child:
            _become(*json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(code, environment, files):
    """Runs code in a forked process as `python -c` would."""
    exit_code = 1
    try:
        for number, file in enumerate(files, start=1):
            with open(file, "w") as opened:
                os.dup2(opened.fileno(), number)
        os.environ.update(environment)
        exec(code, {"__name__": "__main__"})
        exit_code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


if __name__ == "__main__":
    main()
