"""Schedules as declarations: a class lists its arguments, and the rest follows.

```python
@declared("FixedLR")
class FixedLR(Schedule):
    learning_rate: float = field(check.rate)
    name: str = field(check.name, default="FixedLR")
```

From the fields follow `__init__(self, learning_rate, name="FixedLR")`, the attributes,
their checks, the config, and most of the docstring. Python's dataclasses make the
constructor; this module adds the rest.

A class declares all of its arguments, in the order of its signature. In checks and
configs those that its base annotates come first, as the base lists them.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, dataclass_transform

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso.schedules._texts import complete


def field(check, *, default: Any = dataclasses.MISSING) -> Any:
    """Declares an argument of a schedule.

    Args:
        check: Callable of the argument's name and value that returns the value to
            keep, or raises an error.
        default: The argument's default. Without one the argument is required.
    """
    return dataclasses.field(default=default, metadata={"check": check})


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def declared(saved_as, returns="a float32 scalar"):
    """Makes a class decorator for a `Schedule` that declares its arguments.

    It also registers the class for serialization and completes its docstring.

    Args:
        saved_as: String, the name of the class in configs. It stays when the class is
            renamed: Keras writes it twice, as the registered name and, from the
            class's `__name__`, as the `class_name`.
        returns: String, the kind of number that the schedule returns.
    """

    def declare(cls):
        # Instances are compared and shown as Keras's schedules are.
        dataclasses.dataclass(eq=False, repr=False, match_args=False)(cls)
        # The annotations describe the attributes; arguments may be convertible to them.
        cls.__init__.__annotations__ = {}
        fields = dataclasses.fields(cls)
        checks = {f.name: f.metadata["check"] for f in fields}
        order = [n for c in reversed(cls.__mro__) for n in inspect.get_annotations(c)]
        cls._checks = {name: checks[name] for name in order if name in checks}
        for name in checks.keys() & vars(cls).keys():
            # A default is no attribute of the class.
            delattr(cls, name)
        cls.__name__ = saved_as
        cls.__doc__ = complete(cls.__doc__, fields, returns)
        register = keras.saving.register_keras_serializable("keras_lso", name=saved_as)
        return register(cls)

    return declare


class Schedule(LearningRateSchedule):
    """Base of the schedules that declare their arguments."""

    _checks: dict[str, Callable]

    def __post_init__(self):
        for name, check in self._checks.items():
            value = getattr(self, name)
            if name == "name" and value is None:
                # As in old configs.
                value = type(self).__name__
            setattr(self, name, check(name, value))
        self._validate()

    def _validate(self):
        """Checks the arguments together, after each of them was checked alone."""

    def get_config(self):
        return {
            name: keras.saving.serialize_keras_object(getattr(self, name))
            for name in self._checks
        }
