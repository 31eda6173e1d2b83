"""Reads the config of a saved optimizer, and the numbers of its state.

`_core/state_file.py` has the layout of the state. A whole model in HDF5 names the
variables.
"""

import math
from dataclasses import dataclass
from typing import Any

from keras_lso.compat.untrusted_files import (
    dataset_at,
    hard_group,
    read_dataset,
    read_names,
)

# The wrapper's own: `iteration`, `learning_rate`, `step_counter`, `dynamic_scale`.
_FIRST = 4
_OF_KERAS = "keras.optimizers.LossScaleOptimizer"
_WRAPPERS = ("LossScaleOptimizer", "GuardedOptimizer")
# tf.keras 2 uses the latter, and writes no scale into such a file.
_ITERATIONS = ("iteration", "iter")
# The names of the first variable that belongs to no state.
_UNSAVED = ("amax_since_update", "consecutive_skips")


@dataclass
class SavedOptimizer:
    """The optimizer in a saved file. Attributes that the file does not hold are None.

    Attributes:
        name: String, the class.
        inner_optimizer: String, the class of the wrapped optimizer; None if the
            optimizer wraps nothing.
        policy: String, the class of the loss-scale policy.
        policy_config: Dict of the policy's arguments in the config.
        loss_scale: Float, the loss scale. None without loss scaling.
        step_counter: Int, the number of finite steps since the last change of the loss
            scale.
        applied_steps: Int, the number of applied steps. If gradients are accumulated,
            the number of updates; in a file without the config, which does not name
            the length of a window, the number of micro-batches.
        skipped_steps: Int, the number of skipped steps, or of skipped micro-batches.
            Keras's class does not count them.
        learning_rate: Float; or a string, the class of a schedule.
        variables: Int, the number of variables of the state.
        bytes: Int, the size of these variables.
        masters: Dict of `kind`, `number` and `bytes` of the master weights. The arrays
            in a file may be of any kind; only the config names the kind.
    """

    name: str | None = None
    inner_optimizer: str | None = None
    policy: str | None = None
    policy_config: dict[str, Any] | None = None
    loss_scale: float | None = None
    step_counter: int | None = None
    applied_steps: int | None = None
    skipped_steps: int | None = None
    learning_rate: float | str | None = None
    variables: int = 0
    bytes: int = 0
    masters: dict[str, Any] | None = None


def of_weights(file: Any, config: Any) -> SavedOptimizer | None:
    """Returns the optimizer of a file with numbered variables; None if it has none.

    Args:
        file: An open `h5py.File`, or None.
        config: The optimizer's part of the model's config; None if it is unknown.
    """
    found = _of_config(config)
    group = None if file is None else hard_group(file, "optimizer/vars")
    if group is None:
        return found if config is not None else None
    inner = hard_group(file, "optimizer/inner_optimizer/vars")
    _add_state(found, _Numbered(group, inner), _window(config))
    return found


def of_model(file: Any, config: Any) -> SavedOptimizer | None:
    """Returns the optimizer of a whole model in HDF5; None if it has none."""
    found = _of_config(config)
    group = hard_group(file, "optimizer_weights")
    if group is None:
        return found if config is not None else None
    _add_state(found, _Named(group, _names_of_weights(file)), _window(config))
    return found


# --- The config ---------------------------------------------------------------------


def _of_config(config):
    found = SavedOptimizer()
    if not isinstance(config, dict):
        return found
    found.name = _class_name(config)
    arguments = _arguments(config)
    inner = _inner(config)
    if isinstance(inner, dict):
        found.inner_optimizer = _class_name(inner)
    rate = _arguments(inner if isinstance(inner, dict) else config).get("learning_rate")
    found.learning_rate = _class_name(rate) if isinstance(rate, dict) else _plain(rate)
    if _is_a(found.name, "LossScaleOptimizer"):
        _add_policy(found, arguments)
    if _is_a(found.name, *_WRAPPERS) and "keras_lso" in found.name:
        kind = str(arguments.get("master_weights", "auto"))
        found.masters = {"kind": kind, "number": 0, "bytes": 0}
    return found


def _inner(config):
    """Returns the config of the wrapped optimizer; None if there is none."""
    arguments = _arguments(config)
    # tf.keras's class for TF1 calls it `optimizer`.
    return arguments.get("inner_optimizer", arguments.get("optimizer"))


def _window(config):
    """Returns the number of micro-batches in a window of the innermost optimizer."""
    while isinstance(inner := _inner(config), dict):
        config = inner
    window = _arguments(config).get("gradient_accumulation_steps")
    return window if type(window) is int and window > 0 else 1


def _is_a(name, *classes):
    """Whether a qualified class name ends in one of these names."""
    return str(name).rpartition(".")[2] in classes


def _add_policy(found, arguments):
    policy = arguments.get("loss_scale")
    if isinstance(policy, dict):
        found.policy = _class_name(policy)
        found.policy_config = _plain_items(_arguments(policy))
        return
    is_fixed = arguments.get("dynamic_growth_steps", 0) is None
    found.policy = "FixedLossScale" if is_fixed else "DynamicLossScale"
    keys = "initial_scale", "dynamic_growth_steps", "min_scale", "max_scale"
    known = {key: arguments[key] for key in keys if key in arguments}
    found.policy_config = _plain_items(known)


def _class_name(config):
    """Returns the qualified name of the class that a config names."""
    name = str(config.get("registered_name") or config.get("class_name"))
    package, separator, rest = name.partition(">")
    if separator:
        return f"{package}.{rest}"
    module = str(config.get("module") or "")
    if module.startswith("keras.src."):
        module = "keras.optimizers"  # On PyTorch Keras has classes of its own.
    return f"{module}.{config.get('class_name')}" if module else name


def _arguments(config):
    arguments = config.get("config") if isinstance(config, dict) else None
    return arguments if isinstance(arguments, dict) else {}


def _plain_items(config):
    return {str(key): _plain(value) for key, value in config.items()}


def _plain(value):
    """Returns a number, a string, a bool or None unchanged; otherwise the type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__name__


# --- The state ----------------------------------------------------------------------


class _State:
    """The variables of a saved optimizer.

    Args:
        group: The `h5py.Group` that holds them.
        names: List of their names in the group.

    Attributes:
        datasets: List of the variables' datasets. No values are read yet.
    """

    # Whether the wrapper counts skipped steps only, not all steps.
    counts_skips = False

    def __init__(self, group, names):
        self._group, self._names = group, names
        self.datasets = [dataset_at(group, name) for name in names]

    def number(self, index):
        """Returns the value of a variable; None if it is no single number."""
        if index is None or index >= len(self.datasets) or self.datasets[index].shape:
            return None
        value = read_dataset(self._group, self._names[index])
        return value.item() if value.dtype.kind in "iuf" else None


class _Numbered(_State):
    """The state in a file with numbered variables: `optimizer/vars/0` and so on."""

    def __init__(self, group, inner):
        super().__init__(group, list(map(str, range(len(group)))))
        self._inner = len(inner) if inner is not None else None

    @property
    def is_scaled(self):
        """Whether these are a wrapper's four variables and its inner optimizer's."""
        if self._inner is None or len(self.datasets) < _FIRST + self._inner:
            return False
        _, _, counter, scale = self.datasets[:_FIRST]
        kinds = counter.dtype.kind, scale.dtype.kind
        are_numbers = not counter.shape and not scale.shape
        return are_numbers and kinds[0] in "iu" and kinds[1] == "f"

    def places(self):
        """Returns the indices of loss scale, step counter and both counts of steps."""
        return (3, 2, 0, _FIRST) if self.is_scaled else (None, None, None, 0)

    def masters(self):
        """Returns the datasets of master weights, which follow the loss scale's."""
        rest = self.datasets[_FIRST + (self._inner or 0) :]
        if len(rest) > 1 and _are_spikes(*rest[-2:]):
            rest = rest[:-2]
        # The variables of a loss-scale policy are scalars; weights seldom are.
        while rest and not rest[0].shape:
            rest = rest[1:]
        return rest


class _Named(_State):
    """The state in a whole model in HDF5, which names the variables."""

    def __init__(self, group, weights):
        names = read_names(group.attrs, "weight_names")
        ends = [name.rpartition("/")[2].partition(":")[0] for name in names]
        # The names from here on belong to no state.
        state = next((i for i, end in enumerate(ends) if end in _UNSAVED), len(names))
        self.counts_skips = state < len(names)
        self._ends, self._weights = ends[:state], weights
        super().__init__(group, names[:state])

    @property
    def is_scaled(self):
        return self._first("dynamic_scale") is not None

    def _first(self, *ends, start=0):
        """Returns the index of the first variable with such a name, or None."""
        rest = range(start, len(self._ends))
        return next((i for i in rest if self._ends[i] in ends), None)

    def places(self):
        first, second = self._first(*_ITERATIONS), None
        if first is not None and self.is_scaled:
            second = self._first(*_ITERATIONS, start=first + 1)
        # If there are two counts, the wrapper's comes first.
        counts = (None, first) if second is None else (first, second)
        return self._first("dynamic_scale"), self._first("step_counter"), *counts

    def masters(self):
        pairs = zip(self._names, self.datasets, strict=True)
        return [dataset for name, dataset in pairs if name in self._weights]


def _names_of_weights(file):
    """Returns the names of the weights of a model in HDF5, a set."""
    layers = hard_group(file, "model_weights")
    names: set[str] = set()
    for layer in layers if layers is not None else ():
        group = hard_group(layers, layer)
        if group is not None:
            names.update(read_names(group.attrs, "weight_names"))
    return names


def _are_spikes(norms, counts):
    is_history = norms.dtype.kind == "f" and len(norms.shape or ()) == 1
    return is_history and counts.dtype.kind in "iu" and counts.shape == (3,)


def _add_state(found, state, window):
    """Adds the numbers of the state to `found`.

    Args:
        found: `SavedOptimizer`.
        state: `_State`.
        window: Int, the number of micro-batches whose gradients are accumulated.
    """
    found.variables = len(state.datasets)
    found.bytes = sum(map(_bytes_of, state.datasets))
    scale, counter, steps, applied = state.places()
    count = state.number(applied)
    found.applied_steps = None if count is None else count // window
    if isinstance(found.learning_rate, int | float) and applied is not None:
        # A callback or the user may have assigned the rate.
        rate = state.number(applied + 1)
        found.learning_rate = found.learning_rate if rate is None else rate
    if not state.is_scaled:
        return
    found.loss_scale = state.number(scale)
    found.step_counter = state.number(counter)
    if found.name is not None and found.inner_optimizer is None:
        # `compile` wrapped the optimizer, under `mixed_float16`.
        found.inner_optimizer, found.name = found.name, _OF_KERAS
        _add_policy(found, {})
    if found.name is None or "keras_lso" in found.name:
        found.skipped_steps = _skipped(state, steps, count)
    # The learning rate of a `GuardedOptimizer` itself is -1.
    if _is_a(found.name, "GuardedOptimizer") or state.number(1) == -1.0:
        found.loss_scale = found.step_counter = None
    datasets = state.masters()
    if datasets or found.masters:
        kind = found.masters["kind"] if found.masters else None
        size = sum(map(_bytes_of, datasets))
        found.masters = {"kind": kind, "number": len(datasets), "bytes": size}


def _skipped(state, steps, applied):
    """Returns the number of skipped steps; None if the file does not hold it."""
    total = state.number(steps)
    if total is None or applied is None or state.counts_skips:
        return total
    # With Keras's class the total stays 0, and a user may assign the count of steps.
    return total - applied if total >= applied else None


def _bytes_of(dataset):
    return math.prod(dataset.shape or ()) * dataset.dtype.itemsize
