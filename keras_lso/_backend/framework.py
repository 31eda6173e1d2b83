"""The primitives that a step needs from a framework, with their defaults.

To add a backend, subclass `Framework`, override the primitives that the framework does
better, and name the class in `keras_lso/_backend/__init__.py`. The defaults suffice to
load a model, as on NumPy and OpenVINO, but not to train it: see `host.py`. A step calls
`measure`, then `update` if there is a rule, else `run_if`.
"""

import contextlib
import math
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import keras
from keras import ops

from keras_lso._backend import tensors, xp
from keras_lso._backend.codecs import PLAIN, units_of
from keras_lso._backend.host import Host
from keras_lso._backend.leaves import Leaves
from keras_lso._backend.replicas import Replicas
from keras_lso._backend.rule import Rule, RuleNorms, given, rule_norms
from keras_lso._backend.tensors import (
    FunctionT,
    Grads,
    Number,
    StepFunction,
    Storage,
    Tensor,
    Variables,
)

# "generic" means no kernels, which is the reference of the tests. On PyTorch, "compile"
# also compiles the formulas of masters (see `torch/compiled.py`), and "graph"
# captures steps on a GPU (see `torch/captured.py`).
KERNELS = os.environ.get("KERAS_LSO_KERNELS", "framework")
if KERNELS not in ("framework", "compile", "graph", "generic"):
    raise ValueError(
        "The environment variable KERAS_LSO_KERNELS must be 'framework', 'compile', "
        f"'graph' or 'generic'. Received: KERAS_LSO_KERNELS={KERNELS!r}"
    )


# What a backend without kernels takes from `Framework`.
KERNELS_OF_BACKENDS = (
    *("UPDATES_IN_PLACE", "chunked", "clipped"),
    *("measure", "update", "takes_update", "synchronise_masters", "clear"),
    *("move_scale", "count_step", "append_row"),
)


class MeasureOptions(NamedTuple):
    """What `Framework.measure` computes, of which gradients."""

    # By which the step multiplies the gradients, a float32 scalar: above 1 a finite
    # gradient may overflow.
    inv_scale: Number = 1.0
    # Times as much must not overflow either: 2 in a sum of two, `2**64` in a square.
    headroom: float = 1.0
    # Whether all replicas have the same gradients, so that nothing is exchanged.
    are_alike: bool = False
    # Whether to compute the results of these names, which decide nothing.
    amax: bool = False
    norm: bool = False
    # Whether the step clips by the norm, which is returned: if its square overflows,
    # the gradients count as not finite, since Keras would turn them into NaN.
    clips: bool = False
    # The rules that take norms of the `leaves`, or None.
    rules: list[Rule] | None = None
    leaves: Leaves | None = None

    @property
    def factor(self) -> Tensor:
        """The factor times which finite gradients must be finite."""
        return self.inv_scale * self.headroom


CHECK_ONLY = MeasureOptions()


class GradientStats(NamedTuple):
    """The results of one read of the gradients, as device tensors."""

    # Whether they are finite, also once unscaled: the same on all replicas and shards.
    finite: Tensor
    # Of the unscaled gradients; None: the update computes them.
    rule_norms: RuleNorms | None = None
    # The largest magnitude of the scaled gradients.
    amax: Tensor = None
    # The L2 norm of all unscaled gradients, even where its square is not in float32.
    norm: Tensor = None


class Streaks(NamedTuple):
    """The counters of `Framework.count_step` that restart, in their vector's order."""

    # The steps that were skipped in a row.
    skipped: Tensor
    # Those of them that overflowed at the lowest scale.
    at_lowest: Tensor
    # The overflows since the scale was last updated. Without it, an overflow of a loss
    # that is applied with `update_scale=False` would never lower the scale.
    since_update: Tensor


SINCE_UPDATE = Streaks._fields.index("since_update")
# Assigns a variable that is not scalar, as the optimizer does it.
Assign: TypeAlias = Callable[[keras.Variable, Tensor], None]


class Framework:
    """The primitives in `keras.ops`. Lists of tensors have one for each variable."""

    # The functions of tensors that rules and steps call.
    xp = xp
    replicas = Replicas()
    # The functions that no step calls.
    host = Host()

    # Whether `update` takes the tensors that variables hold, and changes them.
    UPDATES_IN_PLACE = False
    # Whether the steps of Keras's optimizers change the tensors that variables hold.
    STEPS_WRITE_TENSORS = False
    # Whether placeholders give back the memory that `memory_for` lends to them.
    LENDS_MEMORY = True

    # --- A step -------------------------------------------------------------------
    def measure(
        self, grads: list[Tensor], options: MeasureOptions = CHECK_ONLY
    ) -> GradientStats:
        """Reads gradients once: dense or sparse tensors, without None."""
        dense = [self.to_dense(g) for g in grads]
        # An inf or a NaN stays one, whatever it is multiplied by.
        checked = [tensors.times(v, options.inv_scale) for v in self.packed(dense)]
        finite = [ops.all(ops.isfinite(v * options.headroom)) for v in checked]
        overflows = ops.logical_not(ops.all(ops.stack(finite)))
        over_shards = self.replicas.over_shards
        finite = over_shards(ops.cast(overflows, "float32")) == 0
        amax: Tensor = None
        norm: Tensor = None
        norms = None
        if options.amax:
            amax = over_shards(tensors.amax_of(dense), maximum=True)
        if options.norm or options.clips:
            norm = tensors.joint_norm(dense, over_shards) * options.inv_scale
        if options.clips:
            is_squared = ops.isfinite(ops.square(norm * options.headroom))
            finite = ops.logical_and(finite, is_squared)
        if options.rules and options.leaves:
            unscaled = [tensors.times(v, options.inv_scale) for v in dense]
            norms = rule_norms(self, options.rules, unscaled, options.leaves)
        return GradientStats(finite, norms, amax, norm)

    def packed(self, values: list[Tensor]) -> list[Tensor]:
        """Returns tensors with the same elements, fewer if that is faster to read."""
        return values

    def chunked(self, groups: list[Hashable], leaves: Leaves) -> Any:
        """Returns which `Leaves` are updated together, or None.

        Variables of one of the `groups` have the same rule. The result depends on the
        sizes and the device of the tensors alone.
        """
        return None

    def takes_update(
        self,
        rule: type[Rule],
        leaves: Leaves,
        gradients: list[Tensor],
        is_needed: bool = False,
    ) -> bool:
        """Whether `update` takes rules of this class, faster than the optimizer.

        Or at any speed if `is_needed`, since the optimizer itself cannot round slots.
        """
        return is_needed and leaves.are_float32

    def update(
        self,
        rules: list[Rule],
        leaves: Leaves,
        grads: list[Tensor],
        factor: Tensor = None,
        flag: Tensor = None,
        norms: RuleNorms | None = None,
    ) -> None:
        """Unscales, skips and updates the variables of the `Leaves` in one pass.

        `grads` are dense, and not written; `factor` multiplies them. If `flag`, a
        boolean scalar, is False, no bit changes. The `norms` that the rules take are
        computed here by default.
        """

        def select(new: Tensor, old: Tensor) -> Tensor:
            return new if flag is None else ops.where(flag, new, old)

        nothing, iterations = [None] * len(rules), leaves.iterations
        if iterations is not None:
            iterations = ops.convert_to_tensor(iterations)
        columns = rules, leaves.rows, grads, norms or nothing
        for rule, row, grad, of_rule in zip(*columns, strict=True):
            grad = ops.cast(grad, "float32")
            if factor is not None:
                grad = grad * factor
            old = [leaf.read(self) for leaf in row]
            norms_of = None
            if rule.takes_norms:
                norms_of = self.norms if of_rule is None else given(of_rule)
            new = rule(self.xp, select, grad, *old, norms=norms_of)
            for leaf, value in zip(row, new, strict=True):
                for variable, encoded in leaf.encoded(self, value, iterations):
                    if leaf.codec is not PLAIN:
                        # Encoding the old value again may change bits.
                        encoded = select(encoded, self.value_of(variable))
                    self.assign_here(variable, encoded)

    def value_of(self, variable: keras.Variable) -> Tensor:
        """Returns the tensor that a variable holds."""
        return ops.convert_to_tensor(variable)

    def assign_here(self, variable: keras.Variable, value: Tensor) -> None:
        """Assigns a tensor, on this replica alone if each replica has a copy."""
        variable.assign(value)

    def synchronise_masters(self, leaves: Leaves, flag: Tensor) -> None:
        """Re-initialises masters whose weights were assigned externally, if `flag`."""
        # `update` does the same with the masters that it updates.
        for leaf in leaves.with_masters:
            old = self.value_of(leaf.aux)
            self.assign_here(leaf.aux, ops.where(flag, leaf.read(self), old))

    def run_masked(self, flag: Tensor, step: Callable[[], None]) -> None:
        """Runs `step()`, which changes nothing unless `flag`, a boolean tensor."""
        if self.value_if_on_host(flag) is not False:
            step()

    def clear(self, variables: list[Storage], flag: Tensor) -> None:
        """Sets `Leaves.variables`, whose values are finite, to zero if `flag`."""
        for v in variables:
            old = self.value_of(v)
            self.assign_here(v, ops.where(flag, ops.zeros_like(old), old))

    def copies_of(self, variables: list[Storage]) -> list[Tensor]:
        """Returns copies of `live_storage_of` variables, unaffected by later writes."""
        return [ops.copy(self.value_of(v)) for v in variables]

    def restore(
        self, variables: list[Storage], values: list[Tensor], flag: Tensor
    ) -> None:
        """Assigns the results of `copies_of` to variables if `flag`, else nothing."""

        def restore() -> None:
            for v, value in zip(variables, values, strict=True):
                self.assign_here(v, ops.where(flag, value, self.value_of(v)))

        self.run_masked(flag, restore)

    def run_if(
        self, finite: Tensor, step: StepFunction, grads: Grads, state: Variables
    ) -> None:
        """Runs `step(grads)` if `finite`, a boolean scalar.

        Otherwise it leaves the variables in `state` as they were: all that `step` may
        write.
        """
        before = self.copies_of(state)
        step(grads)
        self.restore(state, before, ops.logical_not(finite))

    def value_if_on_host(self, tensor: Tensor) -> Any:
        """Returns the number in a scalar tensor if the host has it, else None."""
        # None: reading it would synchronise, or a step is being traced.
        return None

    # --- The scalars of a step ----------------------------------------------------
    def move_scale(
        self,
        scale: Storage,
        good_steps: Storage,
        finite: Tensor,
        drops: Tensor | None,
        growth: Number,
        backoff: Number,
        period: Number,
        bounds: tuple[float, float],
    ) -> None:
        """Updates a dynamic loss scale, and its count of finite steps since it changed.

        After `period` finite steps the scale is multiplied by `growth`. It is
        multiplied by `backoff` where `drops`, by default at every overflow, and stays
        within `bounds`.
        """
        old = ops.convert_to_tensor(scale)
        counted = ops.convert_to_tensor(good_steps) + 1
        overflows = ops.logical_not(finite)
        grows = ops.logical_and(finite, counted >= period)
        dropped = ops.where(overflows if drops is None else drops, old * backoff, old)
        restarts = ops.logical_or(grows, overflows)
        good_steps.assign(ops.where(restarts, ops.zeros_like(counted), counted))
        scale.assign(ops.clip(ops.where(grows, old * growth, dropped), *bounds))

    def count_step(
        self,
        skipped: Storage,
        applied: Storage | None,
        streaks: Storage,
        finite: Tensor,
        applies: Tensor,
        scales: tuple[Tensor, float],
        update_scale: bool,
        assign: Assign,
    ) -> Tensor:
        """Counts a step; returns whether none overflowed since the scale was updated.

        `applied` is None if the step was counted already. `streaks` is a vector: see
        `Streaks`. `applies` tells whether the step is applied: if not, although the
        gradients are `finite`, the scale stays. `scales` are the loss scale and its
        lower bound; `update_scale` tells whether this step updates it.
        """
        old = ops.convert_to_tensor(streaks)
        missed = ops.cast(ops.logical_not(applies), old.dtype)
        overflows = ops.cast(ops.logical_not(finite), old.dtype)
        total = ops.convert_to_tensor(skipped)
        skipped.assign(total + ops.cast(missed, total.dtype))
        if applied is not None:
            count = ops.convert_to_tensor(applied)
            applied.assign(count + ops.cast(applies, count.dtype))
        scale, lowest = scales
        at_lowest = overflows * ops.cast(scale <= lowest, old.dtype)
        counted = old + ops.stack(Streaks(missed, overflows, overflows))
        # 0 where the scale is updated, and the count restarts.
        continues = missed - overflows if update_scale else ops.ones_like(missed)
        assign(streaks, counted * ops.stack(Streaks(missed, at_lowest, continues)))
        return counted[SINCE_UPDATE] == 0

    def append_row(
        self, ring: Storage, count: Storage, row: list[Number], assign: Assign
    ) -> None:
        """Writes scalars as the next row of a ring buffer, and counts it."""
        rows, number = ops.convert_to_tensor(ring), ops.convert_to_tensor(count)
        length = ring.shape[0]
        places = ops.arange(length, dtype=number.dtype)
        is_next = ops.expand_dims(places == number % length, 1)
        row = ops.stack([ops.cast(value, "float32") for value in row])
        assign(ring, ops.where(is_next, row, rows))
        count.assign(number + 1)

    # --- Norms and masters --------------------------------------------------------
    def norms(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Returns the L2 norms of dense tensors, with all their shards, as a tuple."""
        # In their dtypes: see `rule.py`.
        over_shards = self.replicas.over_shards
        sums = [over_shards(ops.sum(ops.square(v))) for v in values]
        return tuple(map(ops.sqrt, sums))

    def unscaled(self, grads: list[Tensor], inv_scale: Number) -> list[Tensor]:
        """Returns gradients times `inv_scale`, in float32 or wider."""
        # Not a division, which takes twice as long in XLA's Adam. Both give the same
        # for powers of two, which loss scales are.
        return [
            self.map_values(lambda v: tensors.times(v, inv_scale), g) for g in grads
        ]

    def clipped(
        self,
        grads: list[Tensor],
        inv_scale: Number,
        norm: Number = None,
        value: Number = None,
    ) -> list[Tensor]:
        """Returns dense gradients times `inv_scale`, each clipped as in Keras.

        `norm` is `clipnorm`, and `value` is `clipvalue`, used without a `norm`.
        """
        unscaled = [tensors.times(g, inv_scale) for g in grads]
        if not norm:
            return [ops.clip(g, -value, value) for g in unscaled]
        norms = self.l2_norms(unscaled)
        return [
            g * (norm / ops.maximum(l2_norm, norm))
            for g, l2_norm in zip(unscaled, norms, strict=True)
        ]

    def l2_norms(self, values: list[Tensor]) -> list[Tensor]:
        """Returns the L2 norms of tensors, dense or sparse, in float32 or wider."""
        wide = [tensors.in_float32(self.elements_of(v)) for v in values]
        return list(self.norms(*wide))

    def rounded(self, master: Tensor, dtype: Any) -> Tensor:
        """Rounds a tensor to a float dtype; float16 saturates at its largest number."""
        dtype = keras.backend.standardize_dtype(dtype)
        if dtype == "float16":
            # Not `ops.clip`, which on PyTorch copies its limits to the device.
            limits = -tensors.FLOAT16_MAX, tensors.FLOAT16_MAX
            master = self.xp.clip(master, *limits)
        return ops.cast(master, dtype)

    def in_float16(self, numbers: Tensor) -> Tensor:
        """Returns float32 numbers as `rounded` to float16, but in float32."""
        # Not a cast there and back, which XLA may remove.
        numbers = ops.clip(numbers, -tensors.FLOAT16_MAX, tensors.FLOAT16_MAX)
        unit, inverse = units_of(self, numbers)
        return ops.round(numbers * inverse) * unit

    def bitcast(self, values: Tensor, dtype: str) -> Tensor:
        """Returns the bits of float32 numbers as int32, or the reverse."""
        return ops.convert_to_tensor(ops.convert_to_numpy(values).view(dtype))

    def computed_once(self, values: Tensor, count: Tensor) -> Tensor:
        """Returns values, which are computed once although two results use them.

        A compiler may compute them for each result, with other roundings. `count` is an
        integer scalar tensor that is not negative.
        """
        return values

    def flat_indices(self, value: Tensor) -> Tensor:
        """Returns the places of the elements in the whole tensor, in C order, int32."""
        size = math.prod(value.shape)
        return ops.reshape(ops.arange(size, dtype="int32"), value.shape)

    def memory_for(self, variables: Variables) -> AbstractContextManager:
        """Returns a context in which placeholders for 16-bit weights hold values.

        A placeholder is a float32 variable, given to `without_memory`, that an
        optimizer was built for. A value that is assigned to it lasts until the end of
        the context.
        """
        return contextlib.nullcontext()

    def without_memory(self, values: list) -> list:
        """Returns values for placeholders, which save the memory of `values`."""
        return values

    # --- Gradients as tensors -----------------------------------------------------
    def as_gradients(self, values: Sequence) -> Grads:
        """Returns tensors, arrays or lists of numbers as tensors of float dtypes.

        None stays. Integers become float32, as in Keras on TensorFlow and JAX. Complex
        values raise a `ValueError`, since a cast would drop the imaginary part.
        """
        return [tensors.as_real(value, self.map_values) for value in values]

    def memory_of(self, value: Tensor) -> tuple[Hashable, int | None]:
        """Returns a hashable that is equal for tensors that share their elements.

        And a version, which changes with each write to them; None without writes.
        """
        return id(value), None

    def prepare_gradients(self, grads: Any) -> Grads:
        """Returns gradients, or None, in the form that the steps of optimizers take."""
        return grads

    def detached_copy(self, value: Tensor) -> Tensor:
        """Returns a copy of a tensor, on PyTorch one without its history."""
        return ops.copy(value)

    def check_stateless_arguments(self, tensors: list) -> None:
        """Raises a `ValueError` if `stateless_apply` cannot take these tensors."""
        # On PyTorch steps write in place, and would lose their autograd history; on
        # TensorFlow Keras has no such method. `tensors` may hold None.
        return

    def map_values(self, fn: Callable[[Tensor], Tensor], grad: Tensor) -> Tensor:
        """Applies the elementwise `fn` to the values of a dense or sparse gradient."""
        return fn(grad)

    def to_dense(self, grad: Tensor) -> Tensor:
        """Returns the gradient as a dense tensor; rows of equal index are summed."""
        # PyTorch takes a sparse gradient as the second operand. There `ops.add` of
        # Keras 3.16 narrows float64, which the operator does not.
        return ops.zeros(ops.shape(grad), dtype=grad.dtype) + grad

    def elements_of(self, grad: Tensor) -> Tensor:
        """Returns the elements of a gradient; of a sparse one, without the zeros."""
        return self.to_dense(grad)

    def scalar(self, value: Number, dtype: str) -> Tensor:
        """Returns a number, or a scalar tensor, as a tensor of this dtype."""
        return ops.convert_to_tensor(value, dtype=dtype)

    def without_host(self, function: Callable[[], Any], near: Tensor) -> Any:
        """Calls a function of Python numbers and of device tensors, such as a schedule.

        On PyTorch the call does not synchronise the device of `near` with the host. The
        function has no side effects, returns a scalar tensor, and may be called several
        times.
        """
        return function()

    # --- Variables and compiled functions -----------------------------------------
    def do_not_convert(self, function: FunctionT) -> FunctionT:
        """Decorates an entry to a step, so that it computes what its source says."""
        # On TensorFlow, AutoGraph rewrites neither its source nor that of its callees.
        # On PyTorch, `torch.autocast` changes no dtype in it.
        return function

    def in_graphs(self, method: FunctionT) -> FunctionT:
        """Decorates a method of optimizers that is one node of a traced graph."""
        # On PyTorch, under `torch.compile`: `torch/graphs.py`.
        return method

    def traced_step(
        self,
        optimizer: Any,
        trained: Variables,
        owners: list,
        storage_of: Callable[[Variables], list[Storage]],
    ) -> Any:
        """Returns what `in_graphs` calls in graphs, the attribute `_traced_step`."""
        return None

    def captured_steps(self) -> Any:
        """Returns what takes equal steps of an optimizer in one call; None without.

        It is called with these arguments in place of `take(update)`:

        - `update`: a step that was begun, a `RuleStep`.
        - `facts`: a tuple of what `take` depends on, besides
        - `owners`, the objects whose attributes it reads, and
        - `state`, the storage of the optimizer's variables.
        - `take`: the function that takes the step.
        """
        return None

    def is_variable(self, value: Any) -> bool:
        """Whether `value` is a variable that can be trained."""
        return isinstance(value, keras.Variable)
