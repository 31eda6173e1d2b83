"""The generator from which Keras draws a seed if a caller gives none."""

import contextlib
import random

from keras import ops
from keras.src.backend.common import global_state

# The name that Keras's `global_seed_generator` looks up.
GLOBAL_SEED_GENERATOR = "global_seed_generator"


@contextlib.contextmanager
def global_seed_kept():
    """Restores the global `SeedGenerator`, or its absence, and Python's `random`."""
    state = random.getstate()
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    seed = None if generator is None else ops.copy(generator.state)
    try:
        yield
    finally:
        random.setstate(state)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        if generator is not None:
            generator.state.assign(seed)
