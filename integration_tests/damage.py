"""Ways to damage configs and files: the same ones at every run.

Each function yields pairs of a label and a damaged copy. Nothing here knows what a
loader makes of them: that is the business of `test_damaged_files.py`.
"""

import copy
import io
import json
import random
import zipfile

import h5py
import numpy as np

CONFIG = "config.json"
WEIGHTS = "model.weights.h5"

# What stands in a config where something else belongs. JSON, as Python writes and
# reads it, has all of these.
WRONG_VALUES = {
    "null": None,
    "a word": "x",
    "a number as a word": "1e999",
    "true": True,
    "an empty list": [],
    "a list": [1.0, 2.0],
    "an empty dict": {},
    "-1": -1,
    "0": 0,
    "0.5": 0.5,
    "2**63": 2**63,
    "1e39": 1e39,
    "1e-50": 1e-50,
    "a long integer": 10**400,
    "NaN": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
}
# One of each kind of trouble, for configs of which many values are taken.
FEW_VALUES = {
    label: WRONG_VALUES[label]
    for label in ("null", "a word", "a list", "-1", "a long integer", "NaN", "inf")
}


def nested(depth, leaf=None):
    """A dict in a dict in a dict."""
    config = leaf or {}
    for _ in range(depth):
        config = {"class_name": "SGD", "config": config}
    return config


# --- Configs ------------------------------------------------------------------


def paths_in(config, prefix=()):
    """Yields the paths of all keys of a nested dict."""
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths_in(value, (*prefix, key))


def changed(config, path, change):
    """Returns a copy in which `change(dict, key)` was applied at a path."""
    config = copy.deepcopy(config)
    parent = config
    for key in path[:-1]:
        parent = parent[key]
    change(parent, path[-1])
    return config


def put(value):
    """Returns a change that puts `value` in the place of what was there."""

    def change(parent, key):
        parent[key] = copy.deepcopy(value)

    return change


def _delete(parent, key):
    del parent[key]


def _rename(parent, key):
    parent[key + "s"] = parent.pop(key)


def damaged_values(config, paths=None, values=WRONG_VALUES):
    """Every key: without it, under another name, and with each wrong value."""
    for path in paths_in(config) if paths is None else paths:
        name = ".".join(path)
        yield f"{name} is missing", path, changed(config, path, _delete)
        yield f"{name} is renamed", path, changed(config, path, _rename)
        for label, value in values.items():
            yield f"{name} is {label}", path, changed(config, path, put(value))


def foreign_objects(sentinel):
    """Returns dicts that describe no optimizer, some of which would run code.

    Args:
        sentinel: Path that a shell command in them would create.
    """
    command = f"touch {sentinel}"
    python = f"open({str(sentinel)!r}, 'w')"
    functions = {
        "os.system": ("os", "system", {"command": command}),
        "posix.system": ("posix", "system", {"command": command}),
        "subprocess.Popen": ("subprocess", "Popen", {"args": command, "shell": True}),
        "builtins.eval": ("builtins", "eval", {"source": python}),
        "builtins.exec": ("builtins", "exec", {"source": python}),
        "keras.config": ("keras.config", "enable_unsafe_deserialization", {}),
        "a module of one's own": ("damage_sentinel", "Optimizer", {}),
        "a module inside of Keras": ("keras.src.damage_sentinel", "Optimizer", {}),
        "a module of ours": ("keras_lso.damage_sentinel", "LARS", {}),
        "a relative module": (".damage_sentinel", "Optimizer", {}),
        "keras.layers.Dense": ("keras.layers", "Dense", {"units": 2}),
        "keras.layers.Lambda": ("keras.layers", "Lambda", {"function": python}),
        "keras.Model": ("keras", "Model", {}),
        "keras.optimizers.Optimizer": ("keras.optimizers", "Optimizer", {}),
        "keras.optimizers.get": ("keras.optimizers", "get", {"identifier": "adam"}),
        "an unknown class": ("keras.optimizers", "Newton", {}),
        "an unknown class of ours": ("keras_lso", "Newton", {}),
        "keras.utils.get_file": ("keras.utils", "get_file", {"origin": "file:///"}),
        "tf.io.write_file": ("tensorflow.io", "write_file", {"contents": command}),
    }
    for label, (module, name, config) in functions.items():
        for registered in (name, None):
            yield (
                f"{label} ({registered})",
                {
                    "module": module,
                    "class_name": name,
                    "config": config,
                    "registered_name": registered,
                },
            )
        yield (
            f"{label} as a function",
            {
                "module": module,
                "class_name": "function",
                "config": name,
                "registered_name": name,
            },
        )
    yield "a lambda", {"class_name": "__lambda__", "config": {"value": lambda_(python)}}
    yield "a tensor", {"class_name": "__tensor__", "config": {"value": 1, "dtype": "O"}}
    yield "no class", {"config": {}}
    yield "no config", {"class_name": "SGD"}
    yield "no names at all", {"a": 1}


def lambda_(source):
    """What Keras writes for a Python lambda; the code is run when it is called."""
    from keras.src.utils import python_utils

    function = eval(f"lambda *args, **kwargs: {source}")
    code, defaults, closure = python_utils.func_dump(function)
    return [code, defaults, closure]


# --- Bytes --------------------------------------------------------------------


def damaged_bytes(data, seed, truncated, flipped):
    """Copies of a file that end too early, and copies with wrong bytes."""
    numbers = random.Random(seed)
    for _ in range(truncated):
        end = numbers.randrange(len(data))
        yield f"the first {end} bytes", data[:end]
    for _ in range(flipped):
        copied = bytearray(data)
        places = [numbers.randrange(len(data)) for _ in range(numbers.choice((1, 16)))]
        for place in places:
            copied[place] ^= numbers.randrange(1, 256)
        yield f"other bytes at {places}", bytes(copied)


# --- `.keras` files -----------------------------------------------------------


def members(data):
    """Returns a dict of the names in an archive to their contents."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_of(contents):
    """Returns the bytes of an archive."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return stream.getvalue()


def with_config(data, change):
    """Returns a `.keras` file with another config, which `change` returns."""
    contents = members(data)
    config = change(json.loads(contents[CONFIG]))
    text = config if isinstance(config, str) else json.dumps(config)
    return archive_of({**contents, CONFIG: text})


def bomb(name):
    """An archive whose member `name` shrinks a thousandfold."""

    def make(contents):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for key, content in contents.items():
                if key != name:
                    archive.writestr(key, content)
            with archive.open(deflated(name), "w", force_zip64=True) as file:
                file.write(bytes(2**22))
        return stream.getvalue()

    return make


def deflated(name):
    item = zipfile.ZipInfo(name)
    item.compress_type = zipfile.ZIP_DEFLATED
    return item


def encrypted(contents):
    """As the zipfile module sees a member that has a password."""
    data = bytearray(archive_of(contents))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.find(signature)
        while place != -1:
            data[place + offset] |= 1
            place = data.find(signature, place + 1)
    return bytes(data)


ARCHIVES = {
    "a bomb for a config": bomb(CONFIG),
    "a bomb for weights": bomb(WEIGHTS),
    "encrypted": encrypted,
    "empty": lambda contents: archive_of({}),
    "in a folder": lambda contents: archive_of(
        {f"model/{name}": content for name, content in contents.items()}
    ),
    "a config that is no JSON": lambda contents: archive_of(
        {**contents, CONFIG: b"\x80\x04."}
    ),
    "a config nested too deeply": lambda contents: archive_of(
        {**contents, CONFIG: b'{"a":' * 10**5 + b"1" + b"}" * 10**5}
    ),
    "a config with a long number": lambda contents: archive_of(
        {**contents, CONFIG: b'{"a":' + b"1" * 5000 + b"}"}
    ),
    "a list for a config": lambda contents: archive_of({**contents, CONFIG: b"[1, 2]"}),
    "weights that are no HDF5": lambda contents: archive_of(
        {**contents, WEIGHTS: b"PK" * 100}
    ),
}


# --- HDF5 files ---------------------------------------------------------------


def with_h5(data, change):
    """Returns an HDF5 file after `change(file)`."""
    stream = io.BytesIO(data)
    with h5py.File(stream, "r+") as file:
        change(file)
    return stream.getvalue()


def replaced(group, name, value, **options):
    """Replaces a dataset, by an array or by a group."""
    del group[name]
    if isinstance(value, dict):
        group.create_group(name)
    else:
        group.create_dataset(name, data=value, **options)


def wrong_arrays(good):
    """Returns what may stand in a file where the array `good` belongs."""
    flat = good.reshape(-1)
    wide = np.full(good.shape, 1e300)
    yield "no array", {}
    yield "an empty array", np.zeros((0,), good.dtype)
    yield "another rank", good[None]
    yield "too long", np.concatenate([flat, flat])
    yield "words", np.full(good.shape, b"x" * 8)
    yield "objects", np.full(good.shape, "x", h5py.string_dtype())
    yield "complex", good.astype("complex64")
    yield "records", np.zeros(good.shape, [("a", "f4"), ("b", "i4")])
    yield "bools", np.ones(good.shape, "bool")
    yield "long doubles", good.astype("longdouble")
    yield "big-endian", good.astype(good.dtype.newbyteorder(">"))
    yield "float16", good.astype("float16")
    yield "uint16", np.ones(good.shape, "uint16")
    yield "int64 max", np.full(good.shape, 2**63 - 1)
    yield "uint64 max", np.full(good.shape, 2**64 - 1, "uint64")
    yield "-1", np.full(good.shape, -1, good.dtype)
    yield "0", np.zeros(good.shape, good.dtype)
    yield "a half", np.full(good.shape, 0.5)
    yield "1e300", wide
    yield "NaN", np.full(good.shape, np.nan, "float32")
    yield "inf", np.full(good.shape, np.inf, "float32")
    yield "-inf", np.full(good.shape, -np.inf, "float32")


def structures(group, name):
    """Returns changes to a group of variables, one of which is called `name`."""

    def link(target):
        def change(file):
            del file[group][name]
            file[group][name] = target

        return change

    def external(file):
        del file[group][name]
        options = {"external": [(__file__, 0, 4)]}
        file[group].create_dataset(name, (), "float32", **options)

    def virtual(file):
        del file[group][name]
        layout = h5py.VirtualLayout((), "float32")
        layout[()] = h5py.VirtualSource(__file__, "x", ())
        file[group].create_virtual_dataset(name, layout)

    def bomb(file):
        del file[group][name]
        file[group].create_dataset(
            name, (2**20, 2**16), "float32", chunks=(2**10, 2**10), compression="gzip"
        )

    def to_dataset(file):
        replaced(file, group, np.zeros(3))

    return {
        "renamed": lambda file: file[group].move(name, f"{name}x"),
        "missing": lambda file: file[group].pop(name),
        "one more": lambda file: file[group].create_dataset("100", data=1.0),
        "a soft link": link(h5py.SoftLink(f"/{group}")),
        "a link to nowhere": link(h5py.SoftLink("/nowhere")),
        "a link to another file": link(h5py.ExternalLink(__file__, "/")),
        "the bytes of another file": external,
        "a view of another file": virtual,
        "256 GiB of nothing": bomb,
        "no group": to_dataset,
        "nothing at all": lambda file: file.pop(group),
    }
