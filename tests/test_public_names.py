"""What is public: paths, names, signatures, and the names in saved configs.

`public_names.txt` lists all of it. If you change a name on purpose, write the list
again, and add a line to CHANGELOG.md:

    python tests/test_public_names.py > tests/public_names.txt
"""

import difflib
import importlib
import inspect
import pathlib
import pkgutil
import types

import keras

import keras_lso
from testing.signatures import without_types

LIST = pathlib.Path(__file__).with_name("public_names.txt")


def public_modules():
    """Returns the names of the modules with an `__all__`, those of most users first.

    A class that another module has in its `__all__` has no second path by its module.
    """
    names = ["keras_lso"]
    for module in pkgutil.walk_packages(keras_lso.__path__, "keras_lso."):
        is_private = any(part.startswith("_") for part in module.name.split("."))
        if not is_private and hasattr(importlib.import_module(module.name), "__all__"):
            names.append(module.name)
    return sorted(names, key=lambda name: (name.count("."), name))


def public_names(module):
    return sorted(module.__all__)


def describe(path, value, known):
    """Yields the lines for one public object; `known` are the paths of those before."""
    if isinstance(value, types.ModuleType):
        yield f"{path}: module"
    elif not (inspect.isclass(value) or inspect.isfunction(value)):
        yield f"{path} = {list(value) if isinstance(value, dict) else value!r}"
    elif value in known:
        yield f"{path} is {known[value]}"
    else:
        known[value] = path
        yield f"{path}{_signature(value)}"
        for name in sorted(_own_members(value)) if inspect.isclass(value) else ():
            member = inspect.getattr_static(value, name)
            yield f"    .{name}{_member(member)}"


def _own_members(cls):
    """Returns the public members of a class that Keras and Python do not define."""
    ours = [c for c in cls.__mro__ if c.__module__.startswith("keras_lso")]
    # The signature shows the fields of a dataclass.
    fields = getattr(cls, "__dataclass_fields__", {})
    return {n for c in ours for n in vars(c) if n[0] != "_" and n not in fields}


def _member(value):
    if isinstance(value, property):
        return "" if value.fset is None else " (can be set)"
    if isinstance(value, classmethod | staticmethod):
        return _signature(value.__func__)
    if inspect.isfunction(value):
        return _signature(value)
    return f" = {value!r}" if isinstance(value, str | int | float) else ""


def _signature(value):
    # A type checker reads the types: `make lint`.
    return without_types(value)


def list_public_names():
    """Returns the lines of the list."""
    lines, known = [], {}
    for name in public_modules():
        module = importlib.import_module(name)
        lines.append(f"\n{name}")
        for each in public_names(module):
            lines += describe(f"{name}.{each}", getattr(module, each), known)
    lines.append("\nregistered")
    registered = keras.saving.get_custom_objects()
    lines += sorted(name for name in registered if name.startswith("keras_lso>"))
    return "\n".join(lines).strip().splitlines()


def test_public_names_match_recorded_list():
    listed, found = LIST.read_text().splitlines(), list_public_names()
    difference = "\n".join(difflib.unified_diff(listed, found, lineterm="", n=0))
    assert found == listed, f"{__doc__}\n{difference}"


def test_dir_of_modules_lists_public_names():
    for name in public_modules():
        module = importlib.import_module(name)
        assert sorted(dir(module)) == public_names(module), name


if __name__ == "__main__":
    print("\n".join(list_public_names()))
