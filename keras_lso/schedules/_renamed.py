"""The names of before: they are the same classes, and using one warns."""

import sys
import warnings


def renamed(module, **new_names):
    """Returns a `__getattr__` for a module in which classes have other names now.

    Args:
        module: String, the module's `__name__`.
        new_names: Strings, the new name of each old one.
    """

    def getattr_of_module(name):
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = new_names[name]
        warnings.warn(
            f"`{module}.{name}` is deprecated, since a class of Keras's has its last "
            f"name and does something else. Write `keras_lso.schedules.{new}`, the "
            "same class. What it saves does not change.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(sys.modules[module], new)

    return getattr_of_module
