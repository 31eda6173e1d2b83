"""Classes for older APIs that configs name: imported when such a config is read.

Keras finds a class only by its registered name. Until a module of `compat` is imported,
a stand-in is registered in place of each of its classes. Importing the module registers
the class itself under that name.
"""

import importlib

import keras

# The module of each class, by the name that the class is registered under.
MODULES = {
    "compat.open_seq2seq.MixedPrecisionOptimizerWrapper": (
        "compat.open_seq2seq.mp_wrapper"
    ),
    "compat.open_seq2seq.RMSProp": "compat.open_seq2seq._optimizer_names",
    "compat.v1.MixedPrecisionLossScaleOptimizer": (
        "compat.v1.mixed_precision.loss_scale_optimizer"
    ),
    "mixed_precision.experimental.LossScaleOptimizer": "mixed_precision.experimental",
    "CosineDecayWithOffset": "compat.model_garden.schedules",
    "DirectPowerDecay": "compat.model_garden.schedules",
    "ExponentialDecayWithOffset": "compat.model_garden.schedules",
    "PiecewiseConstantDecayWithOffset": "compat.model_garden.schedules",
    "PowerAndLinearDecay": "compat.model_garden.schedules",
    "PowerDecayWithOffset": "compat.model_garden.schedules",
    "StepCosineDecayWithOffset": "compat.model_garden.schedules",
    "CosineDecay": "compat.open_seq2seq.schedules",
    "ExpDecay": "compat.open_seq2seq.schedules",
    "InvPolyDecay": "compat.open_seq2seq.schedules",
    "PiecewiseConstant": "compat.open_seq2seq.schedules",
    "PolyDecay": "compat.open_seq2seq.schedules",
    "TransformerPolicy": "compat.open_seq2seq.schedules",
}


def _stand_in(registered_name, module):
    """Returns a stand-in whose `from_config` calls that of the actual class."""

    def from_config(cls, config):
        importlib.import_module(f"keras_lso.{module}")
        # Not by `get_registered_object`: while Keras reads a config, that finds the
        # class that was registered before.
        found = keras.saving.get_custom_objects()[registered_name]
        return found.from_config(config)

    # Keras's error about a wrong config uses this name.
    name = registered_name.removeprefix("keras_lso>").rpartition(".")[2]
    members = {
        "__module__": f"keras_lso.{module}",
        "from_config": classmethod(from_config),
    }
    return type(name, (), members)


for _name, _module in MODULES.items():
    _registered_name = f"keras_lso>{_name}"
    keras.saving.get_custom_objects()[_registered_name] = _stand_in(
        _registered_name, _module
    )
