"""Runs targets of the Makefile, so many at a time, and prints a row for each.

    python -m tools.run_jobs --at-once 3 integration-jax unit-jax lint

A row has the result, the seconds and what pytest counted. The output of a job is in
build/jobs/NAME.txt while it runs, and is printed when the job has failed.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "build" / "jobs"
# As pytest ends: "===== 12 passed, 3 skipped in 4.56s =====".
COUNTS = re.compile(r"^=+ (\d+ .+) in [\d.]+s.* =+$", re.MULTILINE)


def run(job):
    """Runs a job, prints its row, and its output if it fails.

    Returns:
        The row, and whether the job passed.
    """
    path = FOLDER / f"{job}.txt"
    begin = time.monotonic()
    with path.open("w") as output:
        code = subprocess.run(["make", job], stdout=output, stderr=output).returncode
    seconds = time.monotonic() - begin
    text = path.read_text(errors="replace")
    result = "failed" if code else "passed"
    counts = " ".join(COUNTS.findall(text)[-1:])
    row = f"{job:<24}{result:<8}{seconds:5.0f} s  {counts}".rstrip()
    print(f"{text}\n{row}" if code else row, flush=True)
    return row, code == 0


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m tools.run_jobs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("jobs", nargs="+", help="targets, the longest first")
    parser.add_argument("--at-once", type=int, default=3, help="default: 3")
    options = parser.parse_args(argv)
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(f"Running {len(options.jobs)} jobs; their output is in {FOLDER}.", flush=True)
    with ThreadPoolExecutor(options.at_once) as pool:
        results = list(pool.map(run, options.jobs))
    print("\nAll jobs:", *(row for row, _ in results), sep="\n")
    return 0 if all(passed for _, passed in results) else 1


if __name__ == "__main__":
    sys.exit(main())
