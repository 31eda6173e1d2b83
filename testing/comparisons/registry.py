"""The overrides of a backend, and the comparison of each with the default."""

from keras_lso._backend.framework import Framework

COMPARISONS = {}


def overrides(cls):
    """What a class, or one between it and `Framework`, overrides: a list of names."""
    bases = cls.__mro__[: cls.__mro__.index(Framework)]
    ours = Framework.__mro__[:-1]
    known = [name for base in ours for name in vars(base) if not name.startswith("_")]
    return [name for name in known if any(name in vars(base) for base in bases)]


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
