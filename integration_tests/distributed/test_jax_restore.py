"""Two processes that stall go back to the same copy, and go on alike."""

import jax
import pytest

from integration_tests.distributed import launch

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 6),
    reason="JAX 0.5 mixes up, on CPUs, what several reductions at once send each other",
)


# How many weights have one half on each process: a kernel and a bias.
HALVES = {"data": 0, "model": 2}


@pytest.mark.full
@pytest.mark.parametrize("distribution", ["data", "model"])
def test_restored_processes_continue_like_run_restarted_by_hand(distribution):
    [port] = launch.free_ports(1)
    flags = "--xla_force_host_platform_device_count=1"
    arguments = "worker_jax_restore", port, distribution
    for printed in launch.run_pair(*arguments, XLA_FLAGS=flags):
        assert launch.lines_of(printed, "HALVES") == [HALVES[distribution]]
        [[warning]] = launch.lines_of(printed, "WARNINGS")
        assert "retry 1 of 3" in warning
        [same] = launch.lines_of(printed, "SAME")
        assert len(same) > 10 and all(same)
        assert launch.lines_of(printed, "FINITE") == [True]
