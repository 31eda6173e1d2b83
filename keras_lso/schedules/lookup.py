"""`get`, `serialize` and `deserialize`: from schedules to configs and back."""

from collections.abc import Mapping
from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._core.checks import is_number
from keras_lso._core.configs import read_object
from keras_lso.schedules._plain import FixedLR
from keras_lso.schedules._schedule import read_schedule


def serialize(schedule: LearningRateSchedule) -> dict[str, Any]:
    """Returns the config dict of a schedule, as `keras.optimizers.schedules` does.

    Args:
        schedule: A `keras.optimizers.schedules.LearningRateSchedule`.

    Returns:
        A dict that JSON can hold, for `deserialize`, with the address of the class, and
        the arguments as `config`.

    Raises:
        TypeError: If `schedule` is not a schedule.

    Example:

    >>> import keras_lso
    >>> config = keras_lso.schedules.serialize(keras_lso.schedules.get(0.25))
    >>> config["registered_name"], config["config"]
    ('keras_lso>FixedLR', {'learning_rate': 0.25, 'name': 'FixedLR'})
    """
    if not isinstance(schedule, LearningRateSchedule):
        raise TypeError(
            "Argument `schedule` must be a `keras.optimizers.schedules."
            "LearningRateSchedule`; `keras_lso.schedules.get` makes one from a number. "
            f"Received: schedule={schedule!r} of type {type(schedule).__name__}"
        )
    return keras.saving.serialize_keras_object(schedule)


def deserialize(
    config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> LearningRateSchedule:
    """Returns the schedule that a config dict describes.

    Unlike Keras's function, it rejects configs of other objects. It also finds the
    classes of `keras_lso` by their bare names, unless Keras has a class of that name.

    Args:
        config: The return value of `serialize`, or a dict with only the keys
            `"class_name"` and `"config"`.
        custom_objects: The classes that the config refers to, by their names. Defaults
            to `None`.

    Returns:
        A `keras.optimizers.schedules.LearningRateSchedule`.

    Raises:
        TypeError: If `config` is not a dict, or Keras finds no class for it.
        ValueError: If `config` does not describe a schedule, or does not fit the class
            that it names.

    Example:

    >>> import keras_lso
    >>> arguments = {"schedule_or_rate": 0.5, "warmup_steps": 4}
    >>> schedule = keras_lso.schedules.deserialize(
    ...     {"class_name": "LinearWarmup", "config": arguments}
    ... )
    >>> [float(schedule(step)) for step in (0, 2, 4)]
    [0.0, 0.25, 0.5]
    """
    if not isinstance(config, dict):
        raise TypeError(
            "Argument `config` must be a dict, as `keras_lso.schedules.serialize` "
            f"returns it. Received: config={config!r} of type {type(config).__name__}"
        )
    if "class_name" not in config:
        raise ValueError(
            "Argument `config` must name the class of the schedule as its "
            "'class_name', as `keras_lso.schedules.serialize` does; `get_config` "
            f"returns only the arguments. Received: config={config!r}"
        )
    schedule = read_object(read_schedule, config, "schedule", custom_objects)
    if not isinstance(schedule, LearningRateSchedule):
        raise ValueError(
            "Argument `config` must describe a `keras.optimizers.schedules."
            "LearningRateSchedule`. It describes a "
            f"{type(schedule).__name__}: config={config!r}"
        )
    return schedule


def get(
    identifier: LearningRateSchedule | float | str | dict[str, Any],
    custom_objects: Mapping[str, Any] | None = None,
) -> LearningRateSchedule:
    """Returns the schedule for `identifier`, like the `get` functions of Keras.

    Args:
        identifier: A schedule (returned unchanged), a number (a constant rate), the
            config dict of a schedule, or the name of a class of yours whose arguments
            all have defaults.
        custom_objects: The classes that a config or a name refers to, by their names.
            Defaults to `None`.

    Returns:
        A `keras.optimizers.schedules.LearningRateSchedule`.

    Raises:
        TypeError: If `identifier` has another type.
        ValueError: If the number, the name or the config is not valid.

    Example:

    >>> import keras_lso
    >>> schedule = keras_lso.schedules.get(0.25)
    >>> float(schedule(0)), type(schedule).__name__
    (0.25, 'FixedLR')
    """
    if isinstance(identifier, LearningRateSchedule):
        return identifier
    if isinstance(identifier, dict):
        return deserialize(identifier, custom_objects)
    if isinstance(identifier, str):
        try:
            return deserialize({"class_name": identifier, "config": {}}, custom_objects)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{identifier!r} does not name a schedule whose arguments all have "
                "defaults. Write an instance, such as `keras_lso.schedules."
                "LinearWarmup(0.1, warmup_steps=1000)`, or a config dict with the "
                "arguments as its 'config'."
            ) from error
    if is_number(identifier):
        return FixedLR(identifier)
    raise TypeError(
        "A schedule must be a `keras.optimizers.schedules.LearningRateSchedule`, a "
        "number, the config dict of a schedule or the name of a class. "
        f"Received: {identifier!r} of type {type(identifier).__name__}"
    )
