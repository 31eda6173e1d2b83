"""`Schedule`, the base of the schedules, and what they do with schedules in them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Self

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._core.checks import (
    check_config,
    check_rate,
    entries,
    is_number,
    refusal,
    schedule_hint,
    warn,
)
from keras_lso._core.configs import read_object
from keras_lso._core.fields import check_fields
from keras_lso._keras_internals.optimizers import steppers_of
from keras_lso._keras_internals.state import schedule_of
from keras_lso.schedules._curves import float32

# Keras has no types: mypy reads its classes as `Any`, and would let a dataclass with
# such a base take any arguments. For mypy this name is true.
MYPY = False
if MYPY:

    class _Base:
        """What mypy knows of a `LearningRateSchedule`."""

else:
    _Base = LearningRateSchedule


class Schedule(_Base):
    """Base of the schedules: checks, writes and reads the fields of a dataclass."""

    name: Any
    _checks: ClassVar[dict[str, Callable[[str, Any], Any]]]
    # The fields that are schedules or rates, or lists of them.
    _members: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Checks the arguments."""
        check_fields(self)
        if self.name is None:  # As in configs of the Model Garden.
            self.name = type(self).__name__

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for `from_config`."""
        write = keras.saving.serialize_keras_object
        return {name: write(getattr(self, name)) for name in self._checks}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates a schedule from the return value of `get_config`."""
        config = check_config(cls.__qualname__, config)
        members = config.keys() & set(cls._members)
        return cls(**config | {name: _read(name, config[name]) for name in members})


# --- Schedules in schedules: a member is a schedule, or a number, the constant rate ---


def check_schedule_or_rate(argument: str, value: Any) -> Any:
    """Returns a schedule unchanged, and a rate as a float."""
    if isinstance(value, LearningRateSchedule):
        return value
    if is_number(value):
        return check_rate(argument, value)
    requirement = "be a `keras.optimizers.schedules.LearningRateSchedule` or a number"
    if isinstance(value, dict):
        requirement += ". Make a schedule from its config with `from_config` first"
    elif callable(value):
        requirement += f". {schedule_hint(value)}"
    raise refusal(argument, value, requirement, TypeError)


Member = Annotated[LearningRateSchedule | float, check_schedule_or_rate]


def check_boundaries(steps: Sequence[int], count: int, reason: str) -> None:
    """Raises a `ValueError` unless there are `count` strictly increasing steps."""
    if len(steps) != count:
        raise refusal("boundaries", steps, f"have {entries(count)}, {reason}")
    if any(low >= high for low, high in itertools.pairwise(steps)):
        raise refusal("boundaries", steps, "be strictly increasing")


def rate_at(member, step):
    """Returns the rate of a member in float32."""
    rate = member(step) if isinstance(member, LearningRateSchedule) else member
    return float32(rate)


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
            f"serialize(schedule)`. Received: {argument}={config!r}"
        )
    return read_object(read_schedule, config, f"schedule `{argument}`")


def read_schedule(config, custom_objects=None):
    """Returns the object for a config; finds our classes by their bare names too."""
    if config.get("module") or config.get("registered_name"):
        return keras.saving.deserialize_keras_object(config, custom_objects)
    name = config["class_name"]
    ours = keras.saving.get_registered_object(f"keras_lso>{name}")
    if ours is not None and not hasattr(keras.optimizers.schedules, name):
        custom_objects = {name: ours, **(custom_objects or {})}
    return keras.optimizers.schedules.deserialize(config, custom_objects)


def warn_of_micro_batches(optimizer: Any) -> None:
    """Warns of a schedule that counts micro-batches in a built optimizer."""
    for stepper in steppers_of(optimizer):
        window, rate = stepper.gradient_accumulation_steps, schedule_of(stepper)
        if window and rate is not None and getattr(rate, "_counts_micro_batches", True):
            name = type(stepper).__name__
            warn(
                f"With `gradient_accumulation_steps={window}` a learning-rate schedule "
                f"counts micro-batches, not updates: {100 * window} of its steps are "
                f"100 updates. To make it count updates, write `{name}(keras_lso."
                f"schedules.PerUpdate(schedule, {window}), "
                f"gradient_accumulation_steps={window})`. If its steps are "
                "micro-batches on purpose, write `keras_lso.schedules.PerUpdate("
                f"schedule, 1)`. Received: learning_rate={rate!r}"
            )
            return
