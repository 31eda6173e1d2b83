"""The examples of several devices and processes, run as a user runs them."""

import os
import re
import subprocess
import sys

import pytest

from integration_tests.distributed import launch
from integration_tests.distributed.jax_training import HAS_SHARD_MAP, NO_SHARD_MAP


def run_example(name):
    """Returns the losses of the epochs, the skipped steps, and all that is printed."""
    finished = subprocess.run(
        [sys.executable, str(launch.ROOT / "examples" / name)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=launch.TIMEOUT,
    )
    assert finished.returncode == 0, finished.stderr
    epochs = re.findall(
        r"loss ([\d.]+), loss scale \d+, skipped steps (\d+)", finished.stdout
    )
    losses, skipped = zip(*epochs, strict=True)
    return list(map(float, losses)), list(map(int, skipped)), finished.stdout


@pytest.mark.full
@pytest.mark.parametrize("name", ["jax_processes.py", "shard_map.py"])
def test_jax_example_learns_with_equal_weights_on_all_participants(name):
    if name == "shard_map.py" and not HAS_SHARD_MAP:
        pytest.skip(NO_SHARD_MAP)
    losses, skipped, printed = run_example(name)
    assert len(losses) == 8
    # A guess has a loss of log 10 = 2.3.
    assert losses[-1] < 0.5 < losses[0]
    # From 2**24 the scale comes down by one overflow at a time.
    assert 0 < skipped[0] <= skipped[-1] < 20
    if name == "shard_map.py":
        assert "weights alike on all devices: True" in printed
    else:
        sums = re.findall(r"process \d: sum of its weights (\S+)", printed)
        assert len(sums) == 2
        assert sums[0] == sums[1]
