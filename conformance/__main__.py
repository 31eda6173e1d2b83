"""Asks each participant, on its backends: `python -m conformance`.

It prints the table, and writes `RESULTS`. `make conformance` brings the peers of
requirements/peers.txt with it.
"""

import datetime
import importlib
import json
import os
import subprocess
import sys
from importlib.metadata import version as version_of

from rich.console import Console
from rich.table import Table

from benchmarks import evidence
from conformance.properties import PROPERTIES, ask

RESULTS = evidence.RESULTS / "conformance.json"
MODULES = {
    "tensorflow": ["of_keras"],
    "jax": ["of_keras", "of_jax"],
    "torch": ["of_keras", "of_torch"],
}
STYLES = {True: "green", False: "red", None: "yellow"}


def adapters(backend):
    """Returns those that run under a backend of Keras, and are installed."""
    modules = [importlib.import_module(f"conformance.{m}") for m in MODULES[backend]]
    return [adapter for module in modules for adapter in module.ADAPTERS]


def versions(adapter):
    # Without the name of the build.
    return {p: version_of(p).partition("+")[0] for p in adapter.packages}


def answers_under(backend):
    """Returns what a process under a backend prints."""
    command = [sys.executable, "-m", "conformance", backend]
    env = {**os.environ, "KERAS_BACKEND": backend}
    return json.loads(subprocess.check_output(command, env=env).splitlines()[-1])


def found(participant, case):
    """Returns the different answers of its backends: tuples."""
    answers = (tuple(answers[case]) for answers in participant["answers"].values())
    return tuple(dict.fromkeys(answers))


def table_of(participants):
    table = Table("", *participants)
    for case in PROPERTIES:
        cells = [found(participant, case) for participant in participants.values()]
        table.add_row(
            case, *(" / ".join(f"[{STYLES[h]}]{t}[/]" for t, h in c) for c in cells)
        )
    return table


def main():
    participants = {}
    for backend in MODULES:
        for name, (packages, answers) in answers_under(backend).items():
            new = {"versions": packages, "answers": {}}
            participants.setdefault(name, new)["answers"][backend] = answers
    Console(width=None if sys.stdout.isatty() else 200).print(table_of(participants))
    about = {"date": datetime.date.today().isoformat()}
    results = {"participants": participants}
    evidence.write(RESULTS, "make conformance", about, results)


if __name__ == "__main__":
    if backends := sys.argv[1:]:
        said = {a.name: (versions(a), ask(a)) for a in adapters(*backends)}
        print(json.dumps(said))
    else:
        main()
