"""What a tf.keras file holds of an optimizer, and what becomes of it in Keras 3."""

import dataclasses
import re

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
from keras_lso._tf_keras.names import pair

# What tf.keras 2.11+ called the slots of each class, and what its older classes and
# `slots_of` call them. The slots of one dict were created together, variable
# by variable, and the dicts one after the other: in that order they are in a file.
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
# Whether an optimizer of that config has the slot; it has those not named here.
_OPTIONAL_SLOTS = {
    AVERAGE: lambda config: config.get("use_ema"),
    "vhat": lambda config: config.get("amsgrad"),
    "momentum": lambda config: config.get("momentum"),
    "mg": lambda config: config.get("centered"),
}
_WORDS = {
    word for groups in _LAYOUTS.values() for group in groups for word in group
} | {AVERAGE}

# What each dtype holds exactly.
_WIDER = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
}


@dataclasses.dataclass
class SavedState:
    """What a file holds of one optimizer.

    Attributes:
        iterations: Integer array without axes.
        slots: Dict of slot names to lists of `(name of the variable or None, array)`,
            in the order in which tf.keras listed the variables.
        is_legacy: Bool. Whether a class of before TF 2.11 wrote it.
        class_name: String, or None if the file does not say.
        config: Dict, the optimizer's config, or None.
        learning_rate: Array or number; None if there is none, or a schedule.
        decay: Float. The learning-rate decay of the classes of before TF 2.11.
        u_product: Array. What Nadam keeps besides its slots, or None.
        loss_scale: Array, or None.
        good_steps: Array, or None.
    """

    iterations: np.ndarray
    slots: dict
    is_legacy: bool
    class_name: str | None = None
    config: dict | None = None
    learning_rate: object = None
    decay: float = 0.0
    u_product: object = None
    loss_scale: object = None
    good_steps: object = None


# --- The names of slots -----------------------------------------------------


def layout_of(optimizer, config=None):
    """Returns how tf.keras 2.11+ laid out the slots of an optimizer.

    Args:
        optimizer: Keras 3 optimizer of the same class.
        config: Dict, the config of the tf.keras optimizer. Defaults to `None`: it
            had the slots that `optimizer` has.

    Returns:
        List of lists of slot names: those of one list were created together. None
        for a class that tf.keras did not have.
    """
    groups = _groups(optimizer)
    if groups is None:
        return None
    if config is None:
        present = set(own_slots(optimizer))
    else:
        present = {slot for slot, has in _OPTIONAL_SLOTS.items() if has(config)}
    # tf.keras's SGD has slots without momentum as well.
    optional = set(_OPTIONAL_SLOTS)
    if isinstance(optimizer, keras.optimizers.SGD):
        optional.remove("momentum")
    layout = [[AVERAGE]] if AVERAGE in present else []
    for group in groups:
        slots = [s for s in group.values() if s in present or s not in optional]
        layout += [slots] if slots else []
    return layout


def split_legacy_name(name, optimizer):
    """Splits `"Adam/dense/kernel/m"` into the slot and the variable's name."""
    variable, _, slot = name.rpartition("/")
    return slot, variable.partition("/")[2] or variable


def split_name(name, optimizer):
    """Splits `"Adam/m/dense/kernel"` into the slot and the variable's name.

    That is how tf.keras 2.11+ called it, or `"m/dense/kernel"`.
    """
    match = re.match(rf"(?:.*?/)?({'|'.join(sorted(_WORDS))})/(.+)", name)
    if not match:
        raise ValueError(f"The file has state that has no place here: '{name}'.")
    word, variable = match.groups()
    groups = _groups(optimizer) or []
    return next((g[word] for g in groups if word in g), word), variable


def own_slots(optimizer):
    """Returns `slots_of(optimizer)`, and the averages of the variables."""
    slots = slots_of(optimizer)
    if optimizer.use_ema and AVERAGE not in slots:
        named = [v for v in optimizer.variables if v.name.endswith("_average")]
        slots = {AVERAGE: named, **slots}
    return slots


def _groups(optimizer):
    return next((_LAYOUTS[c] for c in type(optimizer).__mro__ if c in _LAYOUTS), None)


# --- From the state to the variables ----------------------------------------


def values_for(optimizer, state):
    """Returns what each variable of an optimizer becomes, and changes nothing.

    Args:
        optimizer: Built Keras 3 optimizer that wraps no other.
        state: `SavedState`.

    Returns:
        List of pairs of a variable and its new value, an array of its shape.

    Raises:
        ValueError: If the state is not that of such an optimizer.
    """
    _check_class(optimizer, state)
    pairs = [_iterations(optimizer, state)]
    saved = _known_slots(optimizer, state)
    rate = learning_rate_variable(optimizer)
    if rate is not None and state.learning_rate is not None:
        pairs.append((rate, _scalar(rate, state.learning_rate, "learning rate")))
    for slot, variables in own_slots(optimizer).items():
        pairs += _slot_values(optimizer, slot, variables, saved[slot])
    pairs += _accumulators(optimizer)
    return pairs + _rest(optimizer, state, pairs)


def learning_rate_variable(optimizer):
    """Returns the variable of the learning rate; None if it is a schedule's."""
    rate = optimizer.learning_rate
    return rate if isinstance(rate, keras.Variable) else None


def _check_class(optimizer, state):
    names = [cls.__name__ for cls in _LAYOUTS]
    own = [cls.__name__ for cls in type(optimizer).__mro__ if cls in _LAYOUTS]
    name = "Adam" if state.class_name == "AdamW" else state.class_name
    if own and name in names and name not in own:
        raise ValueError(
            f"The file holds the state of {state.class_name}, but the optimizer is "
            f"{canonical_class(optimizer).__name__}."
        )


def _known_slots(optimizer, state):
    """Returns the saved slots, which are those that the optimizer has."""
    own, saved = own_slots(optimizer), dict(state.slots)
    if "momentum" in saved and "momentum" not in own and _is_unused(optimizer, state):
        del saved["momentum"]
    missing = [slot for slot in own if slot not in saved]
    unknown = [slot for slot in saved if slot not in own]
    if missing and not saved and int(np.max(state.iterations, initial=0)) == 0:
        raise ValueError(
            "The file holds no optimizer state: the model was saved before the "
            "first step."
        )
    if missing or unknown:
        raise ValueError(
            "The file holds other state than the optimizer has. Only in the file: "
            f"{unknown}. Only in the optimizer: {missing}. Make the optimizer with "
            "the arguments (`momentum`, `amsgrad`, `centered`, `use_ema`, ...) of the "
            "one that was saved."
        )
    return saved


def _is_unused(optimizer, state):
    """Whether the saved momentum is that of an SGD without momentum.

    In tf.keras 2.11+ it has the slots all the same.
    """
    return (
        isinstance(optimizer, keras.optimizers.SGD)
        and not state.is_legacy
        and not (state.config or {}).get("momentum")
    )


def _iterations(optimizer, state):
    variable = iteration_variable(optimizer)
    steps = _integer(state.iterations, "iterations")
    # Keras 3 counts every batch, and divides.
    steps *= optimizer.gradient_accumulation_steps or 1
    if steps > np.iinfo(_dtype(variable)).max:
        raise ValueError(f"The file holds too many iterations: {steps}.")
    return variable, np.asarray(steps, _dtype(variable))


def _slot_values(optimizer, slot, variables, saved):
    """Returns pairs of a slot variable and the array that belongs to it."""
    trained = variables_of(optimizer)
    pairs = [(v, s) for v, s in zip(trained, variables, strict=True) if s is not None]
    if len(saved) != len(pairs):
        raise ValueError(
            f"The file holds the slot '{slot}' of {len(saved)} variables, but the "
            f"optimizer was built for {len(pairs)}: "
            f"{[path_of(v) for v, _ in pairs]}. The file has "
            f"{[name for name, _ in saved if name] or 'no names for them'}."
        )
    order = pair([name for name, _ in saved], [path_of(v) for v, _ in pairs])
    values = []
    for (trainable, variable), index in zip(pairs, order, strict=True):
        name, value = saved[index]
        _check(slot, trainable, variable, name, value)
        values.append((variable, _cast(variable, value)))
    return values


def _check(slot, trainable, variable, name, value):
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


def _accumulators(optimizer):
    """Empties what accumulates gradients, which tf.keras has not."""
    if not optimizer.gradient_accumulation_steps:
        return []
    return [
        (v, np.zeros(v.shape, _dtype(v)))
        for v in optimizer.variables
        if v.name.endswith("_gradient_accumulator")
    ]


def _rest(optimizer, state, pairs):
    """Returns values for what is neither counter, rate nor slot."""
    done = {id(v) for v, _ in pairs} | {id(learning_rate_variable(optimizer))}
    rest = [v for v in optimizer.variables if id(v) not in done]
    if isinstance(optimizer, keras.optimizers.Nadam) and len(rest) == 1:
        value = state.u_product
        if value is None:
            # Only a checkpoint holds it.
            value = nadam_product(optimizer, int(state.iterations))
        return [(rest[0], _scalar(rest[0], value, "momentum cache"))]
    if rest:
        raise ValueError(
            f"The optimizer has state that no file of tf.keras 2 holds: "
            f"{[v.name for v in rest]}."
        )
    return []


# --- Single numbers ---------------------------------------------------------


def loss_scale_values(state):
    """Returns the saved loss scale and good steps, or None if there are none."""
    if state.loss_scale is None:
        return None
    scale = np.asarray(state.loss_scale)
    if scale.shape or scale.dtype.kind != "f":
        raise ValueError(
            "The file's loss scale must be a float without axes. It has shape "
            f"{scale.shape} and dtype {scale.dtype.name}."
        )
    steps = 0 if state.good_steps is None else state.good_steps
    return scale.astype("float32"), min(_integer(steps, "good steps"), 2**31 - 1)


def _integer(value, what):
    value = np.asarray(value)
    if value.shape or value.dtype.kind not in "iu" or value < 0:
        raise ValueError(
            f"The file's {what} must be an integer of at least 0, without axes. It "
            f"has shape {value.shape} and dtype {value.dtype.name}: {value!r}"
        )
    return int(value)


def _scalar(variable, value, what):
    value = np.asarray(value)
    if value.shape or value.dtype.kind not in "fiu":
        raise ValueError(
            f"The file's {what} must be a number without axes. It has shape "
            f"{value.shape} and dtype {value.dtype.name}."
        )
    return _cast(variable, value)


def _cast(variable, value):
    """Returns an array in the dtype of a variable, which it must not make NaN."""
    with np.errstate(over="ignore"):
        cast = value.astype(_dtype(variable))
    check_is_sound(variable, value, cast)
    return cast


def _dtype(variable):
    return keras.backend.standardize_dtype(variable.dtype)
