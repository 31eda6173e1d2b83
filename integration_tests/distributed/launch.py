"""Starts the processes of a test, and reads what they print."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys

import keras

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parent.parent
# Seconds. What ends is done in a minute, if nothing else runs: this ends what hangs.
TIMEOUT = 600


def free_ports(count):
    """Returns numbers of ports that nobody listens on, as strings."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("localhost", 0))
        return [str(s.getsockname()[1]) for s in sockets]


def start(name, *arguments, **environment):
    """Starts `name`, a module of this folder, on the backend of this process."""
    return subprocess.Popen(
        [sys.executable, "-m", f"integration_tests.distributed.{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": keras.backend.backend(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(workers, timeout=TIMEOUT):
    """Waits for processes; returns what each has printed.

    None of them outlives this, and the first that failed fails the test.
    """
    try:
        outputs = [worker.communicate(timeout=timeout) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors
    return [printed for printed, _ in outputs]


def run(name, *lists_of_arguments, timeout=TIMEOUT, **environment):
    """Runs a module once for each list, at the same time; returns what they print."""
    workers = [
        start(name, *arguments, **environment) for arguments in lists_of_arguments
    ]
    return finish(workers, timeout)


def lines_of(printed, word):
    """Returns what JSON the lines hold that start with a word."""
    lines = [line.split(" ", 1) for line in printed.splitlines()]
    return [json.loads(line[1]) for line in lines if line[0] == word]
