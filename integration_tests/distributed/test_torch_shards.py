"""Steps on sharded tensors against the same steps on whole ones.

Two processes hold the shards: rows or columns, possibly none in one process, and
replicas of them.
"""

import pytest

from integration_tests.distributed import launch

# A few roundings a step, and norms that were added up in another order.
FLOAT32 = 2e-6
# The variables are rounded to eleven bits, of numbers that may lie next to a boundary.
FLOAT16 = 2.0**-10
# Slots are rounded to eight bits in each step, by other random bits or of other norms.
BFLOAT16 = 2.0**-5
# As a share of the largest: the last of 127 levels of a fourth root.
INT8 = 2.0**-4


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """`printed(word)`: the lines of both processes, which must be the same."""
    folder = tmp_path_factory.mktemp("shards")
    both = launch.run_pair("worker_torch_shards", folder, OMP_NUM_THREADS="1")

    def lines_of(word):
        first, last = (launch.lines_of(one, word) for one in both)
        assert first == last
        return first

    return lines_of


def test_steps_on_shards_match_steps_on_whole_tensors(printed):
    cases = printed("CASE")
    assert len(cases) == 20 + 4 * 7 + 2 + 8 + 12 + 7 + 9
    for case, result in cases:
        limit = FLOAT16 if "float16" in case else FLOAT32
        found, has_narrow_slots = result["differences"], len(case) > 5
        # Those of small tensors, and of blocks that would be divided.
        assert ("bfloat16" in result["dtypes"]) == has_narrow_slots, case
        if "int8" in case:
            assert ("int8" in result["dtypes"]) == ("dim 1" not in case), case
        if has_narrow_slots and {"dim 1", "LAMB, clipped", "LARS"}.intersection(case):
            limit = INT8 if "int8" in case else BFLOAT16
        elif {"bfloat16", "int8"}.intersection(case):
            # Bit for bit: the random bits of an element are those that it has in the
            # whole weight. Without narrow slots only the weights.
            found, limit = found if has_narrow_slots else found[:5], 0.0
        # `not`: a NaN is no small difference.
        assert not [d for d in found if not d <= limit], (case, found)


def test_only_scalars_and_counters_are_not_sharded(printed):
    for case, result in printed("CASE"):
        shapes = result["shapes of plain"]
        assert shapes, case
        assert all(shape in ([], [3]) for shape in shapes), case


def test_sharded_run_skips_three_steps_in_each_case(printed):
    for case, result in printed("CASE"):
        skipped, _, *_ = result["plain"]
        assert skipped == 3, case
        assert 9 in result["plain"], case


def test_step_record_of_shards_matches_record_of_whole_tensors(printed):
    """The norm is that of all shards, and so is the largest gradient."""
    assert printed("RECORD") == [[n, 12] for n in ("SGD", "accumulation", "RMSprop")]


def test_sharded_step_makes_one_collective_and_more_with_trust_ratios(printed):
    # LARS sums the norms of shards, and LARC takes two norms before it hands on.
    assert dict(printed("COLLECTIVES")) == {
        "momentum": 1,
        "Adam": 1,
        "global_clipnorm": 1,
        "LARS": 2,
        "LARC": 3,
    }


WORDS = {
    "local gradients": "is a plain tensor, and the variable itself holds a DTensor",
    "whole gradients": "is a plain tensor, and the variable itself holds a DTensor",
    "plain variables": "is a DTensor with .*, and the variable itself holds a plain",
    "other placements": r"grad\.redistribute\(",
    "built before": "has a slot for it that is not, .*has not been built yet",
    "Keras model": "belongs to a Keras layer that `fully_shard` was applied to",
    "Keras model, not scaled": "belongs to a Keras layer",
    "its parameters": "belongs to a Keras layer",
    "Keras layer": "belongs to a Keras layer",
    "sharded after a step": "belongs to a Keras layer",
}


def test_inconsistent_sharding_is_rejected_before_any_change(printed):
    refused = {name: rest for name, *rest in printed("REFUSED")}
    assert set(refused) == set(WORDS)
    for name, (message, is_unchanged) in refused.items():
        with pytest.raises(ValueError, match=WORDS[name]):
            raise ValueError(message)
        assert is_unchanged, name
        # It says what to write.
        assert "`" in message, name
