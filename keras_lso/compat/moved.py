"""Names of TensorFlow's mixed precision that are other names in Keras 3."""

from functools import partial
from typing import Any, Never

_POLICY = '`keras.config.set_dtype_policy("mixed_float16")`'
_LINES = {
    "Policy": (
        '`keras.DTypePolicy("mixed_float16")`, and for its `loss_scale` '
        "`keras_lso.LossScaleOptimizer(optimizer, loss_scale=...)`"
    ),
    "disable_mixed_precision_graph_rewrite": (
        '`keras.config.set_dtype_policy("float32")`, and leave the optimizer as it is'
    ),
    "enable_mixed_precision_graph_rewrite": (
        f"{_POLICY} before the layers are made, and `keras_lso.compat.v1."
        'mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer, "dynamic")`'
    ),
    "get_layer_policy": "`layer.dtype_policy`",
    "global_policy": "`keras.config.dtype_policy()`",
    "set_global_policy": _POLICY,
    "set_policy": _POLICY,
    "train": (
        "`keras.optimizers.SGD(0.1, momentum=0.9)` for `MomentumOptimizer(0.1, 0.9)`, "
        f"and {_POLICY} for `experimental.enable_mixed_precision_graph_rewrite`"
    ),
}


def refuse_other_names(module: dict[str, Any]) -> None:
    """Lets a module, given its `globals()`, list and have the names in `__all__`."""
    # Not by functions of the module: a type checker would accept any name.
    module["__dir__"] = lambda: module["__all__"]
    module["__getattr__"] = partial(_refuse, module["__name__"])


def _refuse(module: str, name: str) -> Never:
    """Raises the error for a name that a module does not have."""
    if name not in _LINES:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    # `from module import name` would hide the text of an `AttributeError`.
    raise ImportError(f"Keras 3 has no `{name}`. Write {_LINES[name]}")
