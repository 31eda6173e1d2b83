"""The overrides of a backend, and the comparison of each with the default.

The name of a method of `Host` or of `Replicas` begins with `host.` or `replicas.`.
"""

from keras_lso._backend.framework import Framework
from keras_lso._backend.host import Host
from keras_lso._backend.replicas import Replicas

COMPARISONS = {}


# The attributes of a `Framework` whose methods are compared one by one.
PARTS = {"": Framework, "host.": Host, "replicas.": Replicas}


def overrides(cls):
    """What a `Framework` and its parts override, a list of names."""
    found = []
    for prefix, default in PARTS.items():
        own = type(getattr(cls, prefix[:-1])) if prefix else cls
        bases = own.__mro__[: own.__mro__.index(default)]
        found += [
            prefix + name
            for name in vars(default)
            if not name.startswith("_") and f"{name}." not in PARTS
            if any(name in vars(base) for base in bases)
        ]
    return found


def compares(*names):
    """Registers a function of an override, and of the default, as the comparison."""

    def register(comparison):
        COMPARISONS.update(dict.fromkeys(names, comparison))
        return comparison

    return register


def comparison_of(cls, name):
    assert name in COMPARISONS, (
        f"`{cls.__name__}.{name}` is held against nothing: write a comparison in "
        "testing/comparisons/"
    )
    return COMPARISONS[name]
