"""Former names of classes: each is the class of the new name, and using it warns."""

import sys
import warnings


def renamed(module, **new_names):
    """Returns a module's `__getattr__`, which finds classes by their former names.

    Args:
        module: String, the module's `__name__`.
        new_names: Strings, the new name of each former one.
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
