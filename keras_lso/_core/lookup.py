"""`Lookup`: what `get`, `serialize` and `deserialize` of two packages share."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras

from keras_lso._core.checks import refusal
from keras_lso._core.configs import read_object


class Lookup(NamedTuple):
    """The configs of the objects of a base class."""

    base: type
    name: str  # An object of the base class in messages, with its article.
    what: str  # Its config is that of the `what`.
    read: Callable[..., Any] = keras.saving.deserialize_keras_object

    def write(self, argument: str, value: Any, hint: str) -> dict[str, Any]:
        """Returns the config of an argument, which must be such an object."""
        if not isinstance(value, self.base):
            raise refusal(argument, value, f"be {self.name}. {hint}", TypeError)
        return keras.saving.serialize_keras_object(value)

    def check(self, config: Any) -> None:
        """Raises a `TypeError` unless a config is a dict."""
        if not isinstance(config, dict):
            requirement = "be a dict, as `serialize` returns it"
            raise refusal("config", config, requirement, TypeError)

    def find(self, config: Any, custom_objects: Mapping[str, Any] | None) -> Any:
        """Returns the object that a config describes."""
        value = read_object(self.read, config, self.what, custom_objects)
        if not isinstance(value, self.base):
            requirement = f"describe {self.name}, not a {type(value).__name__}"
            raise refusal("config", config, requirement)
        return value
