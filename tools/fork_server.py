"""A process that imports slow packages, and forks a process for each run of tests.

Importing Keras and a framework takes longer than most tests. This process must not
import the package under test: each run has its own copy of it.

    python -m tools.fork_server keras torch

It reads runs from its input and writes what came of them to its output, a JSON object a
line each. It needs `os.fork`, before which no framework may have started a thread.
"""

import contextlib
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

# `os.waitid` is asked as often, in seconds.
_TICK = 0.02


# --- From outside -------------------------------------------------------------


class ForkServer:
    """Starts the process, and asks it for runs, one at a time."""

    def __init__(self, modules, environment):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.fork_server", *modules],
            cwd=pathlib.Path(__file__).parent.parent,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Where frameworks greet.
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, folder, arguments, timeout):
        """Runs pytest in a folder.

        Returns:
            Dict. `code`: what pytest returned, None if it did not come so far. `test`:
            the first test that failed, and `seconds`: how long that took. `error`: why
            tests could not be collected. `is_late`: whether time was up.
        """
        order = {"folder": str(folder), "arguments": arguments, "timeout": timeout}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("The process that the tests are forked from has died.")
        return json.loads(answer)

    def close(self):
        self._process.stdin.close()
        self._process.wait()


# --- The process that forks ---------------------------------------------------


def main(modules):
    for name in modules:
        importlib.import_module(name)
    # What children print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_fork(**json.loads(line))), file=answers, flush=True)


def _fork(folder, arguments, timeout):
    reader, writer = os.pipe()
    begin = time.monotonic()
    child = os.fork()
    if not child:
        os.close(reader)
        # A group of its own, for the processes that tests start.
        os.setsid()
        _run(folder, arguments, writer, begin)
    os.close(writer)
    is_late = not _wait(child, begin + timeout)
    # The child, which nobody has waited for yet, keeps the number from being another's.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader) as results:
        written = results.read()
    result = json.loads(written) if written else {"code": None, "test": "", "error": ""}
    return {"seconds": time.monotonic() - begin, **result, "is_late": is_late}


def _wait(child, until):
    """Whether the child has ended in time."""
    while time.monotonic() < until:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        time.sleep(_TICK)
    return False


# --- Its children -------------------------------------------------------------


def _run(folder, arguments, writer, begin):
    try:
        os.chdir(folder)
        sys.path[0] = os.environ["PYTHONPATH"] = folder
        watcher = _Watcher(begin)
        code = int(pytest.main(arguments, plugins=[watcher]))
        with os.fdopen(writer, "w") as results:
            json.dump({"code": code, **watcher.found}, results)
    finally:
        # Past what a framework, or Python, would do at the end of this process.
        os._exit(0)


class _Watcher:
    """A plugin of pytest that remembers what failed first, and when."""

    def __init__(self, begin):
        self._begin = begin
        self.found = {"test": "", "error": ""}

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.found["test"]:
            self.found["test"] = report.nodeid
            self.found["seconds"] = time.monotonic() - self._begin

    def pytest_collectreport(self, report):
        if report.failed:
            self.found["error"] = str(report.longrepr).strip().splitlines()[-1]


if __name__ == "__main__":
    main(sys.argv[1:])
