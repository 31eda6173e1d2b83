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
    # A process that measured a part has written facts of its own.
    text = json.dumps(about | results | about, indent=1)
    path.write_text(text + "\n", "utf-8")


def read(path):
    """Returns the dict in a JSON file."""
    return json.loads(path.read_text("utf-8"))


def _commit():
    """Returns the commit that is checked out, or `None` without git."""
    # Results that were written before change no program.
    program = ["--", ":/", f":!{RESULTS.name}"]
    commands = ["describe", "--always", "--exclude=*"], ["status", "--short", *program]
    try:
        commit, changes = (
            subprocess.check_output(["git", *command], cwd=RESULTS.parent, text=True)
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("-dirty" if changes else "")
