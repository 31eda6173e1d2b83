"""What the schedules share: their base, steps as integers, and curves in float32."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import keras
import numpy as np
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import (
    LARGEST_STEP,
    check_config,
    check_rate,
    entries,
    is_number,
    refusal,
    schedule_hint,
    warn,
)
from keras_lso._core.configs import read_object
from keras_lso._core.fields import check_fields
from keras_lso._keras_internals.optimizers import bases_of
from keras_lso._keras_internals.state import schedule_of

# The largest float32 that is an int32.
_LARGEST_FLOAT32 = 2**31 - 128

# Keras has no types: mypy reads its classes as `Any`, and would let a dataclass with
# such a base take any arguments. For mypy this name is true.
MYPY = False
if MYPY:

    class _Base:
        """What mypy knows of a `LearningRateSchedule`."""

else:
    _Base = LearningRateSchedule


class Schedule(_Base):
    """Base of the schedules: checks, writes and reads the fields of a dataclass."""

    name: Any
    _checks: ClassVar[dict[str, Callable[[str, Any], Any]]]
    # The fields that are schedules or rates, or lists of them.
    _members: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Checks the arguments."""
        check_fields(self)
        if self.name is None:  # As in configs of the Model Garden.
            self.name = type(self).__name__

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for `from_config`."""
        write = keras.saving.serialize_keras_object
        return {name: write(getattr(self, name)) for name in self._checks}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates a schedule from the return value of `get_config`."""
        config = check_config(cls.__qualname__, config)
        members = config.keys() & set(cls._members)
        return cls(**config | {name: _read(name, config[name]) for name in members})


# --- Schedules in schedules: a member is a schedule, or a number, the constant rate ---


def check_schedule_or_rate(argument: str, value: Any) -> Any:
    """Returns a schedule unchanged, and a rate as a float."""
    if isinstance(value, LearningRateSchedule):
        return value
    if is_number(value):
        return check_rate(argument, value)
    requirement = "be a `keras.optimizers.schedules.LearningRateSchedule` or a number"
    if isinstance(value, dict):
        requirement += ". Make a schedule from its config with `from_config` first"
    elif callable(value):
        requirement += f". {schedule_hint(value)}"
    raise refusal(argument, value, requirement, TypeError)


Member = Annotated[LearningRateSchedule | float, check_schedule_or_rate]


def check_boundaries(steps: Sequence[int], count: int, reason: str) -> None:
    """Raises a `ValueError` unless there are `count` strictly increasing steps."""
    if len(steps) != count:
        raise refusal("boundaries", steps, f"have {entries(count)}, {reason}")
    if any(low >= high for low, high in itertools.pairwise(steps)):
        raise refusal("boundaries", steps, "be strictly increasing")


def rate_at(member: LearningRateSchedule | float, step: int | Tensor) -> Tensor:
    """Returns the rate of a member in float32."""
    rate = member(step) if isinstance(member, LearningRateSchedule) else member
    return float32(rate)


def _read(argument: str, config: Any) -> Any:
    """Returns the member, or the members, for an entry of a config."""
    if isinstance(config, list):
        return [_read(f"{argument}[{i}]", entry) for i, entry in enumerate(config)]
    if not isinstance(config, dict):
        return config
    if "class_name" not in config:
        raise ValueError(
            f"The config's `{argument}` does not name the class of the schedule, which "
            "the Model Garden leaves out. Replace it with `keras.optimizers.schedules."
            f"serialize(schedule)`. Received: {argument}={config!r}"
        )
    return read_object(read_schedule, config, f"schedule `{argument}`")


def read_schedule(
    config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> Any:
    """Returns the object for a config; finds our classes by their bare names too."""
    if config.get("module") or config.get("registered_name"):
        return keras.saving.deserialize_keras_object(config, custom_objects)
    name = config["class_name"]
    cls = keras.saving.get_registered_object(f"keras_lso>{name}")
    if cls is not None and not hasattr(keras.optimizers.schedules, name):
        custom_objects = {name: cls, **(custom_objects or {})}
    return keras.optimizers.schedules.deserialize(config, custom_objects)


def warn_of_micro_batches(optimizer: Any) -> None:
    """Warns of a schedule that counts micro-batches in a built optimizer."""
    for base in bases_of(optimizer):
        count, rate = base.gradient_accumulation_steps, schedule_of(base)
        if count and rate is not None and getattr(rate, "_counts_micro_batches", True):
            name = type(base).__name__
            warn(
                f"With `gradient_accumulation_steps={count}` a learning-rate schedule "
                f"counts micro-batches, not updates: {100 * count} of its steps are "
                f"100 updates. To make it count updates, write `{name}(keras_lso."
                f"schedules.PerUpdate(schedule, {count}), "
                f"gradient_accumulation_steps={count})`. If its steps are "
                "micro-batches on purpose, write `keras_lso.schedules.PerUpdate("
                f"schedule, 1)`. Received: learning_rate={rate!r}"
            )
            return


# --- Steps --------------------------------------------------------------------------

# float32 holds only the integers up to 2**24. Steps are therefore subtracted, compared
# and counted as integers. Only the curves divide the results.


class Steps(NamedTuple):
    """A number of steps: an int32 of at most `LARGEST_STEP`, and a float32 fraction."""

    whole: Any
    fraction: Any = None  # For integers.

    def since(self, start: int) -> "Steps":
        """Returns the `Steps` since the step `start`."""
        if start == 0:
            return self
        start = min(max(start, -LARGEST_STEP), LARGEST_STEP)
        # Otherwise the first or the last steps would wrap around.
        first, last = max(start, 0) - LARGEST_STEP, min(start, 0) + LARGEST_STEP
        return self._replace(whole=ops.clip(self.whole, first, last) - start)

    def is_before(self, end: int) -> Tensor:
        """Returns whether there are fewer steps than `end`."""
        return self.whole < min(end, LARGEST_STEP)

    def rounded_up(self) -> Tensor:
        """Returns the number of steps as an int32 tensor."""
        if self.fraction is None:
            return self.whole
        return self.whole + ops.cast(self.fraction > 0, "int32")

    def in_float32(self) -> Tensor:
        """Returns the number of steps in float32."""
        count = ops.cast(self.whole, "float32")
        return count if self.fraction is None else count + self.fraction

    def clipped(self, first: int = 0, last: int = LARGEST_STEP) -> "Steps":
        """Returns the steps between two limits."""
        whole = ops.clip(self.whole, first, last)
        if self.fraction is None:
            return Steps(whole)
        is_between = (self.whole >= first) & (self.whole < last)
        return Steps(whole, self.fraction * ops.cast(is_between, "float32"))

    def left_to(self, point: float) -> Tensor:
        """Returns `point - steps` in float32, for a point between two steps."""
        whole = math.floor(point)
        left = ops.cast(whole - self.whole, "float32") + (point - whole)
        return left if self.fraction is None else left - self.fraction

    def left_and_done(self, total: int) -> tuple[Tensor, Tensor]:
        """Returns `total - steps` and `steps` in float32; at the end 0 and `total`."""
        end = min(total, LARGEST_STEP)
        # Long before the first step the difference would wrap around.
        steps = self.clipped(end - LARGEST_STEP, end)
        return steps._both_in_float32(end - steps.whole, total - end)

    def left_and_done_of_cycles(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns `left_and_done` of the cycles so far, in which last steps count."""
        end = min(length, LARGEST_STEP)
        steps = self.clipped()
        last = ops.maximum(steps.rounded_up(), 1)
        left = end - 1 - (last - 1) % end + (last - steps.whole)
        return steps._both_in_float32(left, length - end)

    def _both_in_float32(self, left: Tensor, beyond: int) -> tuple[Tensor, Tensor]:
        """Returns `left + beyond`, without the fraction, and the steps in float32."""
        left = ops.cast(left, "float32")
        if beyond > 0:
            left = left + float(beyond)
        if self.fraction is not None:
            left = left - self.fraction
        return left, self.in_float32()


def as_tensor(step: Any) -> Tensor:
    """Returns a step as an int32, int64, float32 or float64 tensor."""
    if isinstance(step, int):
        # The int may be too large for a float.
        step = min(max(step, -LARGEST_STEP), LARGEST_STEP)
    # JAX would wrap large ints around, and turn `np.float64(2**24 + 1)` into 2**24.
    if isinstance(step, int | float | np.generic | np.ndarray):
        step = np.clip(np.asarray(step, "float64"), -LARGEST_STEP, LARGEST_STEP)
        step = step.astype("int32" if np.all(step == np.floor(step)) else "float32")
    step = ops.convert_to_tensor(step)
    dtype = keras.backend.standardize_dtype(step.dtype)
    if dtype in ("uint32", "uint64"):
        step = ops.where(step > LARGEST_STEP, LARGEST_STEP, step)
    if dtype in ("int32", "int64", "float32", "float64"):
        return step
    return ops.cast(step, "float32" if "float" in dtype else "int32")


def elapsed(step: Any, offset: int = 0) -> Steps:
    """Returns the `Steps` since an offset."""
    step = as_tensor(step)
    dtype = keras.backend.standardize_dtype(step.dtype)
    if dtype == "int64":
        step = ops.cast(ops.clip(step, -LARGEST_STEP, LARGEST_STEP), "int32")
    if "int" in dtype:
        return Steps(step).since(offset)
    largest = LARGEST_STEP if dtype == "float64" else _LARGEST_FLOAT32
    step = ops.clip(step, -largest, largest)
    # Not `ops.floor`, whose result for float64 is float32 on PyTorch.
    whole = ops.cast(step, "int32")
    # The cast rounds towards 0.
    whole = whole - ops.cast(ops.cast(whole, dtype) > step, "int32")
    fraction = ops.cast(step - ops.cast(whole, dtype), "float32")
    return Steps(whole, fraction).since(offset)


# --- Curves -------------------------------------------------------------------------

# A curve is a function of the share of its steps that is left and of the share that is
# done. Each is a division of integers: a small share has the accuracy of float32, and
# at the ends they are exactly 0 and 1.


def float32(value: Any) -> Tensor:
    """Returns a float32 tensor; Keras may convert a bare float to `floatx`."""
    return ops.convert_to_tensor(value, dtype="float32")


def shares(
    left: Tensor, done: Tensor, *, before: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the share of some steps that is left, and the share that is done.

    Both numbers are divided by their sum, since a compiler may replace the division by
    a constant with a multiplication by its rounded inverse: 49 / 49 would be below 1,
    3 / 3 above it, and 1 - 3 / 3 negative. On an NVIDIA GPU, XLA's quotient of two
    equal numbers may be off by one rounding; the quotient of zero is zero.
    """
    total = left + done
    # With 20 million steps left and minus 20 million done, rounding would change it.
    if before is not None:
        total = ops.where(done < 0, float32(float(before)), total)
    return left / total, done / total


def straight_line(steps: Steps, total: int, start: Any, end: Any) -> Tensor:
    """Returns the rate on the line from `start` at step 0 to `end` at `total`."""
    total = max(total, 1)
    if start == 0:
        return steps.in_float32() / total * end
    left, done = shares(*steps.left_and_done(total), before=total)
    return line_between(left, done, start, end)


def line_between(left: Tensor, done: Tensor, start: Any, end: Any) -> Tensor:
    """Returns the rate on the line from `start` to `end`."""
    return left * start + done * end


def cosine_between(left: Tensor, done: Tensor, start: Any, end: Any) -> Tensor:
    """Returns the rate on the half cosine from `start` to `end`."""
    return line_between(half_cosine(left), half_cosine(done), start, end)


def warmed_up(
    steps: Steps, total: int, start: float, end: float, rate: Tensor
) -> Tensor:
    """Returns the line from `start` to `end` before step `total`, then `rate`."""
    line = straight_line(steps, total, start, end)
    return ops.where(steps.is_before(total), line, rate)


def half_cosine(share: Tensor) -> Tensor:
    """Returns `(1 - cos(pi * share)) / 2`, accurate near zero as well."""
    sine = ops.sin(share * (math.pi / 2))
    return sine * sine


def one_minus_power(left: Tensor, done: Tensor, power: float) -> Tensor:
    """Returns `1 - left ** power`, accurate for small `done` too."""
    log_left = ops.where(
        done < 0.5, ops.log1p(-ops.minimum(done, float32(0.5))), ops.log(left)
    )
    return -ops.expm1(power * log_left)


def power_of_step(steps: Steps, power: float, total: int = 1) -> Tensor:
    """Returns `(steps / total) ** power`; steps before the first count as step 1."""
    count = ops.maximum(steps.in_float32(), float32(1))
    return ops.power(count / total if total > 1 else count, float32(power))


def power_of_rate(rate: float, count: Tensor) -> Tensor:
    """Returns `rate ** count` for a positive float and an integer tensor."""
    limits = np.finfo("float32")
    base = float(np.clip(rate, limits.tiny, limits.max).astype("float32"))
    count = ops.cast(count, "float32")
    result = ops.power(float32(base), count)
    if base == rate:
        return result
    # A million times the rounding error of the rate matters: it has its own factor.
    # Within these limits that is a normal number: 0 times inf would be NaN.
    rest = ops.clip(count * math.log(rate / base), float32(-87), float32(87))
    return result * ops.exp(rest)


def stairs(steps: Tensor, boundaries: Sequence[int], values: Sequence[float]) -> Tensor:
    """Returns the value of the interval; a boundary belongs to the one before it."""
    first, *later = values
    rate = float32(first)
    for boundary, value in zip(boundaries, later, strict=True):
        rate = ops.where(steps > boundary, float32(value), rate)
    return rate
