"""The arguments of the attack: see `integration_tests/attack/__init__.py`."""

import argparse
import os
import subprocess
import sys
import time

MODES = {
    "tensorflow": ["eager", "graph", "xla", "generic"],
    "jax": ["eager", "jit", "generic"],
    "torch": ["eager", "compile", "generic"],
}


def main():
    modes = MODES[os.environ.get("KERAS_BACKEND", "tensorflow")]
    parser = argparse.ArgumentParser(prog="python -m integration_tests.attack")
    parser.add_argument("--mode", choices=[*modes, "long", "all"], default="eager")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100_000, help="of the long run")
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--first", type=int, default=0, help="the case to begin with")
    parser.add_argument("--faults", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.mode == "all":
        return run_all(modes, arguments)
    if arguments.mode == "long":
        from integration_tests.attack import long

        print(long.run(arguments.steps, arguments.seed))
        return 0
    if arguments.mode in ("generic", "compile"):
        # Before the package is imported, which reads it once.
        os.environ["KERAS_LSO_KERNELS"] = arguments.mode
    from integration_tests.attack.campaign import Campaign

    campaign = Campaign(arguments.mode, arguments.seed)
    end, number = time.monotonic() + 60 * arguments.minutes, None
    if arguments.case is None:
        number = campaign.until(end, arguments.first)
    else:
        campaign.case(arguments.case)
    print(campaign, flush=True)
    faults = arguments.faults + len(campaign.faults)
    minutes = (end - time.monotonic()) / 60
    if number is not None and minutes > 0:
        # The process is full: a new one goes on in its place.
        arguments.minutes, arguments.first, arguments.faults = minutes, number, faults
        os.execv(sys.executable, command(arguments))
    return 1 if faults else 0


def command(arguments):
    """Returns the list of words that starts an attack with these arguments."""
    given = {k: v for k, v in vars(arguments).items() if v is not None}
    words = [word for k, v in given.items() for word in (f"--{k}", str(v))]
    return [sys.executable, "-m", "integration_tests.attack", *words]


def run_all(modes, arguments):
    """Runs each mode in a process; returns 1 if one found a fault."""
    codes, minutes = [], arguments.minutes / len(modes)
    for mode in ("long", *modes):
        one = {**vars(arguments), "mode": mode, "minutes": minutes}
        codes.append(subprocess.run(command(argparse.Namespace(**one))).returncode)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
