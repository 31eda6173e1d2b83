"""What a number has to be, and the errors that say so."""

import itertools
import math
import operator
import re
import sys

import keras
import numpy as np

from keras_lso._backend import backend


def is_number(value):
    """Whether `value` is a real number, bools aside."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(
        value, (bool, np.bool_)
    )


def _integer(value):
    """Returns `value`, a whole float too, as an int; None if it is none, or a bool."""
    if isinstance(value, (bool, np.bool_)):
        return None
    # tf.keras and TF1 call int().
    if isinstance(value, (float, np.floating)):
        return int(value) if value.is_integer() else None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _in_float32(value):
    with np.errstate(over="ignore", under="ignore"):
        # Python's integers can be too large for a float.
        try:
            return np.float32(value)
        except OverflowError:
            return np.float32(np.inf)


def fits_float32(value):
    """Whether a number is finite in float32."""
    return bool(np.isfinite(_in_float32(value)))


def is_scale(value):
    """Whether `value` is a number that can be a loss scale."""
    return is_number(value) and 0 < _in_float32(value) < np.inf


def check_scale(argument, value):
    """Returns `value` as a float, or says why it cannot be a loss scale."""
    if not is_number(value):
        raise TypeError(
            f"Argument `{argument}` must be a positive, finite number such as "
            f"2.0**15. Received: {argument}={value!r} of type {type(value).__name__}"
        )
    if not is_scale(value):
        raise ValueError(
            f"Argument `{argument}` must be positive and finite in float32, such "
            f"as 2.0**15. Received: {argument}={value!r}"
        )
    return float(value)


def check_bounds(min_scale, max_scale, names=("min_scale", "max_scale"), **initial):
    """Refuses bounds that cross, or that exclude the initial scale."""
    if min_scale > max_scale:
        low, high = names
        raise ValueError(
            f"`{low}` must not be above `{high}`. "
            f"Received: {low}={min_scale}, {high}={max_scale}"
        )
    for name, value in initial.items():
        if not min_scale <= value <= max_scale:
            raise ValueError(
                f"`{name}` must lie between `min_scale` and `max_scale`. Received: "
                f"{name}={value}, min_scale={min_scale}, max_scale={max_scale}. "
                "Choose another scale, or widen the bounds."
            )


def check_positive_int(argument, value):
    """Returns `value` as an int, or says why it is not a count of steps."""
    count = _integer(value)
    if count is None or count < 1:
        raise ValueError(
            f"Argument `{argument}` must be a positive integer. "
            f"Received: {argument}={value!r} of type {type(value).__name__}"
        )
    return count


def check_factor(argument, value, above, below=math.inf):
    """Returns `value` as a float strictly between `above` and `below`."""
    # An integer may be larger than any float.
    is_float = is_number(value) and abs(value) <= sys.float_info.max
    if not is_float or not above < value < below:
        span = f"above {above}" + (f" and below {below}" if below < math.inf else "")
        raise ValueError(
            f"Argument `{argument}` must be a finite number {span}. "
            f"Received: {argument}={value!r}"
        )
    return float(value)


def check_real(argument, value):
    """Returns `value` as a float, or says why it is not a finite number."""
    if not is_number(value):
        raise TypeError(
            f"Argument `{argument}` must be a number. "
            f"Received: {argument}={value!r} of type {type(value).__name__}"
        )
    if not abs(value) <= float(np.finfo("float32").max):
        raise ValueError(
            f"Argument `{argument}` must be finite in float32. "
            f"Received: {argument}={value!r}"
        )
    return float(value)


def check_rate(argument, value):
    """Returns `value` as a float of zero or more, as learning rates are."""
    value = check_real(argument, value)
    if value < 0:
        raise ValueError(
            f"Argument `{argument}` must be zero or more. "
            f"Received: {argument}={value!r}"
        )
    return value


# Of 32 bits, as most backends count them.
LARGEST_STEP = 2**31 - 1


def check_int(argument, value, at_least=-math.inf, at_most=math.inf):
    """Returns `value` as an int of `at_least` and `at_most` so much."""
    number = _integer(value)
    if number is None or not at_least <= number <= at_most:
        floor = "" if at_least == -math.inf else f" of at least {at_least}"
        if number is not None and number > at_most:
            floor = f" of at most {at_most}"
        raise ValueError(
            f"Argument `{argument}` must be an integer{floor}. "
            f"Received: {argument}={value!r} of type {type(value).__name__}"
        )
    return number


def check_list(argument, values, at_least=0):
    """Returns `values` as a list of `at_least` so many items."""
    if not isinstance(values, (list, tuple, np.ndarray)):
        raise TypeError(
            f"Argument `{argument}` must be a list. "
            f"Received: {argument}={values!r} of type {type(values).__name__}"
        )
    if len(values) < at_least:
        raise ValueError(
            f"Argument `{argument}` must have at least {at_least} "
            f"{'entry' if at_least == 1 else 'entries'}. "
            f"Received: {argument}={values!r}"
        )
    return list(values)


def check_boundaries(boundaries, count, reason):
    """Returns `boundaries` as a list of `count` strictly increasing steps."""
    boundaries = [
        check_int(f"boundaries[{i}]", boundary, at_least=0, at_most=LARGEST_STEP)
        for i, boundary in enumerate(check_list("boundaries", boundaries))
    ]
    if len(boundaries) != count:
        raise ValueError(
            f"Argument `boundaries` must have {count} "
            f"{'entry' if count == 1 else 'entries'}, {reason}. "
            f"Received: boundaries={boundaries}"
        )
    if any(low >= high for low, high in itertools.pairwise(boundaries)):
        raise ValueError(
            "Argument `boundaries` must be strictly increasing. "
            f"Received: boundaries={boundaries}"
        )
    return boundaries


def check_share(argument, value):
    """Returns `value` as a float between 0 and 1."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(
            f"Argument `{argument}` must be a number between 0 and 1. "
            f"Received: {argument}={value!r}"
        )
    return float(value)


def check_bool(argument, value):
    """Returns `value` as a bool, and takes no number for one."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"Argument `{argument}` must be True or False. "
            f"Received: {argument}={value!r} of type {type(value).__name__}"
        )
    return bool(value)


def check_choice(argument, value, choices):
    """Returns `value`, which has to be one of the strings in `choices`."""
    if value not in choices:
        raise ValueError(
            f"Argument `{argument}` must be one of {', '.join(map(repr, choices))}. "
            f"Received: {argument}={value!r}"
        )
    return value


def check_names(owner, argument, params, known):
    """Refuses a dict of parameters that holds a name which `owner` does not know."""
    for name in params:
        if name not in known:
            raise ValueError(
                f"{owner} has no parameter {name!r}. It takes "
                f"{', '.join(map(repr, known))}. Received: {argument}={params!r}"
            )


def check_patterns(argument, value):
    """Returns a list of regular expressions, or None for None."""
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise TypeError(
            f"Argument `{argument}` must be a list of regular expressions, such as "
            f"['bias', 'gamma', 'beta']. Received: {argument}={value!r}"
        )
    for pattern in value:
        if not isinstance(pattern, str):
            raise TypeError(
                f"Argument `{argument}` must hold strings. "
                f"Received: {argument}={value!r}"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"Argument `{argument}` must hold regular expressions. {pattern!r} is "
                f"none: {error}. To match it letter by letter write "
                f"{re.escape(pattern)!r}. Received: {argument}={value!r}"
            ) from error
    return list(value)


def check_learning_rate(argument, value):
    """Returns what Keras takes for a learning rate; a number as a float."""
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if isinstance(value, schedule):
        return value
    if callable(value):
        # A config can name any function of Keras's, which each step would call.
        if str(getattr(value, "__module__", "")).split(".")[0] == "keras":
            raise TypeError(
                f"Argument `{argument}` must be a number, an instance of a "
                "`keras.optimizers.schedules.LearningRateSchedule` or a function of "
                f"your own. Received: {argument}={value!r}"
            )
        return value
    return check_rate(argument, value)


def check_array(target, value, shape, dtype="float32"):
    """Returns `value` as an array of numbers that fits into `target`.

    Args:
        target: String that says what it is for.
        value: Array, or what NumPy makes one of.
        shape: Tuple of integers, the shape that it has to have.
        dtype: String. Only counts, whole and not negative, fit into an integer one.
    """
    array = np.asarray(value)
    # Objects, strings, times, complex numbers; records, but not bfloat16.
    if array.dtype.kind in "OSUMmc" or array.dtype.type is np.void:
        raise TypeError(
            f"{target} takes an array of numbers. Received one of dtype "
            f"{array.dtype}: {value!r}. Nothing was assigned."
        )
    if array.shape != tuple(shape):
        raise ValueError(
            f"{target} has shape {tuple(shape)}, but the array given for it has shape "
            f"{array.shape}. Nothing was assigned."
        )
    if "int" in dtype:
        is_count = np.array_equal(array, np.floor(array)) and np.all(array >= 0)
        if not is_count or np.any(array > np.iinfo(dtype).max):
            raise ValueError(
                f"{target} takes whole numbers from 0 to {np.iinfo(dtype).max}. "
                f"Received: {value!r}. Nothing was assigned."
            )
    return array


def check_state(variable, value):
    """Returns `value` as an array of the shape and dtype of an optimizer's variable."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    target = f"The optimizer's variable '{variable.path}'"
    array = check_array(target, value, variable.shape, dtype)
    # Not every backend takes every array: PyTorch no big-endian one.
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)


def check_operation_name(name):
    """Refuses a name that is none, for a method of tf.keras that takes one."""
    if name is not None and not isinstance(name, str):
        raise TypeError(
            "Argument `name` must be a string or None. To say whether the gradients "
            "are scaled, write `scaled=True` or `scaled=False`. "
            f"Received: name={name!r}"
        )


def check_variable_option(argument, value, choices):
    """Returns one of the strings in `choices`, which TensorFlow has as an enum."""
    if value is None:
        return "none"
    return check_choice(argument, str(getattr(value, "name", value)).lower(), choices)


def check_variables(argument, variables):
    """Returns `variables` as a flat list of variables."""
    variables = keras.tree.flatten(variables)
    for variable in variables:
        if not backend.is_variable(variable):
            raise ValueError(
                f"Argument `{argument}` takes variables only, such as "
                "`model.trainable_variables` holds. Received: "
                f"{variable!r} of type {type(variable).__name__}"
            )
    if len({id(v) for v in variables}) < len(variables):
        names = [v.name for v in variables]
        raise ValueError(f"Argument `{argument}` holds a variable twice: {names}")
    return variables
