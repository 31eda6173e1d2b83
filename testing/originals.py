"""What an original does, such as tf.keras's class: run once, recorded, and read here.

A test gives `original` a function that runs the original, and gets what it returns:

- by default from the record, so that nothing of the original is even imported;
- with `--full` from the original itself, after the record was compared with it;
- with `--record` (`make golden`) from the original, and the record is written.

The records of `test_x.py` are in `golden/test_x.npz` beside it: the arrays, one after
the other, and the rest as JSON, with the versions of what made them.
"""

import copy
import importlib.metadata
import json
import math

import numpy as np
import pytest

# Largest difference between a record and the original on another machine, as a share
# of the largest magnitude in the array: 32 roundings of a float32, at 6e-8 each. Other
# processors add up in another order; the runs are as long as 300 steps.
SHARE = 2e-6
MAKERS = (
    *("tensorflow", "tensorflow_cpu", "tf_keras", "tf-models-official"),
    *("jax", "jaxlib", "optax", "numpy"),
)
ALL_RECORDS = pytest.StashKey[dict]()


def pytest_addoption(parser):
    parser.addoption(
        "--record",
        action="store_true",
        help="run the tests that have an original, and record what it does",
    )


def pytest_configure(config):
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
    """`original(run, name=None)`: what `run()` returns, or what is recorded of it.

    It is a tree of dicts with strings as keys, lists, tuples, NumPy's arrays and
    scalars, bytes, strings, numbers, bools and None. The name is that of the test with
    its arguments; tests of one module that share an original give it one of its own.
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
    return lambda run, name=None: get(name or request.node.name, run)


class Records:
    """What the originals of one module did, by name."""

    def __init__(self, path):
        self.path = path
        self.versions, self.trees = load(path) if path.exists() else ({}, {})
        self.live = {}

    def read(self, name, run):
        if name not in self.trees:
            raise LookupError(f"{self.path} has no {name!r}; `make golden` makes it.")
        return copy.deepcopy(self.trees[name])

    def check(self, name, run):
        """Returns what the original does, if that is what was recorded."""
        recorded = self.read(name, run)
        if name not in self.live:
            self.live[name] = as_recorded(run())
            compare(self.live[name], recorded, f"{self.path.name}: {name}")
        return copy.deepcopy(self.live[name])

    def record(self, name, run):
        tree = as_recorded(run())
        if name in self.live:
            # Two tests share it, or one of them has taken the name of the other.
            compare(tree, self.live[name], f"{name}, which is recorded twice")
        self.live[name] = tree
        return copy.deepcopy(tree)

    def write(self):
        """Writes what was recorded, and keeps what the same versions did before."""
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


# --- Files -----------------------------------------------------------------------


def save(path, versions, trees):
    """Writes trees by their names; the same bytes, if they are the same."""
    arrays = []
    flat = {name: flatten(tree, arrays) for name, tree in sorted(trees.items())}
    streams = {}
    for array in arrays:
        streams.setdefault(array.dtype.name, []).append(array.ravel())
    streams = {name: np.concatenate(streams[name]) for name in sorted(streams)}
    text = json.dumps({"versions": versions, "records": flat}, separators=(",", ":"))
    np.savez_compressed(path, json=np.frombuffer(text.encode(), "uint8"), **streams)


def load(path):
    """Returns the versions, and the trees by their names."""
    with np.load(path, allow_pickle=False) as file:
        contents = json.loads(file["json"].tobytes())
        streams = {name: file[name] for name in file.files}
    begins = dict.fromkeys(streams, 0)

    def take(dtype, shape):
        begin, size = begins[dtype], math.prod(shape)
        begins[dtype] += size
        return streams[dtype][begin : begin + size].reshape(shape).copy()

    trees = {n: unflatten(flat, take) for n, flat in contents["records"].items()}
    return contents["versions"], trees


def flatten(tree, arrays):
    """Returns the tree without its arrays, as JSON has it; they go into a list."""
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    if type(tree) is list:
        return [flatten(item, arrays) for item in tree]
    if type(tree) is tuple:
        return {"tuple": [flatten(item, arrays) for item in tree]}
    if type(tree) is dict and all(type(key) is str for key in tree):
        return {"dict": {key: flatten(item, arrays) for key, item in tree.items()}}
    if type(tree) is bytes:
        arrays.append(np.frombuffer(tree, "uint8"))
        return {"bytes": len(tree)}
    if isinstance(tree, np.ndarray | np.generic) and tree.dtype.kind in "biuf":
        arrays.append(np.asarray(tree))
        kind = "array" if isinstance(tree, np.ndarray) else "scalar"
        return {kind: [tree.dtype.name, *tree.shape]}
    raise TypeError(f"An original must not return {tree!r} of type {type(tree)}.")


def unflatten(flat, take):
    """Returns the tree; `take(dtype, shape)` gives the arrays, in their order."""
    if isinstance(flat, list):
        return [unflatten(item, take) for item in flat]
    if not isinstance(flat, dict):
        return flat
    [(kind, content)] = flat.items()
    if kind == "dict":
        return {key: unflatten(item, take) for key, item in content.items()}
    if kind == "tuple":
        return tuple(unflatten(item, take) for item in content)
    if kind == "bytes":
        return take("uint8", (content,)).tobytes()
    dtype, *shape = content
    array = take(dtype, shape)
    return array if kind == "array" else array[()]


def as_recorded(tree):
    """Returns a copy of the tree, if it can be recorded."""
    arrays = []
    flat = flatten(tree, arrays)
    arrays = iter(arrays)
    return unflatten(flat, lambda dtype, shape: next(arrays).copy())


# --- Comparison ------------------------------------------------------------------


def compare(live, recorded, where):
    """Raises an error unless both are the same, floats up to `SHARE`.

    Bytes are files, which hold floats too: the tests read them, and compare.
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
    largest = np.abs(recorded[finite]).max(initial=0.0)
    return bool((np.abs(live[finite] - recorded[finite]) <= SHARE * largest).all())
