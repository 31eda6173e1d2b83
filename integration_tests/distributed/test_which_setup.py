"""docs/which-setup.md trains on two devices, or in two processes, what it says it does.

`test_docs.py` runs the same lines with one.
"""

import keras
import pytest

from integration_tests.distributed import launch

BACKEND = keras.backend.backend()
TWO_DEVICES = "--xla_force_host_platform_device_count=2"


# The tests beside this one are of the same engines.
@pytest.mark.full
def test_both_participants_end_with_equal_weights_and_state(tmp_path):
    arguments = [[]]
    if BACKEND == "torch":
        address = f"file://{tmp_path}/store"
        arguments = [["0", address], ["1", address]]
    name, settings = "worker_which_setup", {"XLA_FLAGS": TWO_DEVICES}
    printed = launch.run(name, *arguments, OMP_NUM_THREADS="1", **settings)
    first, second = [
        held for of_one in printed for held in launch.lines_of(of_one, "HELD")[0]
    ]
    assert first == second
    # Two layers of a kernel and a bias, Adam's slots, scales and counters.
    assert len(first) > 4 * 3
