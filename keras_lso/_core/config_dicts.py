"""Config dicts from elsewhere, such as a damaged file: checks, and objects from them.

Keras decides which classes a config may name: its own, registered classes and
`custom_objects`. No module is imported for a config, except Keras's own.
"""

# Errors, apart from ValueError and TypeError, of a config that fits no class.
_MISFITS = (AttributeError, LookupError, OverflowError, RecursionError)
# The keys of a config, with the types of their values.
_ADDRESS = (
    ("class_name", str, "the name of a class"),
    ("module", str | None, "a string, or None,"),
    ("registered_name", str | None, "a string, or None,"),
    ("config", dict | None, "a dict of arguments"),
)


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
    # Names that Keras uses for values. Keras itself rejects a lambda, in safe mode.
    name = str(config.get("class_name"))
    of_value = name.startswith("__") and name != "__lambda__"
    for key, cls, requirement in _ADDRESS:
        value = config.get(key)
        if not isinstance(value, cls) or (of_value and key == "class_name"):
            raise ValueError(
                f"The config of the {what} must hold {requirement} as its '{key}'. "
                f"Received: {key}={value!r}"
            )
