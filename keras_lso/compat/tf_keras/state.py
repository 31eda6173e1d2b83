"""Converts the optimizer state in a tf.keras file to the variables of Keras 3."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_lso._core.state_file import check_stored
from keras_lso._keras_internals.optimizers import (
    iteration_variable,
    moving_averages_of,
    public_class,
    variables_of,
)
from keras_lso._keras_internals.state import (
    TF_KERAS_SLOTS,
    nadam_product,
    slots_in_tf_keras,
    slots_of,
)
from keras_lso._keras_internals.variables import path_of

_AVERAGE = "average"
# The arguments that add a slot to an optimizer. All other slots are always there.
_OPTIONAL_SLOTS = {
    _AVERAGE: "use_ema",
    "vhat": "amsgrad",
    "momentum": "momentum",
    "mg": "centered",
}
# The names of slots in tf.keras 2.11+. `slots_of` has the older names.
_WORDS = {_AVERAGE, *(new for slots in TF_KERAS_SLOTS.values() for _, new, _ in slots)}


@dataclasses.dataclass
class SavedState:
    """The state of one optimizer in a file."""

    # Its class and config; empty if the file holds neither.
    saved: dict[str, Any]
    iterations: Any = None
    # Lists of `(name of the variable or None, array)`, in tf.keras's order.
    slots: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Nadam's product of momenta.
    u_product: Any = None

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the optimizer."""
        return self.saved.get("config") or {}


# --- The names of slots -----------------------------------------------------


def layout_of(
    optimizer: keras.optimizers.Optimizer, config: dict[str, Any] | None
) -> list[list[str]]:
    """Returns the slots in tf.keras 2.11+'s order, in groups; none if unknown."""
    if config is None:
        own = _own_slots(optimizer)
        config = {argument: slot in own for slot, argument in _OPTIONAL_SLOTS.items()}
    if isinstance(optimizer, keras.optimizers.SGD):
        # tf.keras creates its momentum slots even if the momentum is zero.
        config = {**config, "momentum": True}
    present = [
        slot
        for slot in (_AVERAGE, *(old for old, _, _ in slots_in_tf_keras(optimizer)))
        if slot not in _OPTIONAL_SLOTS or config.get(_OPTIONAL_SLOTS[slot])
    ]
    # The slots that are always there come variable by variable.
    return [list(group) for _, group in itertools.groupby(present, _OPTIONAL_SLOTS.get)]


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
    slots = slots_in_tf_keras(optimizer)
    return next((old for old, new, _ in slots if new == word), word), variable


def _own_slots(optimizer):
    """Returns `slots_of(optimizer)` and the moving averages of the variables."""
    averages = {_AVERAGE: moving_averages_of(optimizer)} if optimizer.use_ema else {}
    return averages | slots_of(optimizer)


# --- From the state to the variables ----------------------------------------


def values_for(optimizer: keras.optimizers.Optimizer, state: SavedState) -> Any:
    """Returns `(variable, new value)` pairs of a built optimizer."""
    _check_class(optimizer, state)
    slots = _known_slots(optimizer, state)
    # With accumulation, Keras 3 counts every batch.
    count = optimizer.gradient_accumulation_steps or 1
    pairs = [(iteration_variable(optimizer), state.iterations * count)]
    rate, saved_rate = optimizer.learning_rate, state.config.get("learning_rate")
    if isinstance(rate, keras.Variable) and isinstance(saved_rate, int | float):
        pairs.append((rate, saved_rate))
    for slot, variables in _own_slots(optimizer).items():
        pairs += _slot_values(optimizer, slot, variables, slots[slot])
    # tf.keras accumulates no gradients.
    pairs += [
        (v, np.zeros(v.shape))
        for v in optimizer.variables
        if v.name.endswith("_gradient_accumulator")
    ]
    pairs += _rest(optimizer, state, pairs)
    return [(v, check_stored(v, np.asarray(value))) for v, value in pairs]


def _check_class(optimizer, state):
    classes = {cls.__name__: cls for cls in TF_KERAS_SLOTS}
    saved = str(state.saved.get("class_name")).split(">")[-1]
    # Adam and AdamW have the same slots.
    cls = classes.get("Adam" if saved == "AdamW" else saved)
    if cls and slots_in_tf_keras(optimizer) and not isinstance(optimizer, cls):
        raise ValueError(
            f"The file holds the state of {saved}, but the optimizer is "
            f"{public_class(type(optimizer)).__name__}."
        )


def _known_slots(optimizer, state):
    """Returns the saved slots. Raises an error if the optimizer has others."""
    own, saved = _own_slots(optimizer), dict(state.slots)
    # tf.keras 2.11+ saves momentum slots even of an SGD without momentum.
    is_sgd = isinstance(optimizer, keras.optimizers.SGD)
    if is_sgd and "momentum" not in own and not state.config.get("momentum"):
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
    done = {id(v) for v, _ in pairs} | {id(optimizer.learning_rate)}
    rest = [v for v in optimizer.variables if id(v) not in done]
    if isinstance(optimizer, keras.optimizers.Nadam) and len(rest) == 1:
        # Classes of TF 2.11 and newer do not save the product.
        computed = nadam_product(optimizer, int(state.iterations))
        return [(rest[0], computed if state.u_product is None else state.u_product)]
    if rest:
        raise ValueError(
            f"The optimizer has state that no file of tf.keras 2 holds: "
            f"{[v.name for v in rest]}."
        )
    return []


# --- The names of variables -------------------------------------------------


def pair(names: Sequence[str | None], paths: Sequence[str]) -> list[int]:
    """Returns for each of `paths` the position of its variable in `names`."""
    # Names that agree determine the match. They rarely agree in full: Keras 3 prepends
    # the model's name, and numbers unnamed layers from the start in each process, so
    # that `dense_1` in a file may be any `dense_N` of the model. Elsewhere the order
    # determines it, and one that contradicts the names is an error.
    in_file = [tuple(n.removesuffix(":0").split("/")) for n in names if n is not None]
    in_model = [tuple(p.split("/")) for p in paths]
    in_order = list(range(len(paths)))
    if len(in_file) < len(names):
        return in_order
    # As many trailing words as agree: at least the layer's and the variable's.
    for length in (4, 3, 2):
        order = _by_key(in_file, in_model, lambda words, n=length: words[-n:])
        is_unique = len({words[-length:] for words in in_file}) == len(in_file)
        if order is not None and is_unique:
            return order
    order = _by_key(in_file, in_model, _unnumbered)
    if order is None:
        # Renamed layers: match the names of the variables alone, or else the order.
        order = _by_key(in_file, in_model, lambda words: words[-1]) or in_order
        _check_order(in_file, in_model, order)
    return order


def _by_key(names, paths, key):
    """Matches names and paths of the same key in order; None if the counts differ."""
    saved = sorted((key(name), i) for i, name in enumerate(names))
    own = sorted((key(path), i) for i, path in enumerate(paths))
    if [k for k, _ in saved] != [k for k, _ in own]:
        return None
    order = {i: position for (_, i), (_, position) in zip(own, saved, strict=True)}
    return [order[i] for i in range(len(paths))]


def _unnumbered(words):
    """Returns the last two words, without the numbers that Keras gives to layers."""
    return tuple(re.sub(r"_\d+$", "", word) for word in words[-2:])


def _check_order(names, paths, order):
    """Raises an error if a variable of a pair has a namesake outside the pair."""
    saved, own = set(map(_unnumbered, names)), set(map(_unnumbered, paths))
    for path, index in zip(paths, order, strict=True):
        name = names[index]
        name_key, path_key = _unnumbered(name), _unnumbered(path)
        if name_key != path_key and (name_key in own or path_key in saved):
            raise ValueError(
                f"'{'/'.join(name)}' of the file might be taken for "
                f"'{'/'.join(path)}'. Name the layers as in the model that was saved: "
                f"{sorted({'/'.join(n[:-1]) for n in names})}."
            )
