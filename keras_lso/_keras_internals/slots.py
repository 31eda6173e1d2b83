"""The slots of Keras's optimizers, under the names that tf.keras gave them."""

import keras

from keras_lso._keras_internals.optimizers import index_of, members_of
from keras_lso._keras_internals.variables import flat_path


def slots_of(optimizer):
    """Returns the slots of a built optimizer, lists by the names of tf.keras."""
    if members_of(optimizer):
        return _slots_of_members(optimizer)
    attributes = _slot_attributes(optimizer)
    if attributes is None:
        return _slots_by_name(optimizer)
    found = {name: getattr(optimizer, a, None) for name, a in attributes.items()}
    return {name: list(variables) for name, variables in found.items() if variables}


def _slots_of_members(optimizer):
    """Returns the slots of a `MultiOptimizer`, from the member of each variable."""
    found: dict[str, list] = {}
    for member in members_of(optimizer):
        trained = member._trainable_variables
        for name, column in slots_of(member).items():
            whole = found.setdefault(name, [None] * len(optimizer._trainable_variables))
            for variable, slot in zip(trained, column, strict=True):
                whole[index_of(optimizer, variable)] = slot
    return found


def _slot_attributes(optimizer):
    """Returns the dict of slot names to attributes, None if they are not known."""
    for cls in type(optimizer).__mro__:
        attributes = _TF_KERAS_SLOTS.get(cls, vars(cls).get("_tf_keras_slots"))
        if attributes is not None:
            return attributes
    return None


def _slots_in_order(optimizer):
    """Returns the slots in the order in which tf.keras created them: by name."""
    if _slot_attributes(optimizer) is None:
        return []
    columns = slots_of(optimizer).values()
    if isinstance(optimizer, keras.optimizers.Ftrl):
        columns = zip(*columns, strict=True)
    in_order = [slot for column in columns for slot in column if slot is not None]
    if isinstance(optimizer, keras.optimizers.Nadam) and in_order:
        in_order.insert(0, optimizer._u_product)
    return in_order


def _slots_by_name(optimizer):
    """Returns the slots that are named `<path of the variable>_<slot>`."""
    trained = optimizer._trainable_variables
    found: dict[str, list] = {}
    prefixes = [flat_path(v) + "_" for v in trained]
    for slot in optimizer.variables:
        # The longest prefix: `w_1_momentum` is the slot of `w_1`, not of `w`.
        prefix = max(filter(slot.name.startswith, prefixes), key=len, default=None)
        if prefix is None:
            continue
        name = slot.name.removeprefix(prefix)
        column = found.setdefault(name, [None] * len(trained))
        # Variables may have the same path. Slots come in their order.
        for i, of_variable in enumerate(prefixes):
            if of_variable == prefix and column[i] is None:
                column[i] = slot
                break
    return found


_ADAM_SLOTS = {"m": "_momentums", "v": "_velocities", "vhat": "_velocity_hats"}
# From a slot's name in tf.keras to the attribute in which Keras 3 keeps it. For the
# optimizers of this package, the class has them in `_tf_keras_slots`.
_TF_KERAS_SLOTS = {
    keras.optimizers.SGD: {"momentum": "momentums"},
    keras.optimizers.Adam: _ADAM_SLOTS,
    keras.optimizers.RMSprop: {
        "rms": "_velocities",
        "momentum": "_momentums",
        "mg": "_average_gradients",
    },
    keras.optimizers.Adagrad: {"accumulator": "_accumulators"},
    keras.optimizers.Adadelta: {
        "accum_grad": "_accumulated_grads",
        "accum_var": "_accumulated_delta_vars",
    },
    keras.optimizers.Adamax: {"m": "_m", "v": "_u"},
    keras.optimizers.Nadam: _ADAM_SLOTS,
    keras.optimizers.Ftrl: {"accumulator": "_accumulators", "linear": "_linears"},
    keras.optimizers.Lion: {"m": "_momentums"},
}


def weights_of(optimizer):
    """Returns the step count and the slots, as tf.keras 2.0 to 2.10 ordered them."""
    rates = {
        id(getattr(o, "_learning_rate", None))
        for o in (optimizer, *members_of(optimizer))
    }
    kept = [v for v in optimizer.variables if id(v) not in rates]
    in_order = _slots_in_order(optimizer)
    of_slots = {id(v) for v in in_order}
    # Variables that Keras creates before the slots (averages, accumulators) stay there.
    first = next((i for i, v in enumerate(kept) if id(v) in of_slots), len(kept))
    others = [v for v in kept[first:] if id(v) not in of_slots]
    return kept[:first] + in_order + others
