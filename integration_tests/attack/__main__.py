"""The arguments of the attack: see `integration_tests/attack/__init__.py`."""

import argparse
import os
import subprocess
import sys
import time

# How many programs a process runs. TensorFlow keeps all that XLA ever compiled, each
# program in three memory maps, some thousand a program of ours. When Linux gives no
# further one, XLA ends the process by a segmentation fault.
PROGRAMS = {
    "tensorflow": {"eager": 200, "graph": 40, "xla": 10, "generic": 200},
    "jax": {"eager": 20, "jit": 40, "generic": 20},
    "torch": {"eager": 1000, "compile": 100, "generic": 1000},
}[os.environ.get("KERAS_BACKEND", "tensorflow")]


def main():
    parser = argparse.ArgumentParser(prog="python -m integration_tests.attack")
    parser.add_argument("--mode", choices=[*PROGRAMS, "long", "all"], default="all")
    parser.add_argument("--minutes", type=float, default=60, help="of all modes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100_000, help="of the long run")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        return run(arguments)
    modes = ["long", *PROGRAMS] if arguments.mode == "all" else [arguments.mode]
    minutes = arguments.minutes / max(len(modes) - 1, 1)
    faults = [has_fault(mode, minutes, arguments) for mode in modes]
    return int(any(faults))


def has_fault(mode, minutes, arguments):
    """Runs a mode in one process after another; returns whether one found a fault."""
    end, number, code = time.monotonic() + 60 * minutes, 0, 0
    environment = dict(os.environ)
    if mode in ("generic", "compile"):
        environment["KERAS_LSO_KERNELS"] = mode
    while code == 0 and time.monotonic() < end:
        minutes = (end - time.monotonic()) / 60
        words = ["--once", "--mode", mode, "--minutes", minutes]
        words += ["--steps", arguments.steps, "--seed", 1000 * arguments.seed + number]
        command = [sys.executable, "-m", "integration_tests.attack", *map(str, words)]
        code, number = subprocess.run(command, env=environment).returncode, number + 1
        if mode == "long":
            break
    print(f"{mode}: {'fault' if code else 'no fault'}, {number} processes", flush=True)
    return code != 0


def run(arguments):
    if arguments.mode == "long":
        from integration_tests.attack import long

        print(long.run(arguments.steps, arguments.seed))
        return
    from integration_tests.attack import machine

    machine.attack(arguments.mode, seeds(arguments), print_blob=True)


def seeds(arguments):
    """Yields the seeds of a process's programs, as long as there is time."""
    end, first = time.monotonic() + 60 * arguments.minutes, 10_000 * arguments.seed
    for seed in range(first, first + PROGRAMS[arguments.mode]):
        if time.monotonic() >= end:
            return
        yield seed


if __name__ == "__main__":
    sys.exit(main())
