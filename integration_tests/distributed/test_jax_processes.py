"""Two processes of JAX skip together, and step as one."""

import jax
import numpy as np
import pytest

from integration_tests.distributed import jax_reference, launch, problem
from integration_tests.distributed.jax_training import FITS

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 6),
    reason="JAX 0.5 mixes up, on CPUs, what several reductions at once send each other",
)

TWO_DEVICES = "--xla_force_host_platform_device_count=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("jax_fit"))
    [port] = launch.free_ports(1)
    ranks = [[rank, port, folder] for rank in ("0", "1")]
    launch.run("worker_jax_fit", *ranks, XLA_FLAGS=TWO_DEVICES)
    return folder


CASES = [(fit, pattern) for fit in FITS for pattern in FITS[fit]["patterns"]]


@pytest.mark.parametrize("fit, pattern", CASES)
def test_all_jax_processes_step_and_skip_like_single_process(folder, fit, pattern):
    participants = FITS[fit]["participants"]
    expected = jax_reference.record(FITS[fit]["optimizer"], pattern, participants)
    # The first devices of both processes hold a whole model, and the second ones.
    held = [
        [problem.load(f"{folder}/{fit}-{pattern}-{rank}-{i}.npz") for rank in (0, 1)]
        for i in (0, 1)
    ]
    copies = [whole(*parts, expected) for parts in held]
    problem.assert_bitwise_equal(copies[1], copies[0])
    problem.assert_right(copies[0], pattern, participants, expected)
    has_halves = [p.shape != e.shape for p, e in zip(held[0][0], expected, strict=True)]
    # Three weights; `global_clipnorm` has no slots.
    assert sum(has_halves) == (3 if fit == "model" else 0)


def whole(first, second, expected):
    """Puts together what two devices hold: copies, or halves."""
    columns = []
    for a, b, e in zip(first, second, expected, strict=True):
        halved = [i for i, size in enumerate(a.shape) if size != e.shape[i]]
        if halved:
            columns.append(np.concatenate([a, b], halved[0]))
        else:
            problem.assert_bitwise_equal([a], [b])
            columns.append(a)
    return columns
