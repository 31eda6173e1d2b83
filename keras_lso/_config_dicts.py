"""Config dicts from elsewhere: what they have to be, and making objects of them.

A config may come out of a file that is damaged, or that somebody else wrote. Which
classes it may name is up to Keras: its own, registered ones and `custom_objects`. No
module is imported for a config but Keras's own.
"""

from keras_lso._checks import fits_float32, is_number

# Besides ValueError and TypeError, what comes of a config that fits no class.
_MISFITS = (AttributeError, LookupError, OverflowError, RecursionError)
_ADDRESS = ("class_name", "module", "registered_name")
# Arguments of Keras's optimizers that it takes without a look at them.
_NUMBERS = (
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "ema_momentum",
    "loss_scale_factor",
)


def read_object(read, config, what, custom_objects=None):
    """Returns `read(config, custom_objects)`, or says that the config is malformed.

    Args:
        read: Callable, one of Keras's functions that deserialize.
        config: Dict, as Keras's functions that serialize return it.
        what: String that says what it describes, for the errors.
        custom_objects: Dict of names to classes. Defaults to `None`.
    """
    _check_address(config, what)
    try:
        return read(config, custom_objects=custom_objects)
    except _MISFITS as error:
        raise misfit(config, what, error) from error


def misfit(config, what, error):
    """Returns the error for a config that does not fit the class it names."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, RecursionError):
        reason = "it is nested too deeply, or holds itself"
    return ValueError(
        f"The config of the {what} does not fit the class that it names, "
        f"{config.get('class_name')!r} ({reason}). Write what `keras.saving."
        "serialize_keras_object` returns; if it comes from a file, the file may be "
        "damaged, or from another version of the class."
    )


def _check_address(config, what):
    for key in _ADDRESS:
        value = config.get(key)
        if not isinstance(value, str) and (value is not None or key == "class_name"):
            raise ValueError(
                f"The config of the {what} must hold a string as its '{key}'"
                f"{'' if key == 'class_name' else ', or None'}. "
                f"Received: {key}={value!r}"
            )
    name = config["class_name"]
    # Keras's own words for values. A lambda it refuses by itself, in safe mode.
    if name.startswith("__") and name != "__lambda__":
        raise ValueError(
            f"The config of the {what} must name a class as its 'class_name'. "
            f"Received: class_name={name!r}"
        )
    arguments = config.get("config")
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError(
            f"The config of the {what} must hold the arguments of the class as its "
            f"'config', a dict. Received: config={arguments!r}"
        )


def check_numbers(config, what):
    """Refuses numbers with which an optimizer of Keras's would compute NaN.

    Keras itself looks at few of them. Configs of a user's own classes are theirs.

    Args:
        config: Dict with a `class_name` and a `config`.
        what: String that says what it describes, for the errors.
    """
    arguments = config.get("config")
    is_own = not str(config.get("module") or "keras").startswith("keras")
    if is_own or not isinstance(arguments, dict):
        return
    for key, value in arguments.items():
        if key in _NUMBERS and not (
            value is None or isinstance(value, bool) or is_number(value)
        ):
            raise TypeError(
                f"The config of the {what} must hold a number or None as its '{key}'. "
                f"Received: {key}={value!r} of type {type(value).__name__}"
            )
        # An infinite `clipvalue` clips nothing.
        is_endless = key == "clipvalue" and value == float("inf")
        if is_number(value) and not fits_float32(value) and not is_endless:
            raise ValueError(
                f"The config of the {what} must hold numbers that are finite in "
                f"float32. Received: {key}={value!r}"
            )
        if isinstance(value, dict) and "class_name" in value:
            check_numbers(value, f"{key} of the {what}")
