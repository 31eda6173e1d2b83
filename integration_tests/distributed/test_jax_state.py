"""`shard_state=True`: four devices share the state, and make the same steps.

XLA leaves out a rounding where a processor multiplies and adds at once, in one program
and not in the other: here it takes no such instructions.
"""

import functools

import keras
import pytest

from integration_tests.distributed import launch

# The run compiles more than twenty programs.
pytestmark = pytest.mark.full

FLAGS = "--xla_force_host_platform_device_count=4 --xla_cpu_max_isa=AVX"

# The bytes of two float32 scales for 64 weights.
SCALES = 2 * 4 / 64


def _in_int8(of_first, of_second):
    """The second kernel has rows of 66 numbers, and its slots are in bfloat16."""
    mean = (64 * 128 * of_first + 128 * 66 * of_second) / (64 * 128 + 128 * 66)
    return [mean, mean / 4]


# The bytes of state a weight on each device, of whole state and of sharded state.
BYTES = {
    "float32": [8.0, 2.0],
    "masters": [12.0, 3.0],
    "remainder": [10.0, 2.5],
    "stochastic": [4.0, 1.0],
    "mixed_float16": [4.0, 1.0],
    "stochastic, int8": _in_int8(2 + SCALES, 4),
    "24 bits, int8": _in_int8(3 + SCALES, 5),
    "int8, accumulation": _in_int8(14 + SCALES, 16),
    "averages and accumulation": [20.0, 5.0],
    "LAMB": [8.0, 2.0],
    "LAMB, int8": _in_int8(2 + SCALES, 4),
    "guard and clipping": [8.0, 2.0],
}
# Norms are sums of the devices' parts, so weights may differ in the last digits, and a
# guard's history does.
WITH_NORMS = "LAMB", "LAMB, int8", "guard and clipping"
SKIPPING = "mixed_float16", "guard and clipping"


def shapes_in(layouts):
    """Returns the pairs of the shape of a tensor and of a device's part."""
    return {(tuple(whole), tuple(part)) for whole, part in layouts}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("jax_state"))
    [text] = launch.run("worker_jax_state", [folder], XLA_FLAGS=FLAGS)
    return functools.partial(launch.lines_of, text)


@pytest.fixture(scope="module")
def kinds(printed):
    return dict(printed("KIND"))


@pytest.mark.parametrize("kind", BYTES)
def test_fit_keeps_state_sharded_and_equals_data_parallelism(kinds, kind):
    found = kinds[kind]
    assert found["bytes"] == pytest.approx(BYTES[kind], rel=1e-12)
    assert found["keeps layouts"] and found["weights are whole"]
    losses, expected = found["losses"]
    if kind in WITH_NORMS:
        # Twelve steps of rates of at most 0.01; weights are at most about 1. A digit
        # may move a code, and its number by 3 %.
        limits = (1e-3, 1e-3) if "int8" in kind else (1e-5, 1e-6)
        assert losses == pytest.approx(expected, rel=limits[0])
        assert found["farthest"] < limits[1]
    else:
        assert losses == expected
        assert found["is equal"]
    assert (found["skipped"] > 0) == (kind in SKIPPING)


def test_small_and_indivisible_tensors_stay_whole(kinds):
    assert shapes_in(kinds["masters"]["layouts"]) >= {
        ((64, 128), (16, 128)),
        # Four divides 128, and not 66.
        ((128, 66), (32, 66)),
        ((128,), (128,)),
        ((66, 1), (66, 1)),
        ((), ()),
    }


def test_slots_are_in_8_bits_where_no_block_is_divided(printed):
    assert printed("SLOTS") == [
        [[66, 128], [["bfloat16", [66, 32]]]],
        [[66, 256], [["int8", [66, 64]], ["float32", [66, 1]]]],
        [[68, 128], [["int8", [17, 128]], ["float32", [17, 2]]]],
        [["columns", 64, 64], [["bfloat16", [64, 32]]]],
        [["columns", 64, 128], [["int8", [64, 64]], ["float32", [64, 1]]]],
    ]


def test_files_load_into_any_number_of_devices_and_any_sharding(printed):
    found = printed("FILE")
    assert len(found) == 12 + hasattr(keras.callbacks, "OrbaxCheckpoint")
    assert all(is_equal and keeps_layouts for *_, is_equal, keeps_layouts in found)


def test_steps_are_recorded(printed):
    assert printed("RECORD") == [[1, 2, 3, 4, 5, 6]]


def test_steps_on_any_number_of_devices_equal_those_of_whole_state(printed):
    found = printed("WAY")
    assert len(found) == 4 + 4
    assert all(is_equal for *_, is_equal in found), found


def test_model_parallelism_adds_the_batch_axis_where_it_replicates(printed):
    [[found, keeps_layouts]] = printed("MODEL")
    assert keeps_layouts
    assert shapes_in(found) >= {
        # Two devices share columns, and each two of these rows.
        ((64, 128), (32, 64)),
        # The layout has the batch axis already.
        ((128, 66), (64, 66)),
    }


def test_layouts_over_the_batch_axis_shard_weights_too(printed):
    [[(losses, expected), of_state, parts]] = printed("FSDP")
    # Products of matrices are sums of the devices' parts.
    assert losses == pytest.approx(expected, rel=1e-4)
    assert of_state == BYTES["float32"][1]
    assert parts[:3] == [[16, 128], [128], [32, 66]]


def test_embedding_whose_rows_xla_gathers_differs_in_last_digits(printed):
    [[farthest, parts]] = printed("EMBEDDING")
    assert parts == [[8192, 64], [2048, 64]]
    # Weights are at most about 1.
    assert farthest < 1e-6


def test_masters_of_a_very_large_weight_are_built(printed):
    assert printed("LARGE") == [[False, [4096, 4096]], [True, [1024, 4096]]]


@pytest.mark.parametrize(
    "case, words",
    [
        ("built", "pass an optimizer that has not been used"),
        ("undistributed", "call `keras.distribution.set_distribution("),
        ("early", "was made before `keras.distribution.set_distribution`"),
    ],
)
def test_build_refuses_what_it_cannot_shard(printed, case, words):
    assert words in dict(printed("REFUSED"))[case]
