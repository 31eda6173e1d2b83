"""Statistics survive a skipped step under `keras.distribution`, on four devices."""

import pytest

from integration_tests.distributed import launch, statistics_fit

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full

FOUR_DEVICES = "--xla_force_host_platform_device_count=4"


@pytest.fixture(scope="module")
def printed():
    [printed] = launch.run("worker_jax_statistics", [], XLA_FLAGS=FOUR_DEVICES)
    return printed


# Each device holds as many elements of the mean, of which there are four.
@pytest.mark.parametrize("how, elements", [("DATA", 4), ("MODEL", 2)])
def test_skipped_step_restores_statistics_on_all_devices(printed, how, elements):
    protected, unprotected = launch.lines_of(printed, how)
    mean = protected[0][0]
    assert [len(local) for local in mean] == [elements] * 4
    statistics_fit.check(protected, unprotected)
