"""`SpikeGuard`: decides which steps are outliers, by a `SpikeHistory` of norms."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Annotated, Any, Self

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor, Variables
from keras_lso._core.checks import check_buffer, check_int, refusal
from keras_lso._core.fields import Positive, check_fields, registered
from keras_lso._keras_internals.optimizers import (
    chain_of,
    changes_gradients,
    members_of,
    most_accumulation_steps,
    track_variable,
)
from keras_lso._keras_internals.variables import (
    is_overwritten,
    read,
    storage_of,
    zeros_of,
)

if TYPE_CHECKING:
    from keras_lso.loss_scale_optimizer import LossScaleOptimizer

_Several = Annotated[int, functools.partial(check_int, at_least=2)]
_Window = Annotated[int, functools.partial(check_buffer, at_least=2)]
# XLA multiplies by an inverse, which must not be subnormal.
_LARGEST = 2.0**120
# The share of the mean by which equal norms may differ.
_ROUNDING = 2.0**-18


@registered("SpikeGuard")
@dataclasses.dataclass(unsafe_hash=True)
class SpikeGuard:
    """Decides which steps are outliers, by the norm of their gradients.

    An optimizer with a spike guard skips an outlier as it skips an overflow: nothing
    changes, bit for bit. A corrupt or unsuitable batch then does not undo what the
    model has learned.

    ```python
    limit = mean(norms) + threshold * std(norms)    # of the last `window` norms
    if finite and (norm > limit or norm > max_norm):
        skip()                                      # The loss scale stays as it is.
        norms.append(min(norm, limit))
    elif finite:
        apply()
        norms.append(norm)
    ```

    The norm is the joint norm of all unscaled gradients, over all replicas, processes
    and shards, as in `global_clipnorm`. With `gradient_accumulation_steps` it is the
    norm of a window's mean gradient, and the whole window is skipped. Only averages of
    `use_ema` and moving statistics stay as its earlier micro-batches have left them.
    Around `LARC`, which rescales each micro-batch, the guard then adds up the gradients
    itself, in one more float32 variable for each weight.

    An outlier enters the history as the limit that it exceeded. A single outlier
    therefore hardly moves the limit, but the limit rises when the level of the norms
    has changed permanently. After `window` outliers in a row, the next step is applied.

    A spike does not lower the loss scale, since a lower scale would not make the
    gradients smaller. It does not count as a good step either, since nothing was
    learned at that scale.

    Args:
        threshold: Above 0. The number of standard deviations by which a norm may exceed
            the mean of the history. Defaults to `6.0`.
        window: 2 to `2**20`. The number of norms in the history. Only finite steps
            enter it. Defaults to `128`.
        warmup: 2 or more. The number of norms that the history needs before it judges
            a step; `window` if that is less. Defaults to `64`.
        max_norm: Above 0. A larger norm is an outlier whatever the history is, from
            the first step on, and for any number of steps. Defaults to `None`: no such
            limit.

    Example:

    >>> import keras, keras_lso
    >>> guard = keras_lso.SpikeGuard(threshold=3.0, window=4, warmup=2)
    >>> optimizer = keras_lso.GuardedOptimizer(
    ...     keras.optimizers.SGD(1.0), spike_guard=guard
    ... )
    >>> w = keras.Variable([0.0])
    >>> for gradient in [1.0, 1.5, 100.0, 1.0]:
    ...     optimizer.apply([keras.ops.array([gradient])], [w])
    >>> print(w.numpy(), int(optimizer.skipped_spikes))
    [-3.5] 1

    References:

    - [OLMo-core's `SkipStepOptimizer`](
        https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/optim)
    - [llm.c, issue 711](https://github.com/karpathy/llm.c/issues/711)
    """

    threshold: Positive = 6.0
    window: _Window = 128
    warmup: _Several = 64
    max_norm: Positive | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        check_fields(self)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as a dict."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates a guard from the return value of `get_config`."""
        return cls(**config)


def check_guard(value: Any) -> SpikeGuard | None:
    """Returns a `SpikeGuard`, a copy from its config dict, or None."""
    if isinstance(value, dict):
        value = keras.saving.deserialize_keras_object(value)
    # A subclass would be ignored: the rule is not in its methods.
    if value is None or type(value) is SpikeGuard:
        return value
    raise refusal(
        "spike_guard",
        value,
        "be a `keras_lso.SpikeGuard` itself, such as "
        "`keras_lso.SpikeGuard(threshold=6.0)`, or None",
        TypeError,
    )


class SpikeHistory:
    """The last norms of an optimizer's gradients, and the number of outliers."""

    def __init__(self, optimizer: "LossScaleOptimizer", guard: SpikeGuard):
        self._guard = guard
        self._inner = optimizer.inner_optimizer
        options = {"initializer": "zeros", "aggregation": "only_first_replica"}
        self._norms = optimizer.add_variable(
            (guard.window,), dtype="float32", name="spike_norms", **options
        )
        self._counts = optimizer.add_variable(
            (3,), dtype="int", name="spike_counts", **options
        )
        self.variables = [self._norms, self._counts]
        # The sums of unscaled micro-batches, by the `id`s of variables: see `build`.
        self._sums: dict[int, keras.Variable] = {}

    def build(self, variables: Variables) -> None:
        """Makes sums for an optimizer whose own sums are of other gradients."""
        # Only now a `MultiOptimizer` knows the members that a function chooses.
        self.check_accumulation()
        inner = self._inner
        if not (most_accumulation_steps(inner) and changes_gradients(inner)):
            return
        for variable in (v for v in variables if not is_overwritten(v)):
            is_double = keras.backend.standardize_dtype(variable.dtype) == "float64"
            dtype = "float64" if is_double else "float32"
            total = zeros_of(variable, dtype, suffix="_gradient_sum")
            self._sums[id(variable)] = total
            # In a file it is one of the optimizer's variables, as its own sums are.
            track_variable(chain_of(inner)[-1], total)

    def sums_of(self, variables: Variables) -> Variables:
        """Returns the sums of unscaled gradients; [] if they are the optimizer's."""
        return [self._sums[id(v)] for v in variables] if self._sums else []

    def assign_sums(
        self, sums: Variables, totals: list[Tensor], flag: Tensor, ends: Tensor
    ) -> None:
        """Assigns the totals to these sums if `flag`, and clears all if `ends`."""
        for variable, total in zip(sums, totals, strict=True):
            total = ops.where(flag, total, ops.convert_to_tensor(variable))
            backend.assign_here(variable, ops.cast(total, variable.dtype))
        backend.clear(storage_of(list(self._sums.values())), ends)

    def check_accumulation(self) -> None:
        """Raises an error if several optimizers each accumulate gradients."""
        members = members_of(self._inner)
        if any(member.gradient_accumulation_steps for member in members):
            raise ValueError(
                "A SpikeGuard judges the mean gradient of a window, but each member of "
                "a MultiOptimizer has its own window. Leave out `spike_guard`, or the "
                "`gradient_accumulation_steps` of the members. Received: "
                f"{len(members)} members"
            )

    @property
    def skipped(self) -> Tensor:
        """The number of outliers that were skipped, an integer scalar tensor."""
        return ops.copy(ops.convert_to_tensor(self._counts)[2])

    def add(self, norm: Tensor, finite: Tensor) -> Tensor:
        """Adds the norm of a finite step; returns False for an outlier."""
        xp, window = backend.xp, self._guard.window
        max_norm = self._guard.max_norm
        is_too_large = None if max_norm is None else norm > max_norm
        # The norm of finite gradients may be infinite, and a history of it no number.
        norm = xp.clip(norm, 0.0, _LARGEST)
        norms, counts = read(self._norms), read(self._counts)
        # The norms that entered the ring, a number that wraps from `2 * window - 1` to
        # `window`; the outliers in a row; the skipped steps.
        seen, in_a_row, skipped = counts[0], counts[1], counts[2]
        limit = self._limit(norms, seen)
        is_judged = seen >= min(self._guard.warmup, window)
        is_above = xp.logical_and(is_judged, norm > limit)
        is_spike = xp.logical_and(is_above, in_a_row < window)
        # An outlier enters the history as the limit that it exceeds: see `SpikeGuard`.
        entry = xp.where(is_spike, limit, norm)
        if is_too_large is not None:
            is_spike = xp.logical_or(is_spike, is_too_large)
            entry = xp.clip(entry, 0.0, max_norm)
        is_spike = xp.logical_and(finite, is_spike)
        is_next = ops.arange(window, dtype=counts.dtype) == seen % window
        is_next = xp.logical_and(is_next, finite)
        spike = xp.cast(is_spike, counts.dtype)
        wraps = xp.cast(seen + 1 >= 2 * window, counts.dtype)
        counts = [
            xp.where(finite, seen + 1 - window * wraps, seen),
            xp.where(finite, (in_a_row + 1) * spike, in_a_row),
            skipped + spike,
        ]
        self._inner.assign(self._norms, xp.where(is_next, entry, norms))
        self._inner.assign(self._counts, ops.stack(counts))
        return xp.logical_not(is_spike)

    def _limit(self, norms: Tensor, seen: Tensor) -> Tensor:
        """Returns the largest norm that is not an outlier, a float32 scalar tensor."""
        xp, window = backend.xp, self._guard.window
        places = ops.arange(window, dtype=seen.dtype)
        # In units of the largest norm, whose square may exceed the range of float32.
        largest = ops.max(norms)
        unit = xp.where(largest > 0, largest, xp.ones_like(largest))
        values = norms / unit
        count = xp.cast(xp.clip(seen, 0, window), "float32")
        mean = ops.sum(values) / xp.clip(count, 1.0, window)
        deviations = xp.where(places < seen, values - mean, xp.zeros_like(values))
        variance = ops.sum(deviations * deviations) / xp.clip(count - 1, 1.0, window)
        std = xp.maximum(xp.sqrt(variance), mean * _ROUNDING)
        return (mean + std * self._guard.threshold) * unit
