"""Runs targets of the Makefile, so many at a time, and prints a row for each.

    python -m tools.run_jobs --at-once 3 integration-jax unit-jax lint

The output of a job is in build/jobs/NAME.txt, and is printed when the job has failed.
The jobs that took longest the last time begin first, so that none ends alone.
"""

import argparse
import json
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
    """Runs a job, and prints its row; returns its seconds, or None if it failed."""
    path = FOLDER / f"{job}.txt"
    begin = time.monotonic()
    with path.open("w") as output:
        code = subprocess.run(["make", job], stdout=output, stderr=output).returncode
    seconds = time.monotonic() - begin
    text = path.read_text(errors="replace")
    counts = " ".join(COUNTS.findall(text)[-1:])
    result = "failed" if code else "passed"
    row = f"{job:<24}{result:<8}{seconds:5.0f} s  {counts}".rstrip()
    print(f"{text}\n{row}" if code else row, flush=True)
    return None if code else seconds


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tools.run_jobs")
    parser.add_argument("jobs", nargs="+", help="targets of the Makefile")
    parser.add_argument("--at-once", type=int, default=3, help="default: 3")
    options = parser.parse_args(argv)
    FOLDER.mkdir(parents=True, exist_ok=True)
    record = FOLDER / "seconds.json"
    took = json.loads(record.read_text()) if record.exists() else {}
    # A stable order: without a record, that of the command.
    jobs = sorted(options.jobs, key=lambda job: -took.get(job, 0.0))
    print(f"Running {len(jobs)} jobs; their output is in {FOLDER}.", flush=True)
    begin = time.monotonic()
    with ThreadPoolExecutor(options.at_once) as pool:
        seconds = dict(zip(jobs, pool.map(run, jobs), strict=True))
    failed = [job for job in jobs if seconds[job] is None]
    record.write_text(json.dumps(took | {j: s for j, s in seconds.items() if s}))
    print(f"{time.monotonic() - begin:.0f} s. Failed: {', '.join(failed) or 'none'}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
