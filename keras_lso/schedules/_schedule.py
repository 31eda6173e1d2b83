"""`Schedule`, the base of the schedules, and the types of their arguments.

A schedule is a dataclass: its fields are the arguments of its constructor, the
attributes and the entries of its config. The type of a field holds the check of it,
such as `check_rate` in `Rate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._core import checks
from keras_lso._core.config_dicts import read_object
from keras_lso.schedules._curves import float32

# Keras has no types: mypy reads its classes as `Any`, and would let a dataclass with
# such a base take any arguments. For mypy this name is true.
MYPY = False
if MYPY:

    class _Base:
        """What mypy knows of a `LearningRateSchedule`."""

else:
    _Base = LearningRateSchedule

_ClassT = TypeVar("_ClassT", bound=type)

Rate = Annotated[float, checks.check_rate]
Real = Annotated[float, checks.check_real]
Positive = Annotated[float, checks.check_positive]
Share = Annotated[float, checks.check_share]
Count = Annotated[int, checks.check_positive_int]
Step = Annotated[int, checks.check_step]
Length = Annotated[
    int, partial(checks.check_int, at_least=1, at_most=checks.LARGEST_STEP)
]
Member = Annotated[LearningRateSchedule | float, checks.check_schedule_or_rate]


class Schedule(_Base):
    """Base of the schedules: checks, stores, writes and reads the fields of a class."""

    name: Any
    _checks: ClassVar[dict[str, Callable[[str, Any], Any]]]
    # The fields that are schedules or rates, or lists of them.
    _members: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Checks the arguments."""
        for name, check in self._checks.items():
            setattr(self, name, check(name, getattr(self, name)))
        if self.name is None:  # As in configs of the Model Garden.
            self.name = type(self).__name__

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for `from_config`."""
        return {name: _written(getattr(self, name)) for name in self._checks}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates a schedule from the return value of `get_config`."""
        config = checks.check_config(cls.__qualname__, config)
        for name in config.keys() & set(cls._members):
            config[name] = _read(name, config[name])
        return cls(**config)


def registered(name: str) -> Callable[[_ClassT], _ClassT]:
    """Returns a decorator for a dataclass: Keras finds it in configs by this name."""

    def decorate(cls):
        hints = get_type_hints(cls, include_extras=True)
        cls._checks = {f.name: _check_of(hints[f.name]) for f in fields(cls)}
        # `help` shows the types without their checks.
        cls.__init__.__annotations__ = get_type_hints(cls.__init__) | {"return": None}
        # Keras writes `__name__` as the `class_name`, next to the registered name.
        cls.__name__ = name
        return keras.saving.register_keras_serializable("keras_lso", name=name)(cls)

    return decorate


def _check_of(hint: Any) -> Any:
    """Returns the check of an argument of this type."""
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        return parts[1]
    if get_origin(hint) is Literal:
        return partial(checks.check_choice, choices=parts)
    if get_origin(hint) is Sequence:
        return partial(checks.check_items, _check_of(parts[0]))
    if type(None) in parts:
        return partial(_check_optional, _check_of(parts[0]))
    return {int: checks.check_int, bool: checks.check_bool, str: _check_name}[hint]


def _check_optional(check, argument, value):
    return None if value is None else check(argument, value)


def _check_name(argument, value):
    if value is not None and not isinstance(value, str):
        raise TypeError(f"Argument `name` must be a string. Received: name={value!r}")
    return value


# --- Schedules in schedules: a member is a schedule, or a number, the constant rate ---


def rate_at(member, step):
    """Returns the rate of a member in float32."""
    rate = member(step) if isinstance(member, LearningRateSchedule) else member
    return float32(rate)


def _written(value):
    """Returns the entry of a config for an argument."""
    if isinstance(value, list):
        return [_written(each) for each in value]
    if isinstance(value, LearningRateSchedule):
        return keras.saving.serialize_keras_object(value)
    return value


def _read(argument, config):
    """Returns the member, or the members, for an entry of a config."""
    if isinstance(config, list):
        return [_read(f"{argument}[{i}]", each) for i, each in enumerate(config)]
    if not isinstance(config, dict):
        return config
    if "class_name" not in config:
        raise ValueError(
            f"The config's `{argument}` does not name the class of the schedule, which "
            "the Model Garden leaves out. Replace it with `keras.optimizers.schedules."
            f"serialize(schedule)`, or build the schedule in code. "
            f"Received: {argument}={config!r}"
        )
    return read_object(read_schedule, config, f"schedule `{argument}`")


def read_schedule(config, custom_objects=None):
    """Returns the object for a config whose keys `read_object` has checked.

    Unlike Keras, it also finds the package's classes by their bare names.
    """
    if config.get("module") or config.get("registered_name"):
        return keras.saving.deserialize_keras_object(config, custom_objects)
    name = config["class_name"]
    ours = keras.saving.get_registered_object(f"keras_lso>{name}")
    if ours is not None and not hasattr(keras.optimizers.schedules, name):
        custom_objects = {name: ours, **(custom_objects or {})}
    return keras.optimizers.schedules.deserialize(config, custom_objects)
