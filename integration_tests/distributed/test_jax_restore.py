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
    ranks = [[rank, port, distribution] for rank in ("0", "1")]
    flags = "--xla_force_host_platform_device_count=1"
    for printed in launch.run("worker_jax_restore", *ranks, XLA_FLAGS=flags):
        assert launch.lines_of(printed, "HALVES") == [HALVES[distribution]]
        [[told]] = launch.lines_of(printed, "TOLD")
        assert "retry 1 of 3" in told
        [same] = launch.lines_of(printed, "SAME")
        assert len(same) > 10 and all(same)
        assert launch.lines_of(printed, "FINITE") == [True]
