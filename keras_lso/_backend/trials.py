"""`Trials`: what a report asks of a backend, to run a model on the host and watch it.

It is apart from `framework.py`, since no step of an optimizer needs it.
"""

import contextlib
from collections.abc import Callable


class Trials:
    """A part of `Framework`."""

    # Whether the loop of a recurrent layer is compiled: its cell then sees no values.
    COMPILES_LOOPS = True

    is_traced: Callable  # `Framework`'s own.

    def random_state_kept(self):
        """Returns a context that restores the framework's own random numbers."""
        return contextlib.nullcontext()

    def has_values(self, value):
        """Whether a tensor holds numbers that can be read: one that is traced does not.

        Args:
            value: Tensor.
        """
        return not self.is_traced([value])
