"""What is recorded of an original comes back, and a change of it is noticed."""

import numpy as np
import pytest

from testing import originals

pytestmark = pytest.mark.one_backend

TREE = {
    "steps": [1, True, None, "finite", 0.1, float("inf")],
    "pair": (1.0, ("inner", [])),
    "weights": np.linspace(-1, 1, 6, dtype="float32").reshape(2, 3),
    "empty": np.zeros((0, 2), "int64"),
    "gain": np.array(0.3, "float32"),
    "rate": np.float32(0.1),
    "count": np.int64(7),
    "flags": np.array([True, False]),
    "file": b"\x00\x89HDF",
}


def never():
    raise AssertionError("the original ran")


@pytest.fixture
def records(tmp_path):
    """Returns the records in a file; at each call as in a new session."""
    return lambda: originals.Records(tmp_path / "golden" / "test_file.npz")


@pytest.fixture
def recorded(records):
    first = records()
    first.record("tree", lambda: TREE)
    first.write()
    return records()


def leaves(tree):
    """Returns what tells one tree from another: types, bytes, and where they are."""
    if isinstance(tree, dict):
        return {key: leaves(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree), [leaves(item) for item in tree]
    if isinstance(tree, np.ndarray | np.generic):
        return type(tree), tree.dtype, tree.shape, tree.tobytes()
    return type(tree), tree


def test_recorded_tree_round_trips(recorded):
    assert leaves(recorded.read("tree", never)) == leaves(TREE)


def test_changes_to_returned_tree_do_not_reach_record(recorded):
    recorded.read("tree", never)["weights"][:] = 0.0
    assert leaves(recorded.read("tree", never)) == leaves(TREE)


def test_record_returns_copy_with_types_of_stored_tree(records):
    live = records().record("tree", lambda: TREE)
    assert leaves(live) == leaves(TREE)
    assert live["weights"] is not TREE["weights"]


@pytest.mark.parametrize("leaf", [{1: 2}, {1}, object(), np.array(["a"]), 1j])
def test_unsupported_leaf_is_rejected(leaf, records):
    with pytest.raises(TypeError, match="must not return"):
        records().record("tree", lambda: [leaf])


def test_missing_record_error_says_how_to_create_record(records, recorded):
    with pytest.raises(LookupError, match=r"no 'other'; `make golden`"):
        recorded.read("other", never)
    recorded.path.unlink()
    with pytest.raises(LookupError, match=r"no 'tree'; `make golden`"):
        records().read("tree", never)


def test_check_runs_original_once_and_returns_live_result(recorded):
    live = {**TREE, "gain": np.array(0.3 + 3e-8, "float32")}
    assert live["gain"] != TREE["gain"]
    found = recorded.check("tree", lambda: live)
    assert leaves(found) == leaves(live)
    # Once a session.
    assert leaves(recorded.check("tree", never)) == leaves(live)


@pytest.mark.parametrize(
    "where, changed",
    [
        ("steps", [2, True, None, "finite", 0.1, float("inf")]),
        ("steps", [1, 1, None, "finite", 0.1, float("inf")]),
        ("steps", [1, True, None, "infinite", 0.1, float("inf")]),
        ("steps", [1, True, None, "finite", 0.1001, float("inf")]),
        ("steps", [1, True, None, "finite", 0.1, -float("inf")]),
        ("steps", [1, True, None, "finite", 0.1]),
        ("pair", [1.0, ("inner", [])]),
        ("pair", (1.0, ("inner", [0]))),
        ("weights", TREE["weights"].astype("float64")),
        ("weights", TREE["weights"].ravel()),
        ("weights", TREE["weights"] + np.float32(3e-6)),
        ("weights", TREE["weights"] * np.float32(np.nan)),
        ("rate", 0.1),
        ("count", np.int64(8)),
        ("flags", np.array([True, True])),
        ("file", None),
    ],
)
def test_changed_original_is_reported(where, changed, recorded):
    # By each test that asks for it.
    for _ in range(2):
        with pytest.raises(AssertionError, match=f"npz: tree/{where}.*differs"):
            recorded.check("tree", lambda: {**TREE, where: changed})


def test_additional_key_of_original_is_reported(recorded):
    with pytest.raises(AssertionError, match="differs"):
        recorded.check("tree", lambda: {**TREE, "more": 1})


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("units, is_same", [(15, True), (17, False)])
def test_floats_may_differ_by_sixteen_units_of_largest_value(units, is_same, dtype):
    unit = np.finfo("float16" if dtype == "float16" else "float32").eps
    recorded = np.array([1024.0, 0.0, np.inf, np.nan], dtype)
    live = np.array([1024.0, 1024.0 * units * unit, np.inf, np.nan], dtype)
    assert originals.is_same_leaf(live, recorded) == is_same


def test_two_different_records_of_one_name_are_rejected(records):
    both = records()
    both.record("tree", lambda: [1])
    both.record("tree", lambda: [1])
    with pytest.raises(AssertionError, match="tree, which is recorded twice"):
        both.record("tree", lambda: [2])


def test_equal_records_are_written_as_equal_bytes(records, recorded):
    before = recorded.path.read_bytes()
    for name in ("later", "earlier"):
        recorded.record(name, lambda: [1.0])
    recorded.write()
    assert recorded.path.read_bytes() != before
    recorded.path.unlink()
    again = records()
    again.record("earlier", lambda: [1.0])
    again.record("tree", lambda: TREE)
    again.record("later", lambda: [1.0])
    again.write()
    assert again.path.read_bytes() == recorded.path.read_bytes()


def test_records_of_other_package_versions_are_discarded(
    records, recorded, monkeypatch
):
    recorded.record("more", lambda: 1)
    recorded.write()
    assert records().trees.keys() == {"tree", "more"}
    assert records().versions["numpy"] == np.__version__
    monkeypatch.setattr(originals, "installed_versions", lambda: {"numpy": "3.0"})
    later = records()
    later.record("other", lambda: 2)
    later.write()
    assert records().trees.keys() == {"other"}
    assert records().versions == {"numpy": "3.0"}
