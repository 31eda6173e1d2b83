"""Recorded results of originals, such as tf.keras's class.

A test calls `original` with a function that runs the original, and gets its result:

- by default from the record, without an import of the original;
- with `--full` from the original itself, after a comparison with the record;
- with `--record` (`make golden`) from the original, and the record is written;
- if the original is not installed, always from the record.

The records of `test_x.py` are in `golden/test_x.npz` next to it: the arrays one after
the other, and the rest as JSON, with the versions of the packages that made them.
"""

import copy
import importlib.metadata
import itertools
import json
import math

import numpy as np
import pytest

# The largest difference between a record and the original on another machine, in units
# in the last place (at most float32's) of the largest magnitude in the array. Other
# processors add up in another order; a run has up to 300 steps.
UNITS = 16
MAKERS = (
    *("tensorflow", "tensorflow_cpu", "tf_keras", "tf-models-official"),
    *("jax", "jaxlib", "optax", "numpy", "torch", "transformers"),
)
ALL_RECORDS = pytest.StashKey[dict]()


def pytest_addoption(parser):
    parser.addoption(
        "--record",
        action="store_true",
        help="run the tests that have an original, and record its results",
    )


def pytest_configure(config):
    if config.getoption("record") and hasattr(config, "workerinput"):
        raise pytest.UsageError("--record writes files: it needs a single process")
    config.stash[ALL_RECORDS] = {}


def pytest_collection_modifyitems(config, items):
    if config.getoption("record"):
        others = [i for i in items if "original" not in getattr(i, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_sessionfinish(session):
    if session.config.getoption("record"):
        for records in session.config.stash[ALL_RECORDS].values():
            records.write()


@pytest.fixture
def original(request):
    """`original(run, name=None, is_installed=True)`: the result of `run()`.

    The result is a tree of dicts with strings as keys, lists, tuples, NumPy's arrays
    and scalars, bytes, strings, numbers, bools and None. By default the name consists
    of the test's name and arguments, and a number from its second original on. Tests of
    one module that share an original give it a name.
    """
    path = request.path.parent / "golden" / f"{request.path.stem}.npz"
    all_records = request.config.stash[ALL_RECORDS]
    if path not in all_records:
        all_records[path] = Records(path)
    records = all_records[path]
    if request.config.getoption("record"):
        get = records.record
    elif request.config.getoption("full"):
        get = records.check
    else:
        get = records.read
    numbers = itertools.count(1)

    def result_of(run, name=None, is_installed=True):
        number = next(numbers)
        own_name = request.node.name if number == 1 else f"{request.node.name} {number}"
        return (get if is_installed else records.read)(name or own_name, run)

    return result_of


class Records:
    """The results of the originals of one module, by name."""

    def __init__(self, path):
        self.path = path
        self.versions, self.trees = load(path) if path.exists() else ({}, {})
        self.live = {}

    def read(self, name, run):
        if name not in self.trees:
            raise LookupError(f"{self.path} has no {name!r}; `make golden` makes it.")
        return copy.deepcopy(self.trees[name])

    def check(self, name, run):
        """Returns the result of the original, after a comparison with the record."""
        recorded = self.read(name, run)
        if name not in self.live:
            live = as_recorded(run())
            compare(live, recorded, f"{self.path.name}: {name}")
            self.live[name] = live
        return copy.deepcopy(self.live[name])

    def record(self, name, run):
        tree = as_recorded(run())
        if name in self.live:
            # Two tests share the original, or have the same name by mistake.
            compare(tree, self.live[name], f"{name}, which is recorded twice")
        self.live[name] = tree
        return copy.deepcopy(tree)

    def write(self):
        """Writes the new records, and keeps earlier records of the same versions."""
        if not self.live:
            return  # The original is not installed.
        versions = installed_versions()
        kept = self.trees if self.versions == versions else {}
        self.path.parent.mkdir(exist_ok=True)
        save(self.path, versions, kept | self.live)


def installed_versions():
    versions = {}
    for name in MAKERS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def save(path, versions, trees):
    """Writes trees by their names; equal trees give equal bytes."""
    leaves = Leaves()
    flat = {name: flatten(tree, leaves) for name, tree in sorted(trees.items())}
    streams = {}
    for array in leaves.arrays:
        streams.setdefault(array.dtype.name, []).append(array.ravel())
    streams = {name: np.concatenate(streams[name]) for name in sorted(streams)}
    kinds = [[array.dtype.name, *array.shape] for array in leaves.arrays]
    contents = {"versions": versions, "leaves": kinds, "records": flat}
    text = json.dumps(contents, separators=(",", ":"))
    np.savez_compressed(path, json=np.frombuffer(text.encode(), "uint8"), **streams)


def load(path):
    """Returns the versions, and the trees by their names."""
    with np.load(path, allow_pickle=False) as file:
        contents = json.loads(file["json"].tobytes())
        streams = {name: file[name] for name in file.files}
    leaves, begins = [], dict.fromkeys(streams, 0)
    for dtype, *shape in contents["leaves"]:
        begin, end = begins[dtype], begins[dtype] + math.prod(shape)
        leaves.append(streams[dtype][begin:end].reshape(shape))
        begins[dtype] = end
    records = contents["records"].items()
    return contents["versions"], {name: unflatten(r, leaves) for name, r in records}


class Leaves:
    """The arrays of trees; equal arrays are stored once."""

    def __init__(self):
        self.arrays = []
        self.numbers = {}

    def add(self, array):
        """Returns the number of an array."""
        key = array.dtype.name, array.shape, array.tobytes()
        if key not in self.numbers:
            self.numbers[key] = len(self.arrays)
            self.arrays.append(array)
        return self.numbers[key]


def flatten(tree, leaves):
    """Returns the tree in JSON's types, with numbers in place of its arrays."""
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    if type(tree) is list:
        return [flatten(item, leaves) for item in tree]
    if type(tree) is tuple:
        return {"tuple": [flatten(item, leaves) for item in tree]}
    if type(tree) is dict and all(type(key) is str for key in tree):
        return {"dict": {key: flatten(item, leaves) for key, item in tree.items()}}
    if type(tree) is bytes:
        return {"bytes": leaves.add(np.frombuffer(tree, "uint8"))}
    if isinstance(tree, np.ndarray | np.generic) and tree.dtype.kind in "biuf":
        kind = "array" if isinstance(tree, np.ndarray) else "scalar"
        return {kind: leaves.add(np.asarray(tree))}
    raise TypeError(f"An original must not return {tree!r} of type {type(tree)}.")


def unflatten(flat, leaves):
    """Returns the tree."""
    if isinstance(flat, list):
        return [unflatten(item, leaves) for item in flat]
    if not isinstance(flat, dict):
        return flat
    [(kind, content)] = flat.items()
    if kind == "dict":
        return {key: unflatten(item, leaves) for key, item in content.items()}
    if kind == "tuple":
        return tuple(unflatten(item, leaves) for item in content)
    array = leaves[content]
    if kind == "bytes":
        return array.tobytes()
    return array.copy() if kind == "array" else array[()]


def as_recorded(tree):
    """Returns a copy of the tree, if it can be recorded."""
    leaves = Leaves()
    return unflatten(flatten(tree, leaves), leaves.arrays)


def compare(live, recorded, where):
    """Raises an error unless both are the same, floats up to `UNITS`.

    Bytes are files, which may contain floats: the tests read and compare them.
    """
    same = type(live) is type(recorded)
    if same and isinstance(live, dict):
        same = list(live) == list(recorded)
        pairs = {k: (live[k], recorded[k]) for k in live} if same else {}
    elif same and isinstance(live, list | tuple):
        same = len(live) == len(recorded)
        pairs = dict(enumerate(zip(live, recorded, strict=True))) if same else {}
    else:
        pairs = {}
        same = same and is_same_leaf(live, recorded)
    if not same:
        raise AssertionError(
            f"{where}: the original differs from its record, which `make golden` "
            f"replaces.\noriginal: {live!r}\nrecord: {recorded!r}"
        )
    for key, pair in pairs.items():
        compare(*pair, f"{where}/{key}")


def is_same_leaf(live, recorded):
    if isinstance(live, bytes):
        return True
    if not isinstance(live, float | np.ndarray | np.generic):
        return live == recorded
    live, recorded = np.asarray(live), np.asarray(recorded)
    if (live.dtype, live.shape) != (recorded.dtype, recorded.shape):
        return False
    if live.dtype.kind != "f":
        return np.array_equal(live, recorded)
    finite = np.isfinite(recorded)
    if not np.array_equal(live[~finite], recorded[~finite], equal_nan=True):
        return False
    unit = max(np.finfo(live.dtype).eps, np.finfo("float32").eps)
    largest = np.abs(recorded[finite]).max(initial=0.0)
    error = np.abs(live[finite] - recorded[finite])
    return bool((error <= UNITS * unit * largest).all())
