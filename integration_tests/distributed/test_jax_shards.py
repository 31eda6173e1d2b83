"""A shard that overflows, on any one device, is seen on all of them."""

import functools

import pytest

from integration_tests.distributed import launch
from integration_tests.distributed.jax_training import HAS_SHARD_MAP, NO_SHARD_MAP

# `make test` has a run of each kind elsewhere.
pytestmark = pytest.mark.full

FOUR_DEVICES = "--xla_force_host_platform_device_count=4"


@pytest.fixture(scope="module")
def printed():
    [text] = launch.run("worker_jax_shards", [], XLA_FLAGS=FOUR_DEVICES)
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
    assert len(results) == 7
    for name, dtype, policy, found in results:
        # In five places inf and NaN, and a large number, which is no overflow.
        assert found == [True] * 11, (name, dtype, policy)


@pytest.mark.skipif(not HAS_SHARD_MAP, reason=NO_SHARD_MAP)
def test_shard_map_accepts_sharded_and_whole_gradients(printed):
    refused = dict(printed("REFUSED"))
    for accepted in ("shards", "whole", "averaged"):
        assert refused[accepted] == "none"


@pytest.mark.parametrize(
    "case, words",
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
