"""How a float32 master and its float16 variable stay in step."""

import keras
from keras import ops

FLOAT16_MAX = 65504.0


def pairs_of(variables, narrow):
    """Returns tuples of a master and its variable, see `generic.fused_step`."""
    pairs = zip(variables, narrow or [None] * len(variables), strict=True)
    return [(master, low) for master, low in pairs if low is not None]


def restarted(master, value):
    """Returns what a master goes on from, where its variable holds `value`.

    That is the master, as long as the variable is the master, rounded. Otherwise the
    variable was assigned from outside (by `set_weights`, say, or from a file that holds
    no masters), and the master starts again from there.
    """
    in_step = ops.equal(rounded(master, value.dtype), value)
    return ops.where(in_step, master, ops.cast(value, "float32"))


def rounded(master, dtype):
    """Rounds to a float dtype; what is too large for float16 becomes its largest."""
    dtype = keras.backend.standardize_dtype(dtype)
    if dtype == "float16":
        master = ops.clip(master, -FLOAT16_MAX, FLOAT16_MAX)
    return ops.cast(master, dtype)
