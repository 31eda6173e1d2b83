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


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="tf.distribute is TensorFlow's; one process of JAX or PyTorch has no "
    "replicas that could disagree",
)
def test_an_overflow_on_any_replica_skips_the_step_on_all():
    run = subprocess.run(
        [sys.executable, WORKER], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("STATE ")]
    first, second, applied, last = [json.loads(line[6:]) for line in lines]
    untouched = [[1.0, -0.0]] * 2
    # Both replicas' gradients of 2 add up to 4; unscaled by 2 that is 2, and the
    # step 0.5 * 2 = 1.
    moved = [[0.0, -2.0]] * 2
    assert first == {"weights": untouched, "scale": 4.0, "skipped": 1, "applied": 0}
    assert second == {"weights": untouched, "scale": 2.0, "skipped": 2, "applied": 0}
    assert applied == {"weights": moved, "scale": 2.0, "skipped": 2, "applied": 1}
    assert last == {"weights": moved, "scale": 1.0, "skipped": 3, "applied": 1}
