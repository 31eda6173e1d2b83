"""Schedules in schedules: the rate of a member, and a member in a config.

A member is a schedule, or a number, the constant rate.
"""

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._core.config_dicts import read_object
from keras_lso.schedules._curves import float32


def rate_at(member, step):
    """Returns the rate of a member in float32."""
    rate = member(step) if isinstance(member, LearningRateSchedule) else member
    return float32(rate)


def serialize_member(member):
    """Returns the entry of a config for a member."""
    return keras.saving.serialize_keras_object(member)


def deserialize_member(argument, config):
    """Returns the member for the entry `argument` of a config."""
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

    Keras finds its own classes by their bare names. This function also finds the
    package's classes by their bare names.
    """
    if config.get("module") or config.get("registered_name"):
        return keras.saving.deserialize_keras_object(config, custom_objects)
    name = config["class_name"]
    ours = keras.saving.get_registered_object(f"keras_lso>{name}")
    if ours is not None and not hasattr(keras.optimizers.schedules, name):
        custom_objects = {name: ours, **(custom_objects or {})}
    return keras.optimizers.schedules.deserialize(config, custom_objects)
