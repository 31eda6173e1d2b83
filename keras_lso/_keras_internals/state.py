"""What Keras's optimizers keep, cast and write, which a step by a rule does not need.

That is their slots and averages, the casts in their own steps, and their configs.
"""

import math
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops
from keras.src.utils.naming import to_snake_case

from keras_lso._backend import backend
from keras_lso._backend.tensors import (
    FLOAT16_MAX,
    FLOAT32_MAX,
    Grads,
    Tensor,
    Variables,
    in_float32,
)
from keras_lso._keras_internals.optimizers import (
    TORCH_OPTIMIZERS,
    accumulators_of,
    bases_of,
    chain_of,
    index_of,
    innermost_of,
    iteration_variable,
    members_of,
    most_accumulation_steps,
    moving_averages_of,
    public_class,
    steps_in_dtype_of_variables,
    variables_of,
)
from keras_lso._keras_internals.variables import flat_path, path_of

# --- Slots ----------------------------------------------------------------------------

# Lists by the old names of tf.keras, with an item for each variable.
Slots: TypeAlias = dict[str, list[keras.Variable]]

_ADAM_SLOTS = [
    ("m", "m", "_momentums"),
    ("v", "v", "_velocities"),
    ("vhat", "vhat", "_velocity_hats"),
]
# Each slot's name in tf.keras up to 2.10, its name there since 2.11, and the attribute
# in which Keras 3 keeps it. Optimizers of this package have `_tf_keras_slots` instead.
TF_KERAS_SLOTS: dict[type, list[tuple[str, str, str]]] = {
    keras.optimizers.SGD: [("momentum", "m", "momentums")],
    keras.optimizers.Adam: _ADAM_SLOTS,
    keras.optimizers.RMSprop: [
        ("rms", "velocity", "_velocities"),
        ("momentum", "momentum", "_momentums"),
        ("mg", "average_gradient", "_average_gradients"),
    ],
    keras.optimizers.Adagrad: [("accumulator", "accumulator", "_accumulators")],
    keras.optimizers.Adadelta: [
        ("accum_grad", "accumulated_grad", "_accumulated_grads"),
        ("accum_var", "accumulated_delta_var", "_accumulated_delta_vars"),
    ],
    keras.optimizers.Adamax: [("m", "m", "_m"), ("v", "u", "_u")],
    keras.optimizers.Nadam: _ADAM_SLOTS,
    keras.optimizers.Ftrl: [
        ("accumulator", "accumulator", "_accumulators"),
        ("linear", "linear", "_linears"),
    ],
    keras.optimizers.Lion: [("m", "m", "_momentums")],
}


def slots_of(optimizer: keras.Optimizer) -> Slots:
    """Returns the slots of a built optimizer, lists by the old names of tf.keras."""
    if members_of(optimizer):
        return _slots_of_members(optimizer)
    attributes = _slot_attributes(optimizer)
    if attributes is None:
        return _slots_by_name(optimizer)
    columns = {name: getattr(optimizer, a, None) for name, a in attributes.items()}
    return {name: list(column) for name, column in columns.items() if column}


def _slots_of_members(optimizer: keras.Optimizer) -> Slots:
    """Returns the slots of a `MultiOptimizer`, from the member of each variable."""
    slots: Slots = {}
    for member in members_of(optimizer):
        trained = member._trainable_variables
        for name, column in slots_of(member).items():
            joint = slots.setdefault(name, [None] * len(variables_of(optimizer)))
            for variable, slot in zip(trained, column, strict=True):
                joint[index_of(optimizer, variable)] = slot
    return slots


def slots_in_tf_keras(optimizer: keras.Optimizer) -> list[tuple[str, str, str]]:
    """Returns the slots of an optimizer's class in `TF_KERAS_SLOTS`, [] if unknown."""
    classes = type(optimizer).__mro__
    return next((TF_KERAS_SLOTS[c] for c in classes if c in TF_KERAS_SLOTS), [])


def _slot_attributes(optimizer: keras.Optimizer) -> dict[str, str] | None:
    """Returns the dict of slot names to attributes, None if they are not known."""
    slots = slots_in_tf_keras(optimizer)
    of_package = getattr(type(optimizer), "_tf_keras_slots", None)
    return {name: attribute for name, _, attribute in slots} or of_package


def _slots_by_name(optimizer: keras.Optimizer) -> Slots:
    """Returns the slots that are named `<path of the variable>_<slot>`."""
    trained = optimizer._trainable_variables
    slots: Slots = {}
    prefixes = [flat_path(v) + "_" for v in trained]
    for slot in optimizer.variables:
        # The longest prefix: `w_1_momentum` is the slot of `w_1`, not of `w`.
        prefix = max(filter(slot.name.startswith, prefixes), key=len, default=None)
        if prefix is None:
            continue
        name = slot.name.removeprefix(prefix)
        column = slots.setdefault(name, [None] * len(trained))
        # Variables may have the same path. Slots come in their order.
        for i, of_variable in enumerate(prefixes):
            if of_variable == prefix and column[i] is None:
                column[i] = slot
                break
    return slots


def weights_of(optimizer: keras.Optimizer) -> Variables:
    """Returns the step count and the slots, as tf.keras 2.0 to 2.10 ordered them."""
    rates = {id(getattr(o, "_learning_rate", None)) for o in innermost_of(optimizer)}
    variables = [v for v in optimizer.variables if id(v) not in rates]
    slots = _slots_in_order(optimizer)
    of_slots = {id(v) for v in slots}
    # Variables that Keras creates before the slots (averages, accumulators) stay there.
    first = next((i for i, v in enumerate(variables) if id(v) in of_slots), None)
    first = len(variables) if first is None else first
    in_order = variables[:first] + slots + variables[first:]
    return list({id(v): v for v in in_order}.values())


def _slots_in_order(optimizer: keras.Optimizer) -> Variables:
    """Returns the slots in the order in which tf.keras created them: by name."""
    if _slot_attributes(optimizer) is None:
        return []
    columns: Iterable[Any] = slots_of(optimizer).values()
    if isinstance(optimizer, keras.optimizers.Ftrl):
        columns = zip(*columns, strict=True)
    in_order = [slot for column in columns for slot in column if slot is not None]
    if isinstance(optimizer, keras.optimizers.Nadam) and in_order:
        in_order.insert(0, optimizer._u_product)
    return in_order


# --- What Keras's `LossScaleOptimizer` does not save ------------------------------

# From this step on, Nadam multiplies its product by `beta_1`, in float32.
_STEPS_TO_CONSTANT = 1000


def saved_by_keras(optimizer: keras.Optimizer) -> Variables:
    """Returns the variables of an optimizer that Keras's wrapper of it saves."""
    # The wrapper builds it with tracking off, and so loses variables that are only
    # attributes. Their paths do not have the optimizer's name before their own.
    scopes = [[o.name] for o in innermost_of(optimizer)]
    return [v for v in optimizer.variables if path_of(v).split("/")[-2:-1] in scopes]


def restore_unsaved(optimizer: keras.Optimizer, loaded: Variables) -> None:
    """Computes the variables that a file does not hold from the count of steps."""
    # Nadam's product of momenta: from 1, the next steps would be far too large.
    ids = {id(v) for v in loaded}
    for nadam in innermost_of(optimizer):
        is_nadam = isinstance(nadam, keras.optimizers.Nadam) and nadam.built
        if is_nadam and id(nadam._u_product) not in ids:
            steps = int(ops.convert_to_numpy(nadam.iterations))
            nadam._u_product.assign(nadam_product(nadam, steps))


def nadam_product(optimizer: keras.optimizers.Nadam, steps: int) -> np.float32:
    """Returns Nadam's product of momenta after so many steps, in float32."""
    beta_1 = np.float32(optimizer.beta_1)
    product = np.float32(1.0)
    for step in range(1, min(steps, _STEPS_TO_CONSTANT) + 1):
        decay = np.power(np.float32(0.96), np.float32(step))
        product *= beta_1 * (1 - np.float32(0.5) * decay)
    return product * beta_1 ** max(steps - _STEPS_TO_CONSTANT, 0)


# --- Averages -------------------------------------------------------------------------


def averages_of(
    optimizer: keras.Optimizer,
) -> list[tuple[keras.Variable, keras.Variable]]:
    """Returns pairs of a trained variable and its moving average."""
    # Before the first step that is applied an average is zero, and left out. A variable
    # that is overwritten with its gradient has none.
    return [
        (variable, average)
        for o in innermost_of(optimizer)
        if o.use_ema and o.built and has_stepped(o)
        for variable, average in zip(
            variables_of(o), moving_averages_of(o), strict=True
        )
        if average is not None
    ]


def weights_kept_by(optimizer: keras.Optimizer) -> Variables:
    """Returns the variables that hold averages or other numbers of the weights."""
    averaging = [o for o in innermost_of(optimizer) if o.use_ema and o.built]
    free = [o for o in schedule_free_in(optimizer) if o.built]
    averages = [v for o in averaging for v in moving_averages_of(o)]
    return averages + [v for o in free for v in o._momentums]


def has_stepped(optimizer: keras.Optimizer) -> bool:
    """Whether a step of the optimizer was applied."""
    # By NumPy, since `int` does not accept a value that replicas share.
    return int(ops.convert_to_numpy(iteration_variable(optimizer))) > 0


def schedule_free_in(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Returns the schedule-free optimizers among those that step."""
    cls = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
    return [o for o in innermost_of(optimizer) if isinstance(o, cls)]


def schedule_free_averages_of(
    optimizer: keras.Optimizer,
) -> list[tuple[keras.Variable, Tensor]]:
    """Returns pairs of a trained variable and the result of its training, a tensor."""
    # A variable holds `y = (1 - beta_1) * z + beta_1 * x`, where gradients are taken.
    # They are applied to the slot `z`, and the result `x` is the average of all `z`. It
    # is computed in float32 or wider, as a difference of close numbers.
    averages = []
    for inner in schedule_free_in(optimizer):
        if inner.built and has_stepped(inner):
            beta_1 = float(inner.beta_1)
            for variable, z in zip(variables_of(inner), inner._momentums, strict=True):
                x = (in_float32(variable) - (1 - beta_1) * in_float32(z)) / beta_1
                averages.append((variable, ops.cast(x, variable.dtype)))
    return averages


# --- Own steps ------------------------------------------------------------------------


def as_accumulated(
    optimizer: keras.Optimizer, grads: Grads, variables: Variables
) -> Grads:
    """Returns gradients in the dtypes in which an optimizer may add them up."""
    # Keras's accumulators have the variables' dtypes. TensorFlow adds nothing else.
    accumulates = any(o.gradient_accumulation_steps for o in innermost_of(optimizer))
    # A wrapper does so itself, after it has unscaled them.
    scaler = keras.optimizers.LossScaleOptimizer
    if not accumulates or any(isinstance(o, scaler) for o in chain_of(optimizer)):
        return grads
    pairs = zip(grads, variables, strict=True)
    return [g if g is None else cast(g, v.dtype) for g, v in pairs]


def cast(grad: Tensor, dtype: str) -> Tensor:
    """Returns a gradient, dense or sparse, in a dtype."""
    return backend.map_values(lambda value: ops.cast(value, dtype), grad)


# The gradients must also be finite in the dtype of an optimizer's own step.
_BFLOAT16_MAX = (2 - 2**-7) * 2.0**127
_LARGEST = dict(float16=FLOAT16_MAX, bfloat16=_BFLOAT16_MAX, float32=FLOAT32_MAX)


def dtypes_as_applied(
    optimizer: keras.Optimizer, grads: list[Tensor], variables: Variables
) -> list[str | None]:
    """Returns the narrower dtype to which an optimizer's step casts each gradient."""
    # None is the dtype in which it is unscaled: float32, or its own float64. The result
    # is empty if all are.
    bases = bases_of(optimizer)
    # Keras's optimizers cast, except those that step all variables at once on PyTorch.
    casts = most_accumulation_steps(optimizer) > 0 or any(
        steps_in_dtype_of_variables(o) and not hasattr(o, "_parallel_update_step")
        for o in bases
    )
    # A few pairs, for any number of variables.
    pairs = [(v.dtype, g.dtype) for g, v in zip(grads, variables, strict=True)]
    narrower = {pair: _narrower(*pair, bases, casts) for pair in set(pairs)}
    return [narrower[pair] for pair in pairs] if any(narrower.values()) else []


def _narrower(
    dtype: Any, dtype_of_grad: Any, bases: list[keras.Optimizer], casts: bool
) -> str | None:
    """Returns the dtype to which a step casts a gradient, if it may overflow there."""
    dtype = keras.backend.standardize_dtype(dtype)
    dtype_of_grad = keras.backend.standardize_dtype(dtype_of_grad)
    if not casts and dtype in _LARGEST:
        # It is cast later: in a rule, or when the variable takes the result.
        dtype = "float32"
    limit = math.inf if dtype_of_grad == "float64" else _LARGEST["float32"]
    if _LARGEST.get(dtype, math.inf) >= limit:
        return None
    is_clipped = all(
        0 < (o.clipnorm or o.global_clipnorm or o.clipvalue or 0) <= _LARGEST[dtype]
        and not o.gradient_accumulation_steps
        for o in bases
    )
    return None if is_clipped else dtype


def sums_of(
    optimizer: keras.Optimizer, variables: Variables
) -> list[keras.Variable | None]:
    """Returns the accumulator of each variable's gradient, or None."""
    sums: dict = {}
    for base in bases_of(optimizer):
        # A member of a `MultiOptimizer` without variables is not built.
        if base.built and base.gradient_accumulation_steps:
            keys = map(base._var_key, variables_of(base))
            sums |= zip(keys, accumulators_of(base), strict=True)
    return [sums.get(optimizer._var_key(v)) for v in variables]


def schedule_of(
    optimizer: keras.Optimizer,
) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """Returns the optimizer's learning-rate schedule, None if it has none."""
    rate = getattr(chain_of(optimizer)[-1], "_learning_rate", None)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return rate if is_schedule else None


def count_by(wrapper: keras.Optimizer, inner: keras.Optimizer) -> None:
    """Lets a wrapper without state of its own count its inner optimizer's steps."""
    wrapper._iterations = iteration_variable(inner)


# --- Names and configs ----------------------------------------------------------------


def public_config(config: Any) -> Any:
    """Returns a copy of `config` in which torch-only classes have public names."""
    # Keras writes its private classes into configs, which no other backend can read.
    if isinstance(config, list | tuple):
        return type(config)(public_config(item) for item in config)
    if not isinstance(config, dict):
        return config
    config = {key: public_config(value) for key, value in config.items()}
    if str(config.get("module", "")).startswith(TORCH_OPTIMIZERS):
        config["module"] = "keras.optimizers"
        config["registered_name"] = None
    return config


def config_of(inner_optimizer: keras.Optimizer) -> dict[str, Any]:
    """Returns a wrapped optimizer's config, the same for optimizers made alike."""
    config = public_config(keras.saving.serialize_keras_object(inner_optimizer))
    arguments = config["config"]
    if "name" in arguments:
        class_name = config["class_name"].split(">")[-1]
        arguments["name"] = _without_number(arguments["name"], class_name)
    return config


def name_of(optimizer: keras.Optimizer) -> str:
    """Returns the optimizer's name, the same for optimizers made alike."""
    return _without_number(optimizer.name, public_class(type(optimizer)).__name__)


def _without_number(name: str, class_name: str) -> str:
    """Returns a name without Keras's running number: `sgd` for `sgd_1`."""
    default = to_snake_case(class_name)
    return default if re.fullmatch(rf"{default}_\d+", str(name)) else name


def inner_name_in(store: Any) -> str | None:
    """Returns the name of the inner optimizer in a file of Keras's, else None."""
    path = f"{getattr(store, '_h5_entry_path', '')}/inner_optimizer/vars"
    file = getattr(store, "h5_file", {})
    return file[path].attrs.get("name") if path in file else None
