"""`load_optimizer_state`, and the state in the `.h5` and `.keras` files of tf.keras 2.

`state.py` has the code that all formats share, and `checkpoints.py` reads the formats
that TensorFlow itself wrote.
"""

import json
import os
import zipfile

import keras
import numpy as np

from keras_lso._core.checks import warn
from keras_lso._core.wrapper import check_optimizer
from keras_lso._keras_internals.optimizers import chain_of, variables_of
from keras_lso.compat.tf_keras import checkpoints
from keras_lso.compat.tf_keras.state import (
    SavedState,
    layout_of,
    learning_rate_variable,
    loss_scale_values,
    split_name,
    values_for,
)
from keras_lso.compat.untrusted_files import (
    DAMAGE,
    hard_group,
    read_dataset,
    read_datasets,
    read_names,
    refuse_bombs,
    text,
)
from keras_lso.loss_scales import DynamicLossScale

_NO_STATE = (
    "The file holds no optimizer state. tf.keras writes it only if the model is "
    "compiled, has trained, and is saved as a whole, with `include_optimizer=True`."
)


def load_optimizer_state(
    optimizer: keras.optimizers.Optimizer, path: str | os.PathLike[str]
) -> None:
    """Loads the optimizer state in a file of tf.keras 2 into a Keras 3 optimizer.

    Training resumes: iterations, slots and learning rate come from the file. The
    `optimizer` keeps its own hyperparameters, and a learning-rate schedule if it has
    one.

    | file | holds a loss scale |
    | --- | --- |
    | `model.save("model.h5")` | no |
    | `model.save("model.keras")`, with the classes of TF 2.11 and newer | no |
    | `model.save("folder")`, a SavedModel | yes |
    | `model.save_weights("prefix")` of a compiled model | yes |
    | `tf.train.Checkpoint(model=model, optimizer=optimizer).save("prefix")` | yes |

    If the file holds no loss scale, a `LossScaleOptimizer` re-initialises its own.

    The next steps equal those of tf.keras within float32 rounding, except for three
    classes of `tf.keras.optimizers.legacy`. Its Nadam had another momentum schedule;
    its RMSprop without momentum and its Adagrad added epsilon outside the root.

    Slots are matched to variables by the names of the layer and the variable. Layers
    that Keras itself numbered are matched by their order, and so are all layers of a
    `.keras` file, which holds no names. Build the same model, and build the optimizer
    with the model's `trainable_variables`. Layers with other names in another order
    raise an error where the names or the shapes reveal it.

    Args:
        optimizer: Built Keras 3 optimizer of the class that was saved. A
            `LossScaleOptimizer` may wrap it.
        path: Path of a `.h5` or `.keras` file, of the folder of a SavedModel or of
            checkpoints (the latest is read), or the prefix of a checkpoint. The last
            three need TensorFlow, whatever the backend.

    Raises:
        FileNotFoundError: If there is nothing at `path`.
        ImportError: If TensorFlow or h5py is needed and not installed.
        ValueError: If the file is damaged, or holds no optimizer state, the state of
            several optimizers, or a state whose slots, counts, shapes or dtypes do not
            fit `optimizer`. Nothing is loaded then.

    Example:

    >>> import h5py, keras, keras_lso, numpy as np, os, tempfile
    >>> from keras_lso.mixed_precision import load_optimizer_state
    >>> path = os.path.join(tempfile.mkdtemp(), "model.h5")
    >>> with h5py.File(path, "w") as file:  # `model.save(path)` in tf.keras
    ...     weights = file.create_group("optimizer_weights")
    ...     weights["SGD/iter:0"] = np.int64(7)
    ...     weights["SGD/dense/kernel/momentum:0"] = np.float32([0.5, -0.5])
    ...     weights.attrs["weight_names"] = [
    ...         "SGD/iter:0", "SGD/dense/kernel/momentum:0"
    ...     ]
    >>> optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    >>> optimizer.build([keras.Variable([1.0, 2.0], name="kernel")])
    >>> load_optimizer_state(optimizer, path)
    >>> int(optimizer.iterations), optimizer.momentums[0].numpy().tolist()
    (7, [0.5, -0.5])
    """
    check_optimizer(optimizer, "optimizer")
    if not all(o.built for o in chain_of(optimizer)):
        raise ValueError(
            "The optimizer must be built before its state can be loaded. Call "
            "`optimizer.build(model.trainable_variables)` first."
        )
    innermost = chain_of(optimizer)[-1]
    path = os.path.expanduser(os.fspath(path))
    try:
        state = _read(path, innermost)
        pairs = values_for(innermost, state)
        scale = loss_scale_values(state)
    except ValueError as error:
        raise ValueError(f"{error} Nothing was loaded. Received: {path=}") from error
    messages = _assign(optimizer, pairs, scale) + _remarks(innermost, state)
    for message in messages:
        warn(message)


# --- Into the optimizer -----------------------------------------------------


def _assign(optimizer, pairs, scale):
    """Assigns the checked values; returns the warnings about the loss scale."""
    wrapper = keras.optimizers.LossScaleOptimizer
    scaler = next((o for o in chain_of(optimizer) if isinstance(o, wrapper)), None)
    if scaler is None or not hasattr(scaler, "loss_scale_policy"):
        for variable, value in pairs:
            variable.assign(value)
        return [] if scaler is None else _assign_keras_scale(scaler, scale)
    policy = scaler.loss_scale_policy
    is_dynamic = isinstance(policy, DynamicLossScale)
    if scale is not None and is_dynamic:
        step_counter, scale_variable = policy.variables[:2]
        pairs = [*pairs, (scale_variable, scale[0]), (step_counter, scale[1])]
    scaler._state.assign([v for v, _ in pairs], [value for _, value in pairs])
    if scale is None:
        return [_initial_scale(scaler)] if scaler.dynamic else []
    if is_dynamic:
        return []
    return [
        f"The file's loss scale of {float(scale[0])} is ignored: that of the optimizer "
        f"comes from its {type(policy).__name__}."
    ]


def _assign_keras_scale(scaler, scale):
    """Assigns to a `keras.optimizers.LossScaleOptimizer`, which has no bounds."""
    has_scale = scale is not None and 0 < scale[0] < np.inf
    value, steps = scale if has_scale else (scaler.initial_scale, 0)
    scaler.dynamic_scale.assign(value)
    scaler.step_counter.assign(min(steps, scaler.dynamic_growth_steps - 1))
    return [] if has_scale else [_initial_scale(scaler)]


def _initial_scale(scaler):
    return (
        "The file holds no loss scale: that of the optimizer starts at "
        f"initial_scale={scaler.initial_scale}."
    )


def _remarks(optimizer, state):
    """Returns the warnings about a learning-rate decay, which is not resumed."""
    # Nadam's `decay` is the decay of its momentum.
    is_nadam = isinstance(optimizer, keras.optimizers.Nadam)
    if not state.decay or is_nadam or learning_rate_variable(optimizer) is None:
        return []
    return [
        f"The learning rate in the file decays (decay={state.decay}), and that of a "
        "Keras 3 optimizer is constant. Give the optimizer `keras.optimizers."
        f"schedules.InverseTimeDecay(learning_rate, 1, {state.decay})`."
    ]


# --- Out of the file --------------------------------------------------------


def _read(path, optimizer):
    if os.path.isdir(path) or checkpoints.is_prefix(path):
        return checkpoints.read(path, optimizer)
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"There is no file, folder or checkpoint at path={path!r}."
        )
    # Keras imports h5py only when it reads a file.
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            "Reading `.h5` and `.keras` files needs h5py: `pip install h5py`."
        ) from error
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return _read_archive(h5py, archive, optimizer)
        if h5py.is_hdf5(path):
            with h5py.File(path, "r") as file:
                return _read_h5(file, optimizer)
    except (*DAMAGE, TypeError) as error:
        raise ValueError(f"The file seems to be damaged ({error}).") from error
    raise ValueError(
        "The file is neither an HDF5 file, nor a `.keras` file, nor part of a "
        "checkpoint, or it is damaged."
    )


def _read_archive(h5py, archive, optimizer):
    refuse_bombs(archive)
    names = archive.namelist()
    if "metadata.json" in names:
        _refuse_keras_3(json.loads(archive.read("metadata.json")).get("keras_version"))
    config = json.loads(archive.read("config.json")) if "config.json" in names else {}
    saved = _unwrap((config.get("compile_config") or {}).get("optimizer"))
    weights = [n for n in ("model.weights.h5", "variables.h5") if n in names]
    if not weights:
        raise ValueError(_NO_STATE)
    with archive.open(weights[0]) as stored, h5py.File(stored, "r") as file:
        group = hard_group(file, "optimizer/vars")
        if group is not None:
            return _from_numbered(group, optimizer, saved)
    if "legacy" in str((saved or {}).get("module")):
        raise ValueError(
            "The file holds no optimizer state: tf.keras never writes that of "
            "`tf.keras.optimizers.legacy` into a `.keras` file. Save the model as "
            "`.h5`, or write a checkpoint."
        )
    raise ValueError(_NO_STATE)


def _read_h5(file, optimizer):
    """Reads a whole model, or a file of `save_weights("....weights.h5")`."""
    _refuse_keras_3(text(file.attrs.get("keras_version")))
    group = hard_group(file, "optimizer/vars")
    if group is not None:
        return _from_numbered(group, optimizer, None)
    group = hard_group(file, "optimizer_weights")
    if group is None:
        raise ValueError(_NO_STATE)
    names = read_names(group.attrs, "weight_names")
    values = dict(zip(names, read_datasets(group, names), strict=True))
    config = json.loads(text(file.attrs.get("training_config")) or "{}")
    return _from_named(values, optimizer, _unwrap(config.get("optimizer_config")))


def _from_named(values, optimizer, saved):
    state = _described(saved)
    values = {name.removesuffix(":0"): value for name, value in values.items()}
    state.is_legacy = any(name.split("/")[-1] == "iter" for name in values)
    for name, value in values.items():
        last = name.split("/")[-1]
        if last in ("iter", "iteration"):
            state.iterations = value
        elif last == "momentum_cache":
            state.u_product = value
        else:
            slot, variable = split_name(name, optimizer, state.is_legacy)
            state.slots.setdefault(slot, []).append((variable, value))
    if not state.slots and state.iterations is None:
        raise ValueError(_NO_STATE)
    return state


def _from_numbered(group, optimizer, saved):
    """Returns the state in a group of arrays, numbered as tf.keras created them."""
    layout = layout_of(optimizer, saved and saved["config"])
    if layout is None:
        raise ValueError(
            "The file has no names for the optimizer's variables, and the order of "
            f"those of {type(optimizer).__name__} is not known. Save the model as "
            "`.h5`, or write a checkpoint."
        )
    state = _described(saved)
    state.iterations, *values = [read_dataset(group, str(i)) for i in range(len(group))]
    width = sum(map(len, layout))
    count = len(variables_of(optimizer))
    if saved is None and len(values) == width * count + 1:
        _refuse_keras_3("3, it seems")
    if values and len(values) != width * count:
        raise ValueError(
            f"The file holds {len(values)} slot variables, but {width} for each of "
            f"the {count} variables that the optimizer was built for make "
            f"{width * count}. Slots: {[slot for slots in layout for slot in slots]}."
        )
    rest = iter(values)
    for slots in layout if values else []:
        rows = [[next(rest) for _ in slots] for _ in range(count)]
        for slot, arrays in zip(slots, zip(*rows, strict=True), strict=True):
            state.slots[slot] = [(None, array) for array in arrays]
    return state


def _described(saved):
    """Returns a state with only the values in the optimizer's config."""
    config = (saved or {}).get("config") or {}
    rate = config.get("learning_rate")
    return SavedState(
        iterations=None,
        slots={},
        class_name=saved and str(saved.get("class_name")).split(">")[-1],
        config=config if saved else None,
        learning_rate=rate if isinstance(rate, int | float) else None,
        decay=float(config.get("decay") or 0.0),
    )


def _unwrap(saved):
    """Returns the config dict of the innermost optimizer; None if there is none."""
    while isinstance(saved, dict) and isinstance(saved.get("config"), dict):
        config = saved["config"]
        # Before TF 2.4 the key was `optimizer`.
        inner = config.get("inner_optimizer") or config.get("optimizer")
        if not isinstance(inner, dict):
            return saved
        saved = inner
    return None


def _refuse_keras_3(version):
    if str(version).startswith("3"):
        raise ValueError(
            f"The file was written by Keras {version}, not by tf.keras 2. Call "
            "`keras_lso.load_model(path)`, which loads the optimizer with the model."
        )
