"""Starts the processes of a test, and reads their output.

They are forked from one process that has imported Keras and this package, and has
computed nothing yet: importing takes longer than most of their work.
"""

import atexit
import contextlib
import faulthandler
import json
import multiprocessing
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parent.parent
# Seconds. What ends is done in a minute, if nothing else runs: this ends what hangs.
TIMEOUT = 600
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["keras_lso"])


class Worker:
    """A process that runs a program, with the part of `Popen` that tests need."""

    def __init__(self, program, arguments, environment, folder=ROOT):
        self._folder = tempfile.TemporaryDirectory()
        self._files = [pathlib.Path(self._folder.name, f) for f in ("out", "err")]
        settings = (program, arguments, environment, folder, self._files)
        self._process = FORKED.Process(target=_run_program, args=settings)
        self._process.start()

    @property
    def returncode(self):
        return self._process.exitcode

    def kill(self):
        self._process.kill()

    def communicate(self, timeout=None):
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return [file.read_text() for file in self._files]


def _run_program(program, arguments, environment, folder, files):
    """Runs a program in a forked process as `python` would."""
    for number, file in enumerate(files, start=1):
        with open(file, "w") as opened:
            os.dup2(opened.fileno(), number)
    faulthandler.enable()
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = [str(program), *arguments]
    try:
        if isinstance(program, pathlib.Path):
            sys.path[0] = str(program.parent)
            runpy.run_path(str(program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        # A forked process leaves without it.
        atexit._run_exitfuncs()


def free_ports(count):
    """Returns the numbers of free ports, as strings."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("localhost", 0))
        return [str(s.getsockname()[1]) for s in sockets]


def finish(workers, timeout=TIMEOUT):
    """Waits for processes, and returns their outputs.

    It kills all that still run, and fails if one of them failed.
    """
    try:
        outputs = [worker.communicate(timeout=timeout) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, f"exit {worker.returncode}\n{errors}"
    return [printed for printed, _ in outputs]


def run(name, *lists_of_arguments, timeout=TIMEOUT, **environment):
    """Runs a module of this folder once for each list, at the same time.

    Returns the outputs.
    """
    module = f"integration_tests.distributed.{name}"
    workers = [Worker(module, list_, environment) for list_ in lists_of_arguments]
    return finish(workers, timeout)


def run_pair(name, *arguments, **environment):
    """Runs a module as two processes, whose first argument is their rank."""
    arguments = list(map(str, arguments))
    return run(name, *([str(rank), *arguments] for rank in range(2)), **environment)


def lines_of(printed, word):
    """Returns the JSON of the lines that start with a word."""
    lines = [line.split(" ", 1) for line in printed.splitlines()]
    return [json.loads(line[1]) for line in lines if line[0] == word]
