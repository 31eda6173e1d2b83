"""The launchers in `examples/`, run as a user runs them."""

import os
import re
import subprocess
import sys

import pytest

from integration_tests.distributed.launch import ROOT, TIMEOUT

LAST_WORDS = {
    "ddp.py": ["weights and optimizer states are equal: True"],
    "fsdp.py": [
        "loss scales and skipped steps are equal: True",
        "weights are finite: True",
    ],
}


@pytest.mark.full
@pytest.mark.parametrize("name", LAST_WORDS)
def test_torch_example_learns_digits_in_two_processes(name, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # An example has to know which backend it is for.
    del environment["KERAS_BACKEND"]
    finished = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert finished.returncode == 0, finished.stderr
    number = r"(\d+(?:\.\d+)?)"
    epochs = re.findall(
        rf"loss {number}, loss scale {number}, skipped steps {number}", finished.stdout
    )
    losses, scales, skipped = zip(*epochs, strict=True)
    assert len(epochs) == 6
    assert float(losses[-1]) < 0.5 < float(losses[0])
    # From 2**24 the scale comes down by one overflow at a time.
    assert 0 < int(skipped[0]) <= int(skipped[-1]) < 20
    assert float(scales[0]) == 2.0 ** (24 - int(skipped[0]))
    assert finished.stdout.splitlines()[6:] == LAST_WORDS[name]
