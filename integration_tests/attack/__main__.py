"""The arguments of the attack: see `integration_tests/attack/__init__.py`."""

import argparse
import os
import subprocess
import sys
import time

MODES = {
    "tensorflow": ["eager", "graph", "xla", "generic"],
    "jax": ["eager", "jit", "generic"],
    "torch": ["eager", "framework", "generic"],
}
# Which share of the time each has.
PARTS = {"steps": 0.9, "schedules": 0.1}


def main():
    modes = MODES[os.environ.get("KERAS_BACKEND", "tensorflow")]
    parser = argparse.ArgumentParser(prog="python -m integration_tests.attack")
    parser.add_argument("--part", choices=PARTS, default="steps")
    parser.add_argument("--mode", choices=[*modes, "all"], default="eager")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this one alone")
    arguments = parser.parse_args()
    if arguments.mode == "all":
        return max([run_alone(mode, arguments, len(modes)) for mode in modes])
    if arguments.mode in ("generic", "framework"):
        # Before the package is imported, which reads it once.
        os.environ["KERAS_LSO_KERNELS"] = arguments.mode
    from integration_tests.attack.campaign import Campaign

    campaign = Campaign(arguments.part, arguments.mode, arguments.seed)
    if arguments.case is None:
        campaign.until(time.monotonic() + 60 * arguments.minutes)
    else:
        campaign.case(arguments.case)
    print(campaign, flush=True)
    return 1 if campaign.faults else 0


def run_alone(mode, arguments, count):
    """Runs both parts in a mode, each in a process; returns 1 if one found a fault."""
    codes = [
        subprocess.run(
            [sys.executable, "-m", "integration_tests.attack"]
            + ["--part", part, "--mode", mode, "--seed", str(arguments.seed)]
            + ["--minutes", str(arguments.minutes / count * share)]
        ).returncode
        for part, share in PARTS.items()
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
