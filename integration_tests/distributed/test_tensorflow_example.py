"""`examples/multi_worker.py`, which starts two workers."""

import os
import re
import subprocess
import sys

import pytest

from integration_tests.distributed.launch import ROOT, TIMEOUT


@pytest.mark.full
def test_multi_worker_example_learns_with_equal_weights_on_both_workers():
    run = subprocess.run(
        [sys.executable, "examples/multi_worker.py"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TF_CONFIG"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert run.returncode == 0, run.stderr
    workers = re.findall(r"worker (\d): accuracy (\S+), weights (\w+)", run.stdout)
    assert sorted(number for number, _, _ in workers) == ["0", "1"]
    # The last 397 digits are other people's.
    assert min(float(accuracy) for _, accuracy, _ in workers) > 0.8
    assert len({weights for _, _, weights in workers}) == 1
    losses = re.findall(
        r"loss ([\d.]+), loss scale \d+, skipped steps (\d+)", run.stdout
    )
    assert len(losses) == 10
    assert float(losses[-1][0]) < 0.5 < float(losses[0][0])
    # From 2**24 the scale comes down by one overflow at a time.
    assert 0 < int(losses[0][1]) <= int(losses[-1][1]) < 10
