"""Converts the optimizer state in a tf.keras file to the variables of Keras 3.

It is apart from the readers, `files.py` and `checkpoints.py`, because the conversion is
the same for all formats.
"""

import dataclasses
import re
from typing import Any

import keras
import numpy as np

from keras_lso._core.state_file import check_is_sound
from keras_lso._keras_internals.optimizers import (
    canonical_class,
    iteration_variable,
    variables_of,
)
from keras_lso._keras_internals.slots import slots_of
from keras_lso._keras_internals.unsaved import nadam_product
from keras_lso._keras_internals.variables import path_of
from keras_lso.compat.tf_keras.names import pair

# The slots of each class. The keys are the names in tf.keras 2.11+, the values those in
# its older classes and in `slots_of`. A file holds the slots of the first dict,
# variable by variable, and then those of the next dict.
_LAYOUTS: dict[type, list[dict[str, str]]] = {
    keras.optimizers.SGD: [{"m": "momentum"}],
    keras.optimizers.Adam: [{"m": "m", "v": "v"}, {"vhat": "vhat"}],
    keras.optimizers.RMSprop: [
        {"velocity": "rms"},
        {"momentum": "momentum"},
        {"average_gradient": "mg"},
    ],
    keras.optimizers.Adagrad: [{"accumulator": "accumulator"}],
    keras.optimizers.Adadelta: [
        {"accumulated_grad": "accum_grad", "accumulated_delta_var": "accum_var"}
    ],
    keras.optimizers.Adamax: [{"m": "m", "u": "v"}],
    keras.optimizers.Nadam: [{"m": "m", "v": "v"}],
    keras.optimizers.Ftrl: [{"accumulator": "accumulator", "linear": "linear"}],
    keras.optimizers.Lion: [{"m": "m"}],
}
AVERAGE = "average"
# The arguments that add a slot to an optimizer. All other slots are always there.
_OPTIONAL_SLOTS = {
    AVERAGE: "use_ema",
    "vhat": "amsgrad",
    "momentum": "momentum",
    "mg": "centered",
}
_WORDS = {
    word for groups in _LAYOUTS.values() for group in groups for word in group
} | {AVERAGE}

# The dtypes that represent each value of a dtype exactly.
_WIDER = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
}


@dataclasses.dataclass
class SavedState:
    """The state of one optimizer in a file.

    Attributes:
        iterations: Integer array without axes.
        slots: Dict of slot names to lists of `(name of the variable or None, array)`,
            in the order in which tf.keras listed the variables.
        is_legacy: Bool. Whether a class from before TF 2.11 wrote it.
        class_name: String, or None if the file does not hold it.
        config: Dict, the optimizer's config, or None.
        learning_rate: Array or number; None if there is none, or a schedule.
        decay: Float. The learning-rate decay of the classes from before TF 2.11.
        u_product: Array, Nadam's product of momenta, or None.
        loss_scale: Array, or None.
        good_steps: Array, the growth counter of the loss scale, or None.
    """

    iterations: Any
    slots: dict[str, Any]
    is_legacy: bool = False
    class_name: str | None = None
    config: dict[str, Any] | None = None
    learning_rate: object = None
    decay: float = 0.0
    u_product: object = None
    loss_scale: object = None
    good_steps: object = None


# --- The names of slots -----------------------------------------------------


def layout_of(
    optimizer: keras.optimizers.Optimizer, config: dict[str, Any] | None = None
) -> Any:
    """Returns the slots in the order in which tf.keras 2.11+ created them, as lists.

    tf.keras created the slots of one list variable by variable. Without the `config` of
    the tf.keras optimizer, the slots are those of the Keras 3 `optimizer`. Returns None
    for a class that tf.keras did not have.
    """
    groups = _groups(optimizer)
    if groups is None:
        return None
    if config is None:
        present = set(own_slots(optimizer))
    else:
        present = {slot for slot, key in _OPTIONAL_SLOTS.items() if config.get(key)}
    # tf.keras's SGD creates momentum slots even if its momentum is zero.
    optional = set(_OPTIONAL_SLOTS)
    if isinstance(optimizer, keras.optimizers.SGD):
        optional.remove("momentum")
    layout = [[AVERAGE]] if AVERAGE in present else []
    for group in groups:
        slots = [s for s in group.values() if s in present or s not in optional]
        layout += [slots] if slots else []
    return layout


def split_name(
    name: str, optimizer: keras.optimizers.Optimizer, is_legacy: bool = False
) -> Any:
    """Splits the name of a slot variable into the slot and the variable's name.

    `name` has the form `"Adam/m/dense/kernel"` or `"m/dense/kernel"`. With `is_legacy`,
    it is that of a class from before TF 2.11, `"Adam/dense/kernel/m"`.
    """
    if is_legacy:
        variable, _, slot = name.rpartition("/")
        return slot, variable.partition("/")[2] or variable
    match = re.match(rf"(?:.*?/)?({'|'.join(sorted(_WORDS))})/(.+)", name)
    if not match:
        raise ValueError(f"The file has state that has no place here: '{name}'.")
    word, variable = match.groups()
    groups = _groups(optimizer) or []
    return next((g[word] for g in groups if word in g), word), variable


def own_slots(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns `slots_of(optimizer)` and the moving averages of the variables."""
    slots = slots_of(optimizer)
    if optimizer.use_ema and AVERAGE not in slots:
        named = [v for v in optimizer.variables if v.name.endswith("_average")]
        slots = {AVERAGE: named, **slots}
    return slots


def _groups(optimizer):
    return next((_LAYOUTS[c] for c in type(optimizer).__mro__ if c in _LAYOUTS), None)


# --- From the state to the variables ----------------------------------------


def values_for(optimizer: keras.optimizers.Optimizer, state: SavedState) -> Any:
    """Returns `(variable, new value)` pairs of an optimizer, and assigns nothing.

    The optimizer must be built and wrap no other. A `SavedState` of another kind of
    optimizer raises a `ValueError`.
    """
    _check_class(optimizer, state)
    pairs = [_iterations(optimizer, state)]
    saved = _known_slots(optimizer, state)
    rate = learning_rate_variable(optimizer)
    if rate is not None and state.learning_rate is not None:
        pairs.append((rate, _scalar(rate, state.learning_rate, "learning rate")))
    for slot, variables in own_slots(optimizer).items():
        pairs += _slot_values(optimizer, slot, variables, saved[slot])
    # tf.keras accumulates no gradients.
    pairs += [
        (v, np.zeros(v.shape, _dtype(v)))
        for v in optimizer.variables
        if optimizer.gradient_accumulation_steps
        and v.name.endswith("_gradient_accumulator")
    ]
    return pairs + _rest(optimizer, state, pairs)


def learning_rate_variable(
    optimizer: keras.optimizers.Optimizer,
) -> keras.Variable | None:
    """Returns the variable of the learning rate; None if there is a schedule."""
    rate = optimizer.learning_rate
    return rate if isinstance(rate, keras.Variable) else None


def _check_class(optimizer, state):
    names = [cls.__name__ for cls in _LAYOUTS]
    own = [cls.__name__ for cls in type(optimizer).__mro__ if cls in _LAYOUTS]
    # Adam and AdamW have the same slots.
    name = "Adam" if state.class_name == "AdamW" else state.class_name
    if own and name in names and name not in own:
        raise ValueError(
            f"The file holds the state of {state.class_name}, but the optimizer is "
            f"{canonical_class(optimizer).__name__}."
        )


def _known_slots(optimizer, state):
    """Returns the saved slots. Raises an error if the optimizer has others."""
    own, saved = own_slots(optimizer), dict(state.slots)
    # tf.keras 2.11+ saves momentum slots even of an SGD without momentum.
    is_unused = (
        isinstance(optimizer, keras.optimizers.SGD)
        and not state.is_legacy
        and not (state.config or {}).get("momentum")
    )
    if is_unused and "momentum" not in own:
        saved.pop("momentum", None)
    missing = [slot for slot in own if slot not in saved]
    unknown = [slot for slot in saved if slot not in own]
    if missing and not saved and int(np.max(state.iterations, initial=0)) == 0:
        raise ValueError(
            "The file holds no optimizer state: it was saved before the first step."
        )
    if missing or unknown:
        raise ValueError(
            f"The optimizer has other slots. Only in the file: {unknown}. Only in the "
            f"optimizer: {missing}. Construct it with the arguments (`momentum`, "
            "`amsgrad`, `centered`, `use_ema`, ...) of the one that was saved."
        )
    return saved


def _iterations(optimizer, state):
    variable = iteration_variable(optimizer)
    steps = _integer(state.iterations, "iterations")
    # With accumulation, Keras 3 counts every batch.
    steps *= optimizer.gradient_accumulation_steps or 1
    if steps > np.iinfo(_dtype(variable)).max:
        raise ValueError(f"The file holds too many iterations: {steps}.")
    return variable, np.asarray(steps, _dtype(variable))


def _slot_values(optimizer, slot, variables, saved):
    trained = variables_of(optimizer)
    pairs = [(v, s) for v, s in zip(trained, variables, strict=True) if s is not None]
    if len(saved) != len(pairs):
        raise ValueError(
            f"The file holds the slot '{slot}' of {len(saved)} variables "
            f"({[name for name, _ in saved if name] or 'without names'}), but the "
            f"optimizer was built for {len(pairs)}: {[path_of(v) for v, _ in pairs]}."
        )
    order = pair([name for name, _ in saved], [path_of(v) for v, _ in pairs])
    values = []
    for (trainable, variable), index in zip(pairs, order, strict=True):
        name, value = saved[index]
        _check_slot(slot, trainable, variable, name, value)
        values.append((variable, _cast(variable, value)))
    return values


def _check_slot(slot, trainable, variable, name, value):
    where = f"slot '{slot}' of '{path_of(trainable)}'"
    source = f"'{name}'" if name else "its counterpart in the file"
    if tuple(variable.shape) != value.shape:
        raise ValueError(
            f"The {where} has shape {tuple(variable.shape)}, but that of {source} "
            f"has shape {value.shape}."
        )
    dtype = _dtype(variable)
    if value.dtype.name != dtype and dtype not in _WIDER.get(value.dtype.name, ()):
        raise ValueError(
            f"The {where} has dtype {dtype}, which does not hold the "
            f"{value.dtype.name} of {source} exactly."
        )


def _rest(optimizer, state, pairs):
    """Returns the values of variables other than counter, learning rate and slots."""
    done = {id(v) for v, _ in pairs} | {id(learning_rate_variable(optimizer))}
    rest = [v for v in optimizer.variables if id(v) not in done]
    if isinstance(optimizer, keras.optimizers.Nadam) and len(rest) == 1:
        value = state.u_product
        if value is None:
            # Only checkpoints hold the product.
            value = nadam_product(optimizer, int(state.iterations))
        return [(rest[0], _scalar(rest[0], value, "momentum cache"))]
    if rest:
        raise ValueError(
            f"The optimizer has state that no file of tf.keras 2 holds: "
            f"{[v.name for v in rest]}."
        )
    return []


# --- Single numbers ---------------------------------------------------------


def loss_scale_values(state: SavedState) -> Any:
    """Returns the saved loss scale and good steps, or None if there are none."""
    if state.loss_scale is None:
        return None
    scale = _number(state.loss_scale, "loss scale", "a float", "f")
    steps = 0 if state.good_steps is None else state.good_steps
    return scale.astype("float32"), min(_integer(steps, "good steps"), 2**31 - 1)


def _integer(value, what):
    number = _number(value, what, "an integer of at least 0", "iu")
    return int(number)


def _scalar(variable, value, what):
    return _cast(variable, _number(value, what, "a number", "fiu"))


def _number(value, what, kind, dtype_kinds):
    value = np.asarray(value)
    is_number = not value.shape and value.dtype.kind in dtype_kinds
    if not is_number or ("f" not in dtype_kinds and value < 0):
        raise ValueError(
            f"The file's {what} must be {kind}, without axes. It has shape "
            f"{value.shape} and dtype {value.dtype.name}: {value!r}"
        )
    return value


def _cast(variable, value):
    """Returns an array in the dtype of a variable, if that represents it."""
    with np.errstate(over="ignore"):
        cast = value.astype(_dtype(variable))
    check_is_sound(variable, value, cast)
    return cast


def _dtype(variable):
    return keras.backend.standardize_dtype(variable.dtype)
