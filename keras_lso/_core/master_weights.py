"""Float32 masters of float16 and bfloat16 variables.

A float16 weight of 1.0 cannot take a step smaller than 0.0005, and a bfloat16 one none
smaller than 0.004: it is rounded away. So the optimizer trains a float32 copy, the
master, and the model's variable is that copy, rounded.
"""

import contextlib

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._core.checks import warn
from keras_lso._keras_internals.optimizers import (
    index_of,
    optimizers_in,
    steps_in_dtype_of_variables,
)
from keras_lso._keras_internals.variables import copy_of, is_overwritten

_CHOICES = ("auto", True, False)
_LOW_PRECISION = ("float16", "bfloat16")


def check_argument(master_weights):
    """Returns `master_weights`, or says which values there are."""
    # 0 and 1 equal False and True, but are not what anybody means.
    if isinstance(master_weights, str | bool) and master_weights in _CHOICES:
        return master_weights
    raise ValueError(
        "Argument `master_weights` must be 'auto' or True (for float16 and bfloat16 "
        "variables) or False. "
        f"Received: master_weights={master_weights!r}"
    )


# Half of the smallest float16, which rounds to the even neighbour.
_ROUNDED_TO_0 = 2.0**-25


class MasterWeights:
    """The masters of a model's variables, and how the two keep in step.

    Args:
        variables: List of trainable variables.
        master_weights: `"auto"`, True or False; whether those of 16 bits get a master.
    """

    def __init__(self, variables, master_weights):
        self.variables = []
        self._low_precision = {}
        self.trained = list(variables)
        if master_weights:
            self.trained = list(map(self._master_of, variables))

    def _master_of(self, variable):
        """Returns a new master, or the variable itself if it needs none."""
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if dtype not in _LOW_PRECISION or is_overwritten(variable):
            return variable
        master = copy_of(variable, dtype="float32")
        self.variables.append(master)
        self._low_precision[id(master)] = variable
        return master

    def warn_of_epsilons(self, inner_optimizer):
        """Warns of an epsilon that is 0 in float16, by which an optimizer divides.

        Args:
            inner_optimizer: The optimizer, which may have others in it.
        """
        if not any(v.dtype == "float16" for v in self.trained):
            return
        for optimizer in optimizers_in(inner_optimizer):
            lost = [
                f"`{name}={value}`"
                for name, value in vars(optimizer).items()
                if name.startswith("epsilon")
                and isinstance(value, float)
                and 0 < value <= _ROUNDED_TO_0
            ]
            if lost and steps_in_dtype_of_variables(optimizer):
                warn(
                    f"{type(optimizer).__name__} trains float16 variables without "
                    f"float32 master weights, and there its {', '.join(lost)} is 0: "
                    "where a gradient is 0 the weight would be NaN. Write "
                    "`epsilon=1e-7`, or leave out `master_weights=False`."
                )

    def trained_of(self, optimizer, variables):
        """Returns what the optimizer trains in place of each of its variables."""
        if not self.variables:
            return list(variables)
        return [self.trained[index_of(optimizer, v)] for v in variables]

    def low_precision_variables(self, trained):
        """Returns the variable of the model that each of `trained` is the master of.

        A list with None for what is no master; None if there are no masters at all.
        """
        if not self.variables:
            return None
        return [self._low_precision.get(id(v)) for v in trained]

    def read(self):
        """Re-initialises a master where its variable was assigned externally."""
        for master in self.variables:
            value = ops.convert_to_tensor(self._low_precision[id(master)])
            master.assign(backend.resynchronised(ops.convert_to_tensor(master), value))

    def write(self):
        """Rounds the masters into the model's variables."""
        for master in self.variables:
            variable = self._low_precision[id(master)]
            value = ops.convert_to_tensor(master)
            variable.assign(backend.rounded(value, variable.dtype))

    @contextlib.contextmanager
    def in_step(self):
        """Lets what is assigned to the masters meanwhile reach the variables."""
        self.read()
        yield
        self.write()
