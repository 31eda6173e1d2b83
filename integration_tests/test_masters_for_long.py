"""Ten thousand steps with remainders are those with float32 masters, bit for bit.

Of every optimizer, in a process of its own: there XLA takes no instructions that
multiply and add at once, and so leave out a rounding in one program and not in another.
"""

import functools

import pytest

from integration_tests import worker_masters
from integration_tests.distributed import launch

pytestmark = pytest.mark.full


@functools.cache
def printed():
    worker = launch.Worker(
        "integration_tests.worker_masters",
        [],
        {"XLA_FLAGS": "--xla_cpu_max_isa=AVX", "OMP_NUM_THREADS": "1"},
    )
    [text] = launch.finish([worker], timeout=1800)
    return {name: found for name, *found in launch.lines_of(text, "LONG")}


@pytest.mark.parametrize("name", worker_masters.MAKES)
def test_ten_thousand_steps_with_remainders_match_float32_masters(name):
    differences, smallest, (applied, skipped) = printed()[name]
    assert differences == [0.0] * 4
    # Far from float16's subnormal numbers, of which a remainder loses a part.
    assert smallest > 2.0**-10
    finite = 98 * worker_masters.ROUNDS
    count = 3 if name == worker_masters.ACCUMULATED else 1
    assert applied == finite // count
    assert skipped == 2 * worker_masters.ROUNDS
