"""`get`, `serialize` and `deserialize`: from schedules to configs and back."""

from collections.abc import Mapping
from typing import Any

from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._core.checks import is_number, refusal
from keras_lso._core.lookup import Lookup
from keras_lso.schedules._schedule import read_schedule
from keras_lso.schedules.runs import FixedLR

_LOOKUP = Lookup(LearningRateSchedule, "a schedule", "schedule", read_schedule)


def serialize(schedule: LearningRateSchedule) -> dict[str, Any]:
    """Returns the config of a schedule, as Keras does: a dict that JSON can hold.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`.

    Raises:
        TypeError: If `schedule` is not a schedule.

    Example:

    >>> import keras_lso
    >>> config = keras_lso.schedules.serialize(keras_lso.schedules.get(0.25))
    >>> config["registered_name"], config["config"]
    ('keras_lso>FixedLR', {'learning_rate': 0.25, 'name': 'FixedLR'})
    """
    hint = "`keras_lso.schedules.get` makes one from a number"
    return _LOOKUP.write("schedule", schedule, hint)


def deserialize(
    config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> LearningRateSchedule:
    """Returns the schedule that a config dict describes.

    Args:
        config: The return value of `serialize`, or a dict with the bare name of a class
            as its `"class_name"`, and the arguments as its `"config"`.
        custom_objects: The classes that the config names. Defaults to `None`.

    Raises:
        TypeError: If `config` is not a dict, or Keras finds no class for it.
        ValueError: If `config` describes no schedule, or does not fit its class.

    Example:

    >>> import keras_lso
    >>> config = {"class_name": "FixedLR", "config": {"learning_rate": 0.25}}
    >>> keras_lso.schedules.deserialize(config).learning_rate
    0.25
    """
    _LOOKUP.check(config)
    if "class_name" not in config:
        requirement = "have a 'class_name'. `get_config` returns only the arguments"
        raise refusal("config", config, requirement)
    return _LOOKUP.find(config, custom_objects)


def get(
    identifier: LearningRateSchedule | float | str | dict[str, Any],
    custom_objects: Mapping[str, Any] | None = None,
) -> LearningRateSchedule:
    """Returns the schedule for `identifier`, like the `get` functions of Keras.

    Args:
        identifier: A schedule (returned unchanged), a number (a constant rate), the
            config dict of a schedule, or the name of a class of yours whose arguments
            all have defaults.
        custom_objects: As in `deserialize`. Defaults to `None`.

    Raises:
        TypeError: If `identifier` has another type.
        ValueError: If the number, the name or the config is not valid.

    Example:

    >>> import keras_lso
    >>> float(keras_lso.schedules.get(0.25)(0))
    0.25
    """
    if isinstance(identifier, LearningRateSchedule):
        return identifier
    if isinstance(identifier, dict):
        return deserialize(identifier, custom_objects)
    if isinstance(identifier, str):
        try:
            return deserialize({"class_name": identifier, "config": {}}, custom_objects)
        except (TypeError, ValueError) as error:
            requirement = "name a schedule without arguments, or be a config dict"
            raise refusal("identifier", identifier, requirement) from error
    if is_number(identifier):
        return FixedLR(identifier)
    requirement = "be a schedule, a number, the config dict of a schedule or a name"
    raise refusal("identifier", identifier, requirement, TypeError)
