"""The optimizers of Keras, whichever version it is."""

import inspect

import keras


def keras_optimizers():
    """All that `keras.optimizers` has, so that what it will have is tested too."""
    wrappers = {
        keras.optimizers.Optimizer,
        keras.optimizers.LossScaleOptimizer,
        # Came with Keras 3.15.
        getattr(keras.optimizers, "MultiOptimizer", None),
    }
    classes = inspect.getmembers(keras.optimizers, inspect.isclass)
    return {
        name: cls
        for name, cls in classes
        if issubclass(cls, keras.optimizers.Optimizer) and cls not in wrappers
    }
