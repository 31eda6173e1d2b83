"""A shard that overflows, on any one device, is seen on all of them."""

import functools

import pytest

from integration_tests.distributed import launch, problem
from integration_tests.distributed.jax_training import (
    COUNTS,
    HAS_SHARD_MAP,
    NO_SHARD_MAP,
)
from testing.tiers import is_full

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full

EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"


@pytest.fixture(scope="module")
def printed():
    [text] = launch.run("worker_jax_shards", [], XLA_FLAGS=EIGHT_DEVICES)
    return functools.partial(launch.lines_of, text)


def test_slots_and_masters_are_sharded_like_their_variables(printed):
    layouts = printed("LAYOUTS")
    assert len(layouts) == 8
    for name, count, wrong in layouts:
        # A master for each of four variables, and slots for it.
        slots = {"Adam": 8, "LAMB": 8, "global_clipnorm": 0}.get(name, 4)
        assert count == 4 + slots, name
        assert wrong == [], name


def test_overflow_in_any_shard_is_detected_on_all_devices(printed):
    results = printed("SKIPS")
    assert len(results) == (10 if is_full() else 7)
    for name, dtype, policy, found in results:
        # In five places inf and NaN, and a large number, which is no overflow.
        assert found == [True] * 11, (name, dtype, policy)


def test_fit_skips_steps_that_overflow_on_one_device(printed):
    results = printed("FIT")
    assert tuple(count for count, *_ in results) == COUNTS
    for count, scales, changed, are_finite in results:
        skipped = [bool(problem.overflowing("random", s, count)) for s in range(30)]
        assert 3 < sum(skipped) < 15
        assert scales == [2.0 ** (10 - sum(skipped[: s + 1])) for s in range(30)]
        assert changed == [not s for s in skipped[1:]]
        assert are_finite


@pytest.mark.skipif(not HAS_SHARD_MAP, reason=NO_SHARD_MAP)
def test_shard_map_accepts_sharded_and_whole_gradients(printed):
    refused = dict(printed("REFUSED"))
    for accepted in ("shards", "whole", "averaged"):
        assert refused[accepted] == "none"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("not averaged", "variable 'kernel' varies over the axes ('batch',)"),
        ("averaged already", "the same on all devices of the axis already"),
        ("no such axis", "`axis_name` must name an axis of the `jax.shard_map`"),
        ("no axis at all", "`axis_name` must name an axis of the `jax.shard_map`"),
        ("clips shards", "see the norms of a device's shards"),
        ("LARC clips shards", "see the norms of a device's shards"),
    ],
)
def test_shard_map_rejects_wrong_averaging_axes_and_norm_clipping(printed, case, words):
    refused = dict(printed("REFUSED"))
    if case not in refused and not HAS_SHARD_MAP:
        pytest.skip(NO_SHARD_MAP)
    assert words in refused[case]
