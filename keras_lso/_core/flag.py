"""`Flag`: a boolean of a step, which the host may know."""

import math
from collections.abc import Iterable
from typing import Self

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor


class Flag:
    """A boolean that the host knows, or a boolean scalar tensor.

    `&`, `|` and `~` compute nothing on the device where the host knows the result.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bool | Tensor):
        self._value = value

    @classmethod
    def all_finite(cls, values: Iterable[Tensor]) -> Self:
        """Returns whether scalar tensors are finite."""
        unknown = []
        for value in values:
            number = backend.value_if_on_host(value)
            if number is None:
                unknown.append(value)
            elif not math.isfinite(number):
                return cls(False)
        return cls(backend.xp.all_finite(unknown) if unknown else True)

    @property
    def tensor(self) -> Tensor:
        """The boolean scalar tensor."""
        value = self._value
        return backend.scalar(value, "bool") if isinstance(value, bool) else value

    @property
    def known(self) -> bool | None:
        """True or False if the host need not wait for it, else None."""
        value = self._value
        return value if isinstance(value, bool) else backend.value_if_on_host(value)

    def __and__(self, other: "Flag") -> "Flag":
        if self._value is True or other._value is False:
            return other
        if self._value is False or other._value is True:
            return self
        return Flag(backend.xp.logical_and(self._value, other._value))

    def __or__(self, other: "Flag") -> "Flag":
        if self._value is False or other._value is True:
            return other
        if self._value is True or other._value is False:
            return self
        return Flag(backend.xp.logical_or(self._value, other._value))

    def __invert__(self) -> "Flag":
        value = self._value
        if isinstance(value, bool):
            return Flag(not value)
        return Flag(backend.xp.logical_not(value))
