"""Writes results that the documentation quotes, with what they come from.

They lie in `benchmarks/results/`: a file for each backend or target of a benchmark.
"""

import json
import pathlib
import subprocess

RESULTS = pathlib.Path(__file__).with_name("results")


def write(path, command, machine, results):
    """Writes a JSON file.

    Args:
        path: `pathlib.Path`. Its folder need not exist.
        command: String. What gives the results.
        machine: Dict. What `machine.facts` returned, the versions of packages included.
        results: Dict. What the command found, ready for JSON.
    """
    about = {"machine": machine, "commit": _commit(), "command": command}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(about | results, indent=1)
    path.write_text(text + "\n", "utf-8")


def read(path):
    """Returns the dict in a JSON file."""
    return json.loads(path.read_text("utf-8"))


def _commit():
    """Returns the commit that is checked out, or `None` without git."""
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.check_output(describe, cwd=RESULTS.parent, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
