"""What the schedules are made of: steps, and other schedules or constant rates."""

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._checks import check_rate, is_number
from keras_lso._config_dicts import read_object


def float32(value):
    """Returns a tensor; where it meets a float, Keras may compute in `floatx`."""
    return ops.convert_to_tensor(value, dtype="float32")


def elapsed(step, offset=0):
    """Returns `step - offset` in float32, subtracted as integers if they are."""
    return ops.cast(ops.convert_to_tensor(step) - offset, "float32")


def straight_line(step, steps, start, end):
    """Returns the rate on the way from `start` at step 0 to `end` at `steps`."""
    return start + step / max(steps, 1) * (end - start)


def check_name(name, schedule):
    """Returns `name`; that of the class for None, which old configs hold."""
    if name is None:
        return type(schedule).__name__
    if not isinstance(name, str):
        raise TypeError(f"Argument `name` must be a string. Received: name={name!r}")
    return name


def check_member(argument, member):
    """Returns a schedule as it is and a rate as a float, or refuses anything else."""
    if isinstance(member, LearningRateSchedule):
        return member
    if is_number(member):
        return check_rate(argument, member)
    hint = ""
    if isinstance(member, dict):
        hint = " Make a schedule of its config with `from_config` first."
    elif callable(member):
        hint = (
            " Give an instance, not the class; write a function as the `__call__` of "
            "a subclass of `LearningRateSchedule`, which can be saved."
        )
    raise TypeError(
        f"Argument `{argument}` must be a "
        "`keras.optimizers.schedules.LearningRateSchedule` or a number, the constant "
        f"rate.{hint} Received: {argument}={member!r} of type {type(member).__name__}"
    )


def rate_at(member, step):
    """Returns the rate of a schedule, or the constant one, in float32."""
    rate = member(step) if isinstance(member, LearningRateSchedule) else member
    return float32(rate)


def serialize_member(member):
    """Returns what a config holds in place of a schedule or a rate."""
    return keras.saving.serialize_keras_object(member)


def deserialize_member(argument, config):
    """Returns the schedule or the rate that a config holds."""
    if not isinstance(config, dict):
        return config
    if "class_name" not in config:
        raise ValueError(
            f"The config's `{argument}` does not say which class of schedule it is: "
            "the Model Garden leaves the name out. Write `keras.optimizers.schedules."
            f"serialize(schedule)` in its place, or build the schedule in code. "
            f"Received: {argument}={config!r}"
        )
    # Keras knows its own classes by their bare names too.
    has_address = config.get("module") or config.get("registered_name")
    read = (
        keras.saving.deserialize_keras_object
        if has_address
        else keras.optimizers.schedules.deserialize
    )
    return read_object(read, config, f"schedule `{argument}`")
