"""The optimizers of Keras, whichever version it is."""

import inspect

import keras

from testing.keras_versions import takes_muon


def keras_optimizers():
    """All that work and wrap none, so that what Keras will have is tested too."""
    left_out = {
        keras.optimizers.Optimizer,
        keras.optimizers.LossScaleOptimizer,
        # Came with Keras 3.15.
        getattr(keras.optimizers, "MultiOptimizer", None),
    }
    if not takes_muon:
        left_out.add(keras.optimizers.Muon)
    classes = inspect.getmembers(keras.optimizers, inspect.isclass)
    return {
        name: cls
        for name, cls in classes
        if issubclass(cls, keras.optimizers.Optimizer) and cls not in left_out
    }
