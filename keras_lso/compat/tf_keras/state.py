"""Converts the optimizer state in a tf.keras file to the variables of Keras 3."""

import dataclasses
import re
from typing import Any

import keras
import numpy as np

from keras_lso._core.state_file import check_is_sound, check_state
from keras_lso._keras_internals.optimizers import (
    iteration_variable,
    public_class,
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
_AVERAGE = "average"
# The arguments that add a slot to an optimizer. All other slots are always there.
_OPTIONAL_SLOTS = {
    _AVERAGE: "use_ema",
    "vhat": "amsgrad",
    "momentum": "momentum",
    "mg": "centered",
}
_WORDS = sorted(
    {word for groups in _LAYOUTS.values() for group in groups for word in group}
    | {_AVERAGE}
)


@dataclasses.dataclass
class SavedState:
    """The state of one optimizer in a file."""

    # Its class and config; empty if the file holds neither.
    saved: dict[str, Any]
    iterations: Any = None
    # Lists of `(name of the variable or None, array)`, in tf.keras's order.
    slots: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Whether a class from before TF 2.11 wrote it.
    is_legacy: bool = False
    # Nadam's product of momenta.
    u_product: Any = None

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the optimizer."""
        return self.saved.get("config") or {}


# --- The names of slots -----------------------------------------------------


def layout_of(
    optimizer: keras.optimizers.Optimizer, config: dict[str, Any] | None
) -> list[list[str]] | None:
    """Returns the slots in tf.keras 2.11+'s order, or None for an unknown class."""
    groups = _groups(optimizer)
    if groups is None:
        return None
    if config is None:
        present = set(_own_slots(optimizer))
    else:
        present = {slot for slot, key in _OPTIONAL_SLOTS.items() if config.get(key)}
    # tf.keras's SGD creates momentum slots even if its momentum is zero.
    optional = set(_OPTIONAL_SLOTS)
    if isinstance(optimizer, keras.optimizers.SGD):
        optional.remove("momentum")
    layout = [[_AVERAGE]] if _AVERAGE in present else []
    for group in groups:
        slots = [s for s in group.values() if s in present or s not in optional]
        layout += [slots] if slots else []
    return layout


def split_name(
    name: str, optimizer: keras.optimizers.Optimizer, is_legacy: bool
) -> tuple[str, str]:
    """Splits the name of a slot variable into the slot and the variable's name."""
    if is_legacy:
        variable, _, slot = name.rpartition("/")
        return slot, variable.partition("/")[2] or variable
    match = re.match(rf"(?:.*?/)?({'|'.join(_WORDS)})/(.+)", name)
    if not match:
        raise ValueError(f"The file has state that has no place here: '{name}'.")
    word, variable = match.groups()
    groups = _groups(optimizer) or []
    return next((g[word] for g in groups if word in g), word), variable


def _own_slots(optimizer):
    """Returns `slots_of(optimizer)` and the moving averages of the variables."""
    slots = slots_of(optimizer)
    if optimizer.use_ema and _AVERAGE not in slots:
        named = [v for v in optimizer.variables if v.name.endswith("_average")]
        slots = {_AVERAGE: named, **slots}
    return slots


def _groups(optimizer):
    return next((_LAYOUTS[c] for c in type(optimizer).__mro__ if c in _LAYOUTS), None)


# --- From the state to the variables ----------------------------------------


def values_for(optimizer: keras.optimizers.Optimizer, state: SavedState) -> Any:
    """Returns `(variable, new value)` pairs of a built optimizer."""
    _check_class(optimizer, state)
    slots = _known_slots(optimizer, state)
    # With accumulation, Keras 3 counts every batch.
    count = optimizer.gradient_accumulation_steps or 1
    pairs = [(iteration_variable(optimizer), np.asarray(state.iterations) * count)]
    rate = learning_rate_variable(optimizer)
    saved_rate = state.config.get("learning_rate")
    if rate is not None and isinstance(saved_rate, int | float):
        pairs.append((rate, np.asarray(saved_rate)))
    for slot, variables in _own_slots(optimizer).items():
        pairs += _slot_values(optimizer, slot, variables, slots[slot])
    # tf.keras accumulates no gradients.
    pairs += [
        (v, np.zeros(v.shape))
        for v in optimizer.variables
        if v.name.endswith("_gradient_accumulator")
    ]
    pairs += _rest(optimizer, state, pairs)
    return [(variable, _checked(variable, value)) for variable, value in pairs]


def learning_rate_variable(
    optimizer: keras.optimizers.Optimizer,
) -> keras.Variable | None:
    """Returns the variable of the learning rate; None if there is a schedule."""
    rate = optimizer.learning_rate
    return rate if isinstance(rate, keras.Variable) else None


def _checked(variable, value):
    with np.errstate(over="ignore"):
        cast = check_state(variable, value)
    check_is_sound(variable, value, cast)
    return cast


def _check_class(optimizer, state):
    names = [cls.__name__ for cls in _LAYOUTS]
    own = [cls.__name__ for cls in type(optimizer).__mro__ if cls in _LAYOUTS]
    saved = str(state.saved.get("class_name")).split(">")[-1]
    # Adam and AdamW have the same slots.
    name = "Adam" if saved == "AdamW" else saved
    if own and name in names and name not in own:
        raise ValueError(
            f"The file holds the state of {saved}, but the optimizer is "
            f"{public_class(type(optimizer)).__name__}."
        )


def _known_slots(optimizer, state):
    """Returns the saved slots. Raises an error if the optimizer has others."""
    own, saved = _own_slots(optimizer), dict(state.slots)
    # tf.keras 2.11+ saves momentum slots even of an SGD without momentum.
    is_unused = (
        isinstance(optimizer, keras.optimizers.SGD)
        and not state.is_legacy
        and not state.config.get("momentum")
    )
    if is_unused and "momentum" not in own:
        saved.pop("momentum", None)
    missing = [slot for slot in own if slot not in saved]
    unknown = [slot for slot in saved if slot not in own]
    if missing and not saved and not np.any(state.iterations):
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


def _slot_values(optimizer, slot, variables, saved):
    trained = variables_of(optimizer)
    pairs = [(v, s) for v, s in zip(trained, variables, strict=True) if s is not None]
    paths = [path_of(v) for v, _ in pairs]
    if len(saved) != len(pairs):
        raise ValueError(
            f"The file holds the slot '{slot}' of {len(saved)} variables "
            f"({[name for name, _ in saved if name] or 'without names'}), but the "
            f"optimizer was built for {len(pairs)}: {paths}."
        )
    order = pair([name for name, _ in saved], paths)
    return [(v, saved[i][1]) for (_, v), i in zip(pairs, order, strict=True)]


def _rest(optimizer, state, pairs):
    """Returns the values of variables other than counter, learning rate and slots."""
    done = {id(v) for v, _ in pairs} | {id(learning_rate_variable(optimizer))}
    rest = [v for v in optimizer.variables if id(v) not in done]
    if isinstance(optimizer, keras.optimizers.Nadam) and len(rest) == 1:
        value = state.u_product
        if value is None:
            # Classes of TF 2.11 and newer do not save the product.
            value = nadam_product(optimizer, int(state.iterations))
        return [(rest[0], np.asarray(value))]
    if rest:
        raise ValueError(
            f"The optimizer has state that no file of tf.keras 2 holds: "
            f"{[v.name for v in rest]}."
        )
    return []
