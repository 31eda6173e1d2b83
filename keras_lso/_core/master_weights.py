"""Masters, which are trained in place of 16-bit variables, and narrow slots."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops
from numpy.typing import NDArray

from keras_lso._backend import backend
from keras_lso._backend.codecs import CODECS, PLAIN, SLOT_CODECS, Codec
from keras_lso._backend.leaves import Leaf, codec_of_slot
from keras_lso._backend.tensors import NARROW, Tensor, Variables
from keras_lso._core.checks import warn
from keras_lso._keras_internals.distribution import has_whole_blocks
from keras_lso._keras_internals.optimizers import (
    index_of,
    iteration_variable,
    leave_trained_out_of_checkpoints,
    optimizers_in,
    steps_in_dtype_of_variables,
)
from keras_lso._keras_internals.rules import fitting_rule
from keras_lso._keras_internals.variables import (
    copy_of,
    is_overwritten,
    memory_for,
    release,
    zeros_of,
)


def can_have_master(variable: keras.Variable) -> bool:
    """Whether a variable has a master, unless `master_weights` is False."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return dtype in NARROW and not is_overwritten(variable)


# Half of the smallest float16. It rounds to the even neighbour, 0.
_ROUNDED_TO_0 = 2.0**-25


class MasterWeights:
    """The masters of a model's variables; keeps masters and variables in step."""

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        master_weights: str | bool,
        inner_optimizer: keras.Optimizer,
    ):
        self._codec = codec = _codec_of(master_weights, inner_optimizer, variables)
        # Float32 masters, placeholders for 16-bit weights, and the other variables.
        self.trained = []
        # The 16-bit weights, by the `id` of the variable that replaces each.
        self._leaves: dict[int, Leaf] = {}
        for position, trained in enumerate(variables):
            if codec is not PLAIN and can_have_master(trained):
                weight, make = trained, copy_of if codec.aux_is_master else zeros_of
                aux = None if codec.aux_dtype is None else make(weight, codec.aux_dtype)
                trained = aux if codec.aux_is_master else copy_of(weight, "float32")
                self._leaves[id(trained)] = Leaf(weight, codec, aux, position)
            self.trained.append(trained)
        # The float32 variables that are trained in place of weights.
        self.masters = [t for t in self.trained if id(t) in self._leaves]
        stored = [leaf.aux for leaf in self._leaves.values()]
        self.variables = [aux for aux in stored if aux is not None]
        # What files hold of slots in 8 bits, by the `id` of the slot.
        self._entries: dict[int, SlotEntry] = {}
        counts = codec.is_random or not codec.aux_is_master
        self.iterations = None
        if self._leaves and counts:
            self.iterations = iteration_variable(inner_optimizer)

    @property
    def placeholders(self) -> Variables:
        """Those of `masters` whose values a codec computes in each step."""
        return [] if self._codec.aux_is_master else self.masters

    def release(self, inner_optimizer: keras.Optimizer) -> None:
        """Frees the memory of placeholders, once the optimizer has been built."""
        if self.placeholders:
            release(self.placeholders)
            # Placeholders hold no values that could be restored.
            leave_trained_out_of_checkpoints(inner_optimizer)

    def warn_of_epsilons(self, inner_optimizer: keras.Optimizer) -> None:
        """Warns if an epsilon that an optimizer divides by is 0 in float16."""
        if not any(v.dtype == "float16" for v in self.trained):
            return
        for optimizer in optimizers_in(inner_optimizer):
            lost = {
                name: value
                for name, value in vars(optimizer).items()
                if name.startswith("epsilon")
                and isinstance(value, float)
                and 0 < value <= _ROUNDED_TO_0
            }
            if lost and steps_in_dtype_of_variables(optimizer):
                given = ", ".join(f"`{name}={value}`" for name, value in lost.items())
                # A normal number of float16. Where the square of a gradient is 0, its
                # moment is divided by the epsilon.
                better = ", ".join(f"`{name}=1e-4`" for name in lost)
                warn(
                    f"{type(optimizer).__name__} trains float16 variables without "
                    f"float32 master weights, and its {given} is 0 in float16: a "
                    f"weight whose gradient is 0 would become NaN. Write {better}, or "
                    "leave out `master_weights=False`."
                )

    def trained_of(self, optimizer: keras.Optimizer, variables: Variables) -> Variables:
        """Returns the variables that the optimizer trains in place of `variables`."""
        if not self.masters:
            return list(variables)
        return [self.trained[index_of(optimizer, v)] for v in variables]

    def leaves_of(self, trained: Variables) -> list[Leaf]:
        """Returns the weight, a `Leaf`, that each of `trained` is, or replaces."""
        return [self._leaves.get(id(v)) or Leaf(v) for v in trained]

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Returns a context that copies values assigned to `masters` into the model."""
        # A copy: on PyTorch a step changes the variable's own tensor.
        iterations = self.iterations
        if iterations is not None:
            iterations = ops.copy(iterations)
        with memory_for(self.placeholders):
            for variable in self.masters:
                variable.assign(self.saved(variable))
            yield
            for variable in self.masters:
                leaf = self._leaves[id(variable)]
                master = ops.convert_to_tensor(variable)
                for target, value in leaf.encoded(backend, master, iterations):
                    if target is not variable:
                        # The user's aggregation may be a sum of all replicas' values.
                        backend.assign_here(target, value)

    # --- Slots in 8 bits ------------------------------------------------------------

    def keep_scales(self, slots: Variables) -> None:
        """Makes the scales of those slots whose codec has any."""
        for slot in slots:
            codec = codec_of_slot(slot)
            if codec.aux_dtype is None:
                continue
            scales = zeros_of(slot, codec.aux_dtype, codec.block, "_scales")
            self.variables.append(scales)
            entry = SlotEntry(slot.path, slot.name, tuple(slot.shape))
            self._entries[id(slot)] = entry
            self._leaves[id(entry)] = Leaf(slot, codec, scales)

    @property
    def scales(self) -> Variables:
        """The scales of all slots in 8 bits."""
        return [self._leaves[id(entry)].aux for entry in self._entries.values()]

    def scales_of(self, column: Variables) -> Variables:
        """Returns the scales of slots, None where there are none."""
        entries = [self._entries.get(id(slot)) for slot in column]
        return [e and self._leaves[id(e)].aux for e in entries]

    # --- Files ----------------------------------------------------------------------

    def in_file(self, variables: Variables) -> list[Any]:
        """Returns variables as a file has them, with a `SlotEntry` for some slots."""
        return [self._entries.get(id(v), v) for v in variables]

    def is_coded(self, variable: Any) -> bool:
        """Whether it is one of `masters` or a `SlotEntry`: see `saved` and `load`."""
        return id(variable) in self._leaves

    def saved(self, variable: Any) -> Tensor:
        """Returns the float32 number of a master or a slot, as a file holds it."""
        return self._leaves[id(variable)].read(backend)

    def load(self, variable: Any, value: NDArray[Any]) -> None:
        """Loads the number of a master or a slot from a file, a float32 array."""
        leaf, number = self._leaves[id(variable)], ops.convert_to_tensor(value)
        if isinstance(variable, SlotEntry):
            for target, encoded in leaf.encoded(backend, number, None):
                target.assign(encoded)
        elif leaf.aux is not None:
            weight = ops.convert_to_tensor(leaf.variable)
            leaf.aux.assign(leaf.codec.aux_for(backend, weight, number))

    def restart(self) -> None:
        """Restarts from the weights, for a file that has no masters."""
        # Masters in float32 do so automatically.
        for master in self.placeholders:
            aux = self._leaves[id(master)].aux
            if aux is not None:
                aux.assign(ops.zeros_like(ops.convert_to_tensor(aux)))


class SlotEntry(NamedTuple):
    """What a file holds of a slot in 8 bits, with the attributes of a variable."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"


def _codec_of(
    master_weights: str | bool,
    inner_optimizer: keras.Optimizer,
    variables: Sequence[keras.Variable],
) -> Codec:
    """Returns the codec of 16-bit weights."""
    if master_weights is False:
        return PLAIN
    # See docs/benchmarks.md for the costs of the kinds.
    name = "float32" if master_weights in ("auto", True) else str(master_weights)
    codec = CODECS[name]
    # If placeholders cannot give memory back, an optimizer that steps itself trains
    # float32 masters.
    lends_memory = codec.aux_is_master or backend.LENDS_MEMORY
    is_fused = fitting_rule(inner_optimizer, variables)
    return codec if lends_memory or is_fused else CODECS["float32"]


# --- Slots in 16 or 8 bits, which a step rounds stochastically: `slot_dtype` ----------


# In elements. Smaller tensors do not count, and may be scales of a layer, or biases.
_SMALLEST_IN_INT8 = 2**12


def dtype_of_slot(slot_dtype: str, variable: keras.Variable, name: str | None) -> str:
    """Returns the dtype of the slot with a name for a trained variable."""
    block, shape = SLOT_CODECS["int8"].block, tuple(variable.shape)
    if (
        slot_dtype != "int8"
        or len(shape) < 2
        or math.prod(shape) < _SMALLEST_IN_INT8
        or shape[-1] % block
        or not has_whole_blocks(variable, block)
    ):
        return "bfloat16"
    return "int8" if name == "momentum" else "uint8"


def as_rules_take(grads: list) -> list:
    """Returns gradients as every rule takes them: dense, in at most 32 bits."""
    return [g if g is None else _in_32_bits(backend.to_dense(g)) for g in grads]


def _in_32_bits(grad: Tensor) -> Tensor:
    """Returns a gradient in float32 in place of float64."""
    is_double = keras.backend.standardize_dtype(grad.dtype) == "float64"
    return ops.cast(grad, "float32") if is_double else grad
