"""Two processes of JAX skip together, and step like one."""

import jax
import pytest

from integration_tests.distributed import jax_training, launch, problem
from integration_tests.distributed.jax_training import FITS

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 6),
    reason="JAX 0.5 mixes up, on CPUs, what several reductions at once send each other",
)

TWO_DEVICES = "--xla_force_host_platform_device_count=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("jax_fit"))
    port = launch.free_ports(1)
    launch.run_pair("worker_jax_fit", *port, folder, XLA_FLAGS=TWO_DEVICES)
    return folder


CASES = [(fit, pattern) for fit in FITS for pattern in FITS[fit]["patterns"]]


@pytest.mark.parametrize("fit, pattern", CASES)
def test_all_jax_processes_step_and_skip_like_single_process(folder, fit, pattern):
    participants = FITS[fit]["participants"]
    expected = jax_training.reference(FITS[fit]["optimizer"], pattern, participants)
    # The first devices of both processes hold a whole model, and so do the second ones.
    copies = [
        problem.joined(
            *(problem.load(f"{folder}/{fit}-{pattern}-{r}-{i}.npz") for r in (0, 1)),
            expected,
        )
        for i in (0, 1)
    ]
    for columns, halves in copies:
        problem.assert_bitwise_equal(columns, copies[0][0])
        # Three weights; `global_clipnorm` has no slots.
        assert halves == (3 if fit == "model" else 0)
    problem.assert_right(copies[0][0], pattern, participants, expected)
