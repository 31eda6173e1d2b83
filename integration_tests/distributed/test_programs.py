"""The examples of several devices and processes, run as a user runs them."""

import os
import re
import subprocess
import sys

import keras
import pytest

from integration_tests.distributed.launch import ROOT, TIMEOUT

# For each backend the programs, and what they say if all participants are alike.
PROGRAMS = {
    "tensorflow": {"multi_worker.py": r"weights (\w+)(?s:.*)weights \1"},
    "jax": {
        "jax_processes.py": r"sum of its weights (\S+)(?s:.*)sum of its weights \1\n",
        "shard_map.py": "weights alike on all devices: True",
    },
    "torch": {
        "ddp.py": "weights and optimizer states are equal: True",
        "fsdp.py": "loss scales and skipped steps are equal: True",
    },
}[keras.backend.backend()]


@pytest.mark.full
@pytest.mark.parametrize("name, words", PROGRAMS.items(), ids=PROGRAMS)
def test_example_learns_digits_with_equal_weights(name, words, tmp_path):
    if name == "shard_map.py":
        pytest.importorskip("jax", minversion="0.7")
    # An example has to know which backend it is for.
    unset = ("KERAS_BACKEND", "TF_CONFIG")
    inherited = {k: v for k, v in os.environ.items() if k not in unset}
    finished = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd=tmp_path,
        env={**inherited, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert finished.returncode == 0, finished.stderr
    assert re.search(words, finished.stdout), finished.stdout
    epochs = re.findall(
        r"loss ([\d.]+), loss scale [\d.]+, skipped steps (\d+)", finished.stdout
    )
    losses, skipped = zip(*epochs, strict=True)
    # A guess has a loss of log 10 = 2.3.
    assert float(losses[-1]) < 0.5 < float(losses[0])
    # From 2**24 the scale comes down by one overflow at a time.
    assert 0 < int(skipped[0]) <= int(skipped[-1]) < 20
