"""`load_optimizer_state`: the state in the `.h5` and `.keras` files of tf.keras 2.

Either format is read into a `_SavedState`, which uses tf.keras's names of slots. It is
then mapped to the variables of Keras 3.
"""

import dataclasses
import itertools
import json
import operator
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import keras
import numpy as np

from keras_lso._core.checks import warn
from keras_lso._core.state_file import check_stored
from keras_lso._core.wrapper import check_optimizer
from keras_lso._keras_internals.optimizers import (
    chain_of,
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
    weights_kept_by,
)
from keras_lso._keras_internals.variables import path_of
from keras_lso.loss_scale_optimizer import LossScaleOptimizer

# The errors of h5py, json and zipfile for a damaged file, other than ValueError.
DAMAGE = (
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    OverflowError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
_NO_STATE = (
    "The file holds no optimizer state. tf.keras writes it only if the model is "
    "compiled, has trained, and is saved as a whole, with `include_optimizer=True`. It "
    "never writes that of `tf.keras.optimizers.legacy` into a `.keras` file."
)
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


def load_optimizer_state(
    optimizer: keras.optimizers.Optimizer, path: str | os.PathLike[str]
) -> None:
    """Loads the optimizer state in a file of tf.keras 2 into a Keras 3 optimizer.

    Training resumes: iterations, slots and learning rate come from the file. The
    `optimizer` keeps its own hyperparameters, and a schedule if it has one. A
    `LossScaleOptimizer` starts a new loss scale, since no file holds it. "Coming from
    tf.keras 2" lists the files with a state, and formulas that Keras 3 changed.

    Slots are matched to variables by the names of the layer and the variable; layers
    that Keras numbered, and all layers of a `.keras` file, which holds no names, by
    their order. Build the same model, and build the optimizer with the model's
    `trainable_variables`. An order that contradicts names or shapes raises an error.

    Args:
        optimizer: Built optimizer of the saved class, in a `LossScaleOptimizer` or not.
        path: Path of a `.h5` or `.keras` file that `model.save` of tf.keras wrote.

    Raises:
        FileNotFoundError: If there is nothing at `path`.
        ValueError: If the file is damaged, or holds no optimizer state, or one whose
            slots, counts or shapes do not fit `optimizer`. Nothing is loaded then.

    Example:

    ```python
    model.load_weights("model.h5")
    optimizer.build(model.trainable_variables)
    load_optimizer_state(optimizer, "model.h5")
    ```
    """
    check_optimizer(optimizer, "optimizer")
    if not all(o.built for o in chain_of(optimizer)):
        raise ValueError(
            "The optimizer must be built before its state can be loaded. Call "
            "`optimizer.build(model.trainable_variables)` first."
        )
    innermost = chain_of(optimizer)[-1]
    path = os.path.expanduser(os.fspath(path))
    if not os.path.exists(path) and not os.path.isfile(f"{path}.index"):
        raise FileNotFoundError(f"There is no file at path={path!r}.")
    try:
        state = _read(path, innermost)
        pairs = _checked(optimizer, _values_for(innermost, state))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} Nothing was loaded. Received: {path=}") from error
    except DAMAGE as error:
        raise ValueError(
            f"The file is damaged ({type(error).__name__}: {error}). Nothing was "
            f"loaded. Received: {path=}"
        ) from error
    _assign(optimizer, pairs)
    decay = state.config.get("decay")
    has_number = isinstance(innermost.learning_rate, keras.Variable)
    # Nadam's `decay` is the decay of its momentum.
    if decay and has_number and not isinstance(innermost, keras.optimizers.Nadam):
        warn(
            f"The learning rate in the file decays (decay={decay}), and that of a "
            "Keras 3 optimizer is constant. Give the optimizer `keras.optimizers."
            f"schedules.InverseTimeDecay(learning_rate, 1, {decay})`."
        )


def _assign(
    optimizer: keras.optimizers.Optimizer, pairs: list[tuple[keras.Variable, Any]]
) -> None:
    """Assigns the checked values; and re-initialises the loss scale, with a warning."""
    wrapper = keras.optimizers.LossScaleOptimizer
    scaler: Any = next((o for o in chain_of(optimizer) if isinstance(o, wrapper)), None)
    if isinstance(scaler, LossScaleOptimizer):
        variables, values = map(list, zip(*pairs, strict=True))
        scaler._state.assign(variables, values)
    else:
        if scaler is not None:
            pairs += [(scaler.dynamic_scale, scaler.initial_scale)]
            pairs += [(scaler.step_counter, 0)]
        for variable, value in pairs:
            variable.assign(value)
    # Keras's class has no fixed scale.
    if scaler is not None and getattr(scaler, "dynamic", True):
        warn(
            "The file holds no loss scale: that of the optimizer starts at "
            f"initial_scale={scaler.initial_scale}."
        )


# --- From a file to the state ------------------------------------------------


@dataclasses.dataclass
class _SavedState:
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


def _read(path: str, optimizer: keras.optimizers.Optimizer) -> _SavedState:
    """Reads a file of either format."""
    if os.path.isdir(path) or os.path.isfile(path.removesuffix(".index") + ".index"):
        raise ValueError(
            "SavedModels and checkpoints of TensorFlow are not read. Load the weights "
            "in tf.keras, `model.load_weights(...)`, build the optimizer, and write "
            "`model.save('model.h5')`."
        )
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return _read_archive(archive, optimizer)
    if h5py.is_hdf5(path):
        with h5py.File(path, "r") as file:
            return _read_h5(file, optimizer)
    raise ValueError(
        "The file is neither an HDF5 file nor a `.keras` file, or it is damaged."
    )


def _read_archive(
    archive: zipfile.ZipFile, optimizer: keras.optimizers.Optimizer
) -> _SavedState:
    """Reads a `.keras` file."""
    _refuse_keras_3(json.loads(archive.read("metadata.json")).get("keras_version"))
    config = json.loads(archive.read("config.json"))
    saved = _unwrap((config.get("compile_config") or {}).get("optimizer"))
    for name in {"model.weights.h5", "variables.h5"} & set(archive.namelist()):
        with archive.open(name) as stored, h5py.File(stored, "r") as file:
            if "optimizer/vars" in file:
                return _from_numbered(file["optimizer/vars"], optimizer, saved)
    raise ValueError(_NO_STATE)


def _read_h5(file: h5py.File, optimizer: keras.optimizers.Optimizer) -> _SavedState:
    """Reads a whole model, or a file of `save_weights("....weights.h5")`."""
    _refuse_keras_3(text(file.attrs.get("keras_version")))
    if "optimizer/vars" in file:
        return _from_numbered(file["optimizer/vars"], optimizer, {})
    if "optimizer_weights" not in file:
        raise ValueError(_NO_STATE)
    config = json.loads(text(file.attrs.get("training_config")) or "{}")
    state = _SavedState(_unwrap(config.get("optimizer_config")))
    group = file["optimizer_weights"]
    arrays = {name.removesuffix(":0"): group[name][()] for name in names_in(group)}
    # Classes of TF 2.11 and newer call it `iteration`.
    is_legacy = any(name.split("/")[-1] == "iter" for name in arrays)
    for name, value in arrays.items():
        last = name.split("/")[-1]
        if last in ("iter", "iteration"):
            state.iterations = value
        elif last == "momentum_cache":
            state.u_product = value
        else:
            slot, variable = _split_name(name, optimizer, is_legacy)
            state.slots.setdefault(slot, []).append((variable, value))
    if state.iterations is None:
        raise ValueError(_NO_STATE)
    return state


def _from_numbered(
    group: h5py.Group, optimizer: keras.optimizers.Optimizer, saved: dict[str, Any]
) -> _SavedState:
    """Returns the state in a group of arrays, numbered as tf.keras created them."""
    layout = _layout_of(optimizer, saved.get("config"))
    iterations, *values = [group[str(i)][()] for i in range(len(group))]
    state = _SavedState(saved, iterations)
    width, count = sum(map(len, layout)), len(variables_of(optimizer))
    if not saved and len(values) == width * count + 1:
        _refuse_keras_3("3, it seems")
    if values and len(values) != width * count:
        raise ValueError(
            f"The file holds {len(values)} slot variables, but {width} for each of "
            f"the {count} variables that the optimizer was built for make "
            f"{width * count}. Slots: {list(itertools.chain(*layout))}. If the "
            "optimizer is right, save the model as `.h5`, with the names of the slots."
        )
    rest = iter(values)
    for slots in layout if values else []:
        for _, slot in itertools.product(range(count), slots):
            state.slots.setdefault(slot, []).append((None, next(rest)))
    return state


def _unwrap(saved: Any) -> dict[str, Any]:
    """Returns the config dict of the innermost optimizer; {} if there is none."""
    if not isinstance(saved, dict) or not isinstance(saved.get("config"), dict):
        return {}
    # Before TF 2.4 the key was `optimizer`.
    inner = saved["config"].get("inner_optimizer") or saved["config"].get("optimizer")
    return _unwrap(inner) if isinstance(inner, dict) else saved


def _refuse_keras_3(version: Any) -> None:
    """Raises a `ValueError` if Keras 3 wrote the file."""
    if str(version).startswith("3"):
        raise ValueError(
            f"The file was written by Keras {version}, not by tf.keras 2. Call "
            "`keras_lso.load_model(path)`, which loads the optimizer with the model."
        )


def names_in(group: Any) -> list[str]:
    """Returns the names of the variables in a group of a whole model in HDF5."""
    parts = (
        ["weight_names"]  # Keras splits a list that is too long for HDF5.
        if "weight_names" in group.attrs
        else [f"weight_names{i}" for i in range(len(group.attrs))]
    )
    return [text(name) for part in parts for name in group.attrs[part]]


def text(value: Any) -> Any:
    """Returns a string, which HDF5 may hold as bytes."""
    return value.decode() if isinstance(value, bytes) else value


# --- The names of slots -----------------------------------------------------


def _layout_of(
    optimizer: keras.optimizers.Optimizer, config: dict[str, Any] | None
) -> list[list[str]]:
    """Returns the slots in tf.keras 2.11+'s order, in groups; none if unknown."""
    if config is None:
        own = _slots_and_averages(optimizer)
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


def _split_name(
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


def _slots_and_averages(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns `slots_of(optimizer)` and the moving averages of the variables."""
    averages = {_AVERAGE: moving_averages_of(optimizer)} if optimizer.use_ema else {}
    return averages | slots_of(optimizer)


# --- From the state to the variables ----------------------------------------


def _values_for(
    optimizer: keras.optimizers.Optimizer, state: _SavedState
) -> list[tuple[keras.Variable, Any]]:
    """Returns `(variable, new value)` pairs of a built optimizer."""
    _check_class(optimizer, state)
    slots = _known_slots(optimizer, state)
    # With accumulation, Keras 3 counts every batch.
    count = optimizer.gradient_accumulation_steps or 1
    pairs = [(iteration_variable(optimizer), state.iterations * count)]
    rate, saved_rate = optimizer.learning_rate, state.config.get("learning_rate")
    if isinstance(rate, keras.Variable) and isinstance(saved_rate, int | float):
        pairs.append((rate, saved_rate))
    for slot, variables in _slots_and_averages(optimizer).items():
        pairs += _slot_values(optimizer, slot, variables, slots[slot])
    # tf.keras accumulates no gradients.
    pairs += [
        (v, np.zeros(v.shape))
        for v in optimizer.variables
        if v.name.endswith("_gradient_accumulator")
    ]
    return pairs + _rest(optimizer, state, pairs)


def _checked(
    optimizer: keras.optimizers.Optimizer, pairs: list[tuple[keras.Variable, Any]]
) -> list[tuple[Any, np.ndarray]]:
    """Returns checked pairs, for `StateFile.assign` if there is a loss scale."""
    variables, values = map(list, zip(*pairs, strict=True))
    for scaler in chain_of(optimizer):
        if isinstance(scaler, LossScaleOptimizer):
            variables = scaler._masters.in_file(variables)
    weights = set(map(id, weights_kept_by(chain_of(optimizer)[-1])))
    return [
        (v, check_stored(v, np.asarray(x), id(v) in weights))
        for v, x in zip(variables, values, strict=True)
    ]


def _check_class(optimizer: keras.optimizers.Optimizer, state: _SavedState) -> None:
    """Raises a `ValueError` if another class with the same slots was saved."""
    classes = {cls.__name__: cls for cls in TF_KERAS_SLOTS}
    saved = str(state.saved.get("class_name")).split(">")[-1]
    # Adam and AdamW have the same slots.
    cls = classes.get("Adam" if saved == "AdamW" else saved)
    if cls and slots_in_tf_keras(optimizer) and not isinstance(optimizer, cls):
        raise ValueError(
            f"The file holds the state of {saved}, but the optimizer is "
            f"{public_class(type(optimizer)).__name__}."
        )


def _known_slots(
    optimizer: keras.optimizers.Optimizer, state: _SavedState
) -> dict[str, Any]:
    """Returns the saved slots. Raises an error if the optimizer has others."""
    expected, saved = _slots_and_averages(optimizer), dict(state.slots)
    # tf.keras 2.11+ saves momentum slots even of an SGD without momentum.
    is_sgd = isinstance(optimizer, keras.optimizers.SGD)
    if is_sgd and "momentum" not in expected and not state.config.get("momentum"):
        saved.pop("momentum", None)
    missing = [slot for slot in expected if slot not in saved]
    unknown = [slot for slot in saved if slot not in expected]
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


def _slot_values(
    optimizer: keras.optimizers.Optimizer,
    slot: str,
    variables: Sequence[keras.Variable | None],
    saved: list[tuple[str | None, Any]],
) -> list[tuple[keras.Variable, Any]]:
    """Returns the values of a slot, matched to its variables."""
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


def _rest(
    optimizer: keras.optimizers.Optimizer,
    state: _SavedState,
    pairs: list[tuple[keras.Variable, Any]],
) -> list[tuple[keras.Variable, Any]]:
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
        order = _by_key(in_file, in_model, operator.itemgetter(slice(-length, None)))
        is_unique = len({words[-length:] for words in in_file}) == len(in_file)
        if order is not None and is_unique:
            return order
    order = _by_key(in_file, in_model, _unnumbered)
    if order is None:
        # Renamed layers: match the names of the variables alone, or else the order.
        order = _by_key(in_file, in_model, lambda words: words[-1]) or in_order
        _check_order(in_file, in_model, order)
    return order


def _by_key(
    names: list[tuple[str, ...]],
    paths: list[tuple[str, ...]],
    key: Callable[[tuple[str, ...]], Any],
) -> list[int] | None:
    """Matches names and paths of the same key in order; None if the counts differ."""
    saved = sorted((key(name), i) for i, name in enumerate(names))
    own = sorted((key(path), i) for i, path in enumerate(paths))
    if [k for k, _ in saved] != [k for k, _ in own]:
        return None
    order = {i: position for (_, i), (_, position) in zip(own, saved, strict=True)}
    return [order[i] for i in range(len(paths))]


def _unnumbered(words: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the last two words, without the numbers that Keras gives to layers."""
    return tuple(re.sub(r"_\d+$", "", word) for word in words[-2:])


def _check_order(
    names: list[tuple[str, ...]], paths: list[tuple[str, ...]], order: list[int]
) -> None:
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
