"""An overflow on one replica only is an overflow: all of them skip.

Keras's own wrapper takes the first replica's word for it.
"""

import json
import pathlib
import subprocess
import sys

import keras
import pytest

WORKER = pathlib.Path(__file__).parent / "worker_mirrored.py"


pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="tf.distribute is TensorFlow's; one process of JAX or PyTorch has no "
    "replicas that could disagree",
)


@pytest.fixture(scope="module")
def printed():
    """`printed(word)`: what the worker prints in the lines that start with it."""
    run = subprocess.run(
        [sys.executable, WORKER], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    lines = [line.split(" ", 1) for line in run.stdout.splitlines()]
    return lambda word: [json.loads(line[1]) for line in lines if line[0] == word]


def test_an_overflow_on_any_replica_skips_the_step_on_all(printed):
    first, second, applied, last = printed("STATE")
    untouched = [[1.0, -0.0]] * 2
    # Both replicas' gradients of 2 add up to 4; unscaled by 2 that is 2, and the
    # step 0.5 * 2 = 1.
    moved = [[0.0, -2.0]] * 2
    assert first == {"weights": untouched, "scale": 4.0, "skipped": 1, "applied": 0}
    assert second == {"weights": untouched, "scale": 2.0, "skipped": 2, "applied": 0}
    assert applied == {"weights": moved, "scale": 2.0, "skipped": 2, "applied": 1}
    assert last == {"weights": moved, "scale": 1.0, "skipped": 3, "applied": 1}


def test_norms_are_of_the_sum_over_the_replicas(printed):
    differences = printed("NORMS")
    assert len(differences) == 6
    for name, moved, difference in differences:
        assert moved > 0.1, name
        # Two steps on weights below 8, each a few float32 roundings.
        assert difference < 8 * 1e-6, name
