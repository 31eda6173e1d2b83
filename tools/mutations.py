"""Breaks the package in one small way at a time, and looks who notices.

Each fault is one of those in `tools/faults/`. It is made in a copy of the checkout, in
which the tests that should see it run as `make test` runs them. A fault that survives
is one that a commit could bring in unseen.
"""

import argparse
import contextlib
import itertools
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from tools import faults
from tools.fork_server import ForkServer

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What a run under a backend imports first.
MODULES = {
    "tensorflow": ("keras", "tensorflow"),
    "jax": ("keras", "jax"),
    "torch": ("keras", "torch"),
}
# Under `make test` the cases of an `in_turn` test take turns between the backends. Here
# all cases run under the backend that the fault names.
PYTEST = ["-x", "-q", "-p", "no:cacheprovider", "--all-turns"]
# They would make another run than that of `make test`.
NOT_HANDED_ON = {"HYPOTHESIS_PROFILE", "KERAS_LSO_KERNELS", "PYTEST_ADDOPTS"}

KILLED, SURVIVED, TIMEOUT = "killed", "survived", "killed by timeout"
# These say something about the fault, and nothing about the tests.
AT_IMPORT, NO_TEST = "killed at import", "no test ran"


class Verdict(NamedTuple):
    """What came of a fault."""

    outcome: str
    test: str = ""
    """The first test that failed, or what else there is to say."""
    seconds: float = 0.0
    """Until it failed, from when the process was there and had imported Keras."""


# --- A copy of the checkout ---------------------------------------------------


def copy_checkout(root, folder):
    """Copies what git tracks, and what is new, with all that is not committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, target = pathlib.Path(root, name), pathlib.Path(folder, name)
        # One that was deleted and not committed is listed as well.
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


@contextlib.contextmanager
def broken(folder, fault):
    """Makes a fault in a copy, and mends it afterwards."""
    path = pathlib.Path(folder, fault.file)
    sound = path.read_text()
    if sound.count(fault.old) != 1:
        raise ValueError(
            f"{fault.name!r} replaces what occurs {sound.count(fault.old)} times in "
            f"{fault.file}, and should once."
        )
    _write(path, sound.replace(fault.old, fault.new))
    try:
        yield
    finally:
        _write(path, sound)


def _write(path, source):
    path.write_text(source)
    # Python takes the bytecode of another file for its own if the two are as long and
    # as old, in seconds.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


# --- The tests in it ----------------------------------------------------------


def run_tests(server, folder, files, names, timeout):
    """Runs tests in a copy until one fails, and returns a `Verdict`."""
    # By `-k`, not by their ids: a test that is asked for by its id runs whatever its
    # marks say, and here those count as in `make test`.
    chosen = ["-k", " or ".join(names)] if names else []
    result = server.run(folder, [*PYTEST, *chosen, *files], timeout)
    seconds = result["seconds"]
    if result["test"]:
        return Verdict(KILLED, result["test"], seconds)
    if result["is_late"]:
        return Verdict(TIMEOUT, f"after {timeout:g} s", seconds)
    if result["code"] is None:
        return Verdict(KILLED, "the process died", seconds)
    if result["code"] == 0:
        return Verdict(SURVIVED, "", seconds)
    if result["error"]:
        return Verdict(AT_IMPORT, result["error"], seconds)
    return Verdict(NO_TEST, f"{' or '.join(names)}: pytest returned {result['code']}")


def environment(backend, folder):
    own = {k: v for k, v in os.environ.items() if k not in NOT_HANDED_ON}
    return {
        **own,
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # As in `conftest.py`, which comes after JAX here.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "build" / "jax-cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


# --- All of them --------------------------------------------------------------


class Checkout:
    """A copy of the checkout, and the processes that run tests in it."""

    def __init__(self, root, folder, modules=MODULES):
        self.folder = folder
        self._modules = modules
        self._servers: dict = {}
        copy_checkout(root, folder)

    def run(self, backend, files, names, timeout):
        if backend not in self._servers:
            self.close()
            modules = self._modules[backend]
            self._servers[backend] = ForkServer(
                modules, environment(backend, self.folder)
            )
        server = self._servers[backend]
        return run_tests(server, self.folder, files, names, timeout)

    def close(self):
        while self._servers:
            self._servers.popitem()[1].close()


@contextlib.contextmanager
def checkouts(root, count, modules=MODULES):
    """Yields a queue of checkouts, which are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        places = [
            Checkout(root, pathlib.Path(folder, str(i)), modules) for i in range(count)
        ]
        free: queue.SimpleQueue = queue.SimpleQueue()
        for place in places:
            free.put(place)
        try:
            yield free
        finally:
            for place in places:
                place.close()


def run_all(
    chosen,
    root=ROOT,
    jobs=2,
    timeout=300.0,
    modules=MODULES,
    done=lambda fault, verdict: None,
):
    """Tries each fault, `jobs` at a time, and returns a dict of them to verdicts."""
    verdicts = {}
    is_stopped = threading.Event()

    def try_(fault):
        if is_stopped.is_set():
            return
        place = free.get()
        try:
            with broken(place.folder, fault):
                verdicts[fault] = place.run(
                    fault.backend, fault.test_files, fault.test_names, timeout
                )
        finally:
            free.put(place)
        done(fault, verdicts[fault])

    # A backend after the other: each is imported once by each process.
    in_order = sorted(chosen, key=lambda fault: fault.backend)
    with checkouts(root, jobs, modules) as free, ThreadPoolExecutor(jobs) as pool:
        try:
            for future in [pool.submit(try_, fault) for fault in in_order]:
                future.result()
        except BaseException:
            is_stopped.set()
            raise
    return {fault: verdicts[fault] for fault in chosen}


def check_all(chosen, root=ROOT, timeout=3600.0):
    """Runs the tests of all faults, a backend at a time, on the sound package."""
    verdicts = {}
    with checkouts(root, 1) as free:
        place = free.get()
        for backend in sorted({fault.backend for fault in chosen}):
            own = [fault for fault in chosen if fault.backend == backend]
            files = dict.fromkeys(itertools.chain(*(f.test_files for f in own)))
            names = dict.fromkeys(itertools.chain(*(f.test_names for f in own)))
            verdicts[backend] = place.run(backend, files, names, timeout)
    return verdicts


# --- The command --------------------------------------------------------------


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", metavar="SUBSTRING", help="of a fault's name or its file")
    add("--backends", nargs="+", choices=MODULES, default=MODULES)
    add("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    add("--timeout", type=float, default=300.0, help="seconds a fault (default: 300)")
    add("--check", action="store_true", help="that the sound package passes the tests")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error("--jobs must be 1 or more")
    return options


def choose(only, backends):
    """Returns the faults in question."""
    return [
        fault
        for fault in faults.ALL
        if fault.backend in backends
        and (not only or only in fault.name or only in fault.file)
    ]


def main(argv=None):
    options = parse_arguments(argv)
    chosen = choose(options.only, options.backends)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if not chosen:
        console.print("There is no such fault.")
        return 2
    if options.check:
        return _check(chosen, console)
    begin = time.monotonic()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("faults", total=len(chosen))
        verdicts = run_all(
            chosen,
            jobs=options.jobs,
            timeout=options.timeout,
            done=lambda fault, verdict: progress.advance(task),
        )
    report(verdicts, console)
    console.print(f"In {time.monotonic() - begin:.0f} s.", highlight=False)
    is_well = {v.outcome for v in verdicts.values()} <= {KILLED, TIMEOUT}
    return 0 if is_well else 1


def _check(chosen, console):
    passes = True
    for backend, verdict in check_all(chosen).items():
        passes &= verdict.outcome == SURVIVED
        word = "pass" if verdict.outcome == SURVIVED else f"fail: {verdict.test}"
        console.print(f"{backend}: {word}", highlight=False, markup=False)
    return 0 if passes else 1


def report(verdicts, console):
    """Prints a row for each fault, and how many there are of each outcome."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("fault", "file", "outcome", "by"):
        table.add_column(heading, overflow="fold")
    table.add_column("seconds", justify="right")
    for fault, verdict in verdicts.items():
        cells = fault.name, fault.file, verdict.outcome, verdict.test
        # In the brackets of a test's name are its arguments, and no markup.
        table.add_row(*map(escape, cells), f"{verdict.seconds:.1f}")
    console.print(table)
    outcomes = [verdict.outcome for verdict in verdicts.values()]
    counts = [f"{outcomes.count(o)} {o}" for o in dict.fromkeys(outcomes)]
    console.print(f"{len(outcomes)} faults: {', '.join(counts)}.", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
