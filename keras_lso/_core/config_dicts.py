"""Config dicts from elsewhere, such as a damaged file: checks, and objects from them.

Keras decides which classes a config may name: its own, registered classes and
`custom_objects`. No module is imported for a config, except Keras's own.
"""

# Errors, apart from ValueError and TypeError, of a config that fits no class.
_MISFITS = (AttributeError, LookupError, OverflowError, RecursionError)
_ADDRESS = ("class_name", "module", "registered_name")


def read_object(read, config, what, custom_objects=None):
    """Returns `read(config, custom_objects)`; raises a `ValueError` if that fails."""
    # `read` is one of Keras's functions that deserialize; `what` names the object in
    # errors.
    _check_address(config, what)
    try:
        return read(config, custom_objects=custom_objects)
    except _MISFITS as error:
        raise misfit(config, what, error) from error


def misfit(config, what, error):
    """Returns the error for a config that does not fit the class it names."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, RecursionError):
        reason = "it is nested too deeply, or contains itself"
    return ValueError(
        f"The config of the {what} does not fit the class that it names, "
        f"{config.get('class_name')!r} ({reason}). Pass the return value of "
        "`keras.saving.serialize_keras_object`. If the config comes from a file, the "
        "file may be damaged, or from another version of the class."
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
    # Names that Keras uses for values. Keras itself rejects a lambda, in safe mode.
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
