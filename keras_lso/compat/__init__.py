"""The names of other libraries, so that code runs here after a change of its imports.

`import keras_lso` imports this file alone. It registers a placeholder for each class
that a config may name, by which Keras finds the class.
"""

import importlib
from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from keras_lso.compat import model_garden, open_seq2seq, v1, v2

__all__ = ["model_garden", "open_seq2seq", "v1", "v2"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # A type checker would accept any name.

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")


# The classes that configs name, as Keras registers them, by their modules or packages.
LATE_CLASSES = {
    "compat.v1": ("compat.v1.MixedPrecisionLossScaleOptimizer",),
    "mixed_precision.experimental": (
        "mixed_precision.experimental.LossScaleOptimizer",
    ),
    "compat.model_garden": (
        "CosineDecayWithOffset",
        "DirectPowerDecay",
        "ExponentialDecayWithOffset",
        "PiecewiseConstantDecayWithOffset",
        "PowerAndLinearDecay",
        "PowerDecayWithOffset",
        "StepCosineDecayWithOffset",
    ),
    "compat.open_seq2seq": (
        "CosineDecay",
        "ExpDecay",
        "InvPolyDecay",
        "PiecewiseConstant",
        "PolyDecay",
        "TransformerPolicy",
        "compat.open_seq2seq.MixedPrecisionOptimizerWrapper",
        "compat.open_seq2seq.RMSProp",
    ),
}


def _register_placeholder(name: str, module: str) -> None:
    """Registers a class whose `from_config` imports the real one and calls its own."""
    registered, key = keras.saving.get_custom_objects(), f"keras_lso>{name}"

    def from_config(cls, config):
        importlib.import_module(module)
        # While Keras reads a config, `get_registered_object` finds the former class.
        return registered[key].from_config(config)

    # Keras's error about a wrong config uses these names.
    members = {"__module__": module, "from_config": classmethod(from_config)}
    registered[key] = type(name.rpartition(".")[2], (), members)


for _module, _names in LATE_CLASSES.items():
    for _name in _names:
        _register_placeholder(_name, f"keras_lso.{_module}")
