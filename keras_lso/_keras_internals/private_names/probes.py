"""`Probe`: a check that an attribute of another package exists; and kinds of checks.

A probe creates no variable and calls nothing. At import there may be no device yet, and
a `jax.distributed.initialize()` may still follow. A new optimizer would count in the
names of later ones. An attribute that only instances have is looked for in the code of
their class.
"""

import dis
import inspect
import pkgutil
from collections.abc import Callable
from typing import NamedTuple


class Probe(NamedTuple):
    """An attribute of another package, and the check for it.

    Attributes:
        owner: String, the full name of the module or class that has it.
        name: String, the attribute.
        found: Function of the owner and the name that returns whether it exists.
        backend: String, the one backend on which it is used. Defaults to `None`: all.
    """

    owner: str
    name: str
    found: Callable = hasattr
    backend: str | None = None

    def __str__(self):
        return f"{self.owner}.{self.name}"

    def holds(self):
        """Whether the attribute is where the package looks for it."""
        try:
            return self.found(pkgutil.resolve_name(self.owner), self.name)
        except (ImportError, AttributeError):
            return False


def of_backend(probes, backend):
    """Returns the probes that matter on a backend."""
    return [probe for probe in probes if probe.backend in (None, backend)]


def missing(probes):
    """Returns the probes whose attribute is missing."""
    return [probe for probe in probes if not probe.holds()]


# --- Ways to look ---------------------------------------------------------------------


def module(owner, name):
    """Whether a package has a module of that name."""
    pkgutil.resolve_name(f"{owner.__name__}.{name}")
    return True


def takes(*arguments):
    """Returns a check that a method exists and still takes these arguments.

    Args:
        *arguments: Strings, the names of the arguments that the package passes by
            position.
    """

    def found(owner, name):
        method = getattr(owner, name, None)
        if not callable(method):
            return False
        try:
            inspect.signature(method).bind("self", *arguments)
        except TypeError:
            return False
        return True

    return found


def sets(owner, name):
    """Whether a class has the attribute, or a method that sets it on instances."""
    return hasattr(owner, name) or any(
        instruction.opname == "STORE_ATTR" and instruction.argval == name
        for cls in inspect.getmro(owner)
        for code in methods_of(cls)
        # Quicker than going through all instructions.
        if name in code.co_names
        for instruction in dis.get_instructions(code)
    )


def says(text):
    """Returns a check that a method has a string in its code."""

    def found(owner, name):
        return text in inspect.unwrap(getattr(owner, name)).__code__.co_consts

    return found


def methods_of(cls):
    """Yields the code of each function in the body of a class."""
    for value in vars(cls).values():
        is_property = isinstance(value, property)
        for function in (value.fget, value.fset) if is_property else (value,):
            function = function and inspect.unwrap(function)
            if inspect.isfunction(function):
                yield function.__code__
