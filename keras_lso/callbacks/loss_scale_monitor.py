"""`LossScaleMonitor`: the loss scale in `fit`, and a warning when it cannot help."""

import contextlib
import os
import pathlib
import textwrap
import warnings
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule
from numpy.typing import NDArray

from keras_lso._backend import backend
from keras_lso._core.checks import (
    check_choice,
    check_factor,
    check_int,
    check_path,
    check_positive_int,
    check_share,
    refusal,
)
from keras_lso._core.counters import LOOK_FOR, steps_attempted
from keras_lso._keras_internals.layers import unlisted_state_of
from keras_lso._keras_internals.optimizers import bases_of
from keras_lso._keras_internals.rules import rate_given_to, why_skipped
from keras_lso._keras_internals.variables import layers_of, path_of
from keras_lso.callbacks.optimizer_callback import OptimizerCallback
from keras_lso.schedules import Scaled

# The causes of a stall, and copies that hold inf or NaN. Each is reported once.
OVERFLOWS, RATES, COPIES = "overflows", "rates", "copies"


class LossScaleMonitor(OptimizerCallback):
    """Shows the loss scale and the skipped steps of a `LossScaleOptimizer` in `fit`.

    The monitor adds two entries to the logs of each epoch, which the progress bar and
    the `History` show: `loss_scale`, and `skipped_steps`, the number of steps skipped
    since the optimizer was created, which the progress bar shows once there is one. A
    few skipped steps are normal: a dynamic scale finds its highest value by overflows.

    When `patience` steps in a row were skipped at the lowest loss scale, no scale can
    help: data or activations are not finite, or the model has diverged. The monitor
    then warns once, in a `UserWarning`, which names the first skipped step, the layers
    whose gradients are not finite, the layers that hold inf or NaN (the statistics of a
    `BatchNormalization` for example), and remedies. It also warns once, and names the
    cause, when `patience` steps in a row were skipped because the learning rate, or
    another coefficient of the inner optimizer, is not finite.

    With `on_stall="restore"` training recovers automatically: the monitor restores its
    last copy of weights and optimizer from before the first skipped step, lowers the
    learning rate, warns, and continues with the next batch. If there is another stall
    before the next copy is due, it restores the copy before. Random states and the
    metrics of the epoch are not restored.

    Steps are counted as in `StepRecord`, applied or not. With
    `gradient_accumulation_steps` they are micro-batches.

    The monitor synchronises with the device only at the end of an epoch, every
    `patience` batches, and, with `on_stall="restore"`, every `keep_every` batches.

    Args:
        log_dir: The directory of an event file for TensorBoard. The file gets the two
            scalars for each epoch and for every `patience` batches, by the step of the
            optimizer, applied or skipped. Each `fit` writes its own file. Defaults to
            `None`: no file is written.
        patience: Number of consecutive steps, all skipped at the lowest scale or with a
            learning rate that is not finite, that make a stall. Defaults to `50`.
        on_stall: The reaction to a stall: `"warn"`, `"stop"` (a warning, and `fit`
            ends), `"raise"`, or `"restore"`. Defaults to `"warn"`.
        keep_every: With `"restore"`, the number of applied steps between two copies, in
            host memory. Copies that hold inf or NaN are not kept, and the first such
            copy causes a warning. Weights that are not trained and are not finite when
            `fit` begins, such as a mask of -inf, are ignored. Defaults to `500`.
        keep: With `"restore"`, the number of copies to keep. Defaults to `2`.
        learning_rate_factor: Above 0 and at most 1. With `"restore"`, the factor that
            multiplies the current learning rate at each restore. A schedule becomes a
            `keras_lso.schedules.Scaled`. A `LearningRateScheduler` callback sets the
            rate again at the next epoch, without the factor: pass a schedule to the
            optimizer instead. Defaults to `0.5`.
        retries: With `"restore"`, the number of restores in one `fit` after which the
            next stall raises an error. Defaults to `3`.
        save_bad_batch: A path that ends with `.npz`. At a stall, the monitor writes to
            this file the batch of the first step that was skipped at the lowest loss
            scale (`x`, `y` and `sample_weight`; `x/name` for nested inputs), its number
            (`step`), and the paths of the variables whose gradients are not finite
            (`variables`). If that step was taken in an earlier `fit`, the file has no
            batch. The monitor holds up to `patience` batches for this file. If it
            cannot be written, the report of the stall says so. Defaults to
            `None`: no file is written.

    Raises:
        ValueError, TypeError: If an argument is not valid, or if the model's optimizer
            is not a `LossScaleOptimizer`.
        ImportError: If there is a `log_dir` and TensorBoard is not installed.
        FloatingPointError: In `fit`, with `on_stall="raise"`. With `"restore"`, after
            `retries`, if there is no copy, or if the learning rate is not finite.

    Example:

    >>> import keras, keras_lso
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    >>> model.compile(optimizer, loss="mse")
    >>> x = keras.ops.ones((4, 1))
    >>> monitor = keras_lso.callbacks.LossScaleMonitor()
    >>> history = model.fit(x, x, epochs=2, callbacks=[monitor], verbose=0)
    >>> history.history["loss_scale"], history.history["skipped_steps"]
    ([32768.0, 32768.0], [0, 0])
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        patience: int = 50,
        on_stall: Literal["warn", "stop", "raise", "restore"] = "warn",
        keep_every: int = 500,
        keep: int = 2,
        learning_rate_factor: float = 0.5,
        retries: int = 3,
        save_bad_batch: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(log_dir)
        self.patience: int = check_positive_int("patience", patience)
        reactions = ("warn", "stop", "raise", "restore")
        self.on_stall: str = check_choice("on_stall", on_stall, reactions)
        self.keep_every: int = check_positive_int("keep_every", keep_every)
        self.keep: int = check_positive_int("keep", keep)
        factor = check_factor("learning_rate_factor", learning_rate_factor, 0.0)
        # A factor of 1 leaves the rate unchanged.
        self.learning_rate_factor: float = check_share("learning_rate_factor", factor)
        self.retries: int = check_int("retries", retries, at_least=0)
        self.save_bad_batch = save_bad_batch
        self._bad_batch = None if save_bad_batch is None else _BadBatch(save_bad_batch)
        self._reset()

    def _reset(self):
        self._batches = 0
        # The first step of a stall. It is reported after one more step, which records
        # the layers whose gradients are not finite.
        self._stalled_since: Any = None
        # The numbers of all and of skipped steps when the stall was noted, and of steps
        # before the first skipped one.
        self._attempted = self._skipped = self._before = 0
        self._reported = set()
        self._copies: Any = None
        self._per_execution = 1

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy, without the copies of the run."""
        return {**vars(self), "_copies": None}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._reset()
        optimizer = self._find_optimizer()
        if self.on_stall == "restore":
            options = self.keep_every, self.keep, self.learning_rate_factor
            self._copies = _Copies(self.model, optimizer, *options)
        self._per_execution = self.model.steps_per_execution
        if self._bad_batch is not None:
            self._bad_batch.begin(self.model)

    # Not at the end of a batch, which would make Keras synchronise after each batch.
    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        every = max(1, self.patience // self._per_execution)
        if self._stalled_since is not None:
            self._report_recorded()
        elif self._batches and self._batches % every == 0:
            self._read()
        copies = self._copies
        if copies is not None and (refused := copies.take(self.model, self._steps())):
            self._report_refused(refused)
        if self._bad_batch is not None:
            self._bad_batch.watch()
        self._batches += 1

    def _steps(self):
        """Returns an upper bound of the number of steps so far, an int."""
        return self._batches * self._per_execution

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # A run is restored before the next batch: a callback that swaps weights at the
        # end of an epoch puts the old ones back at the beginning of the next.
        if self._stalled_since is not None and self.on_stall != "restore":
            self._report_recorded()
        scale, skipped = self._read()
        if logs is not None:
            logs["loss_scale"] = scale
            if skipped:
                logs["skipped_steps"] = skipped
            elif (history := getattr(self.model, "history", None)) is not None:
                history.history.setdefault("skipped_steps", []).append(0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        if self._stalled_since is not None:
            self._report_overflows()
            if self.on_stall == "restore":
                # As `fit` did before, with the averages of the stalled run.
                weights = self.model.trainable_weights
                self.model.optimizer.finalize_variable_values(weights)
        if self._bad_batch is not None:
            self._bad_batch.end()

    def _read(self):
        """Writes and returns scale and skipped steps, and checks for a stall."""
        optimizer = self._find_optimizer()
        attempted = steps_attempted(optimizer)
        scale, skipped = float(optimizer.loss_scale), int(optimizer.skipped_steps)
        if self._events is not None:
            scalars = {"loss_scale": scale, "skipped_steps": skipped}
            self._events.write([(attempted, scalars)])
        if self._bad_batch is not None:
            _, at_lowest = optimizer._counters.skips()
            self._bad_batch.look(at_lowest)
        try:
            optimizer.check_stalled(self.patience)
        except FloatingPointError:
            self._note_stall(optimizer, attempted, skipped)
        return scale, skipped

    def _note_stall(self, optimizer, attempted, skipped):
        in_a_row, at_lowest = optimizer._counters.skips()
        reason = why_skipped(optimizer.inner_optimizer)
        if reason is not None:
            since = attempted - in_a_row + 1
            happened = f"All steps since step {since} were skipped."
            self._report(RATES, ["Training has stalled. " + happened, reason])
        elif OVERFLOWS not in self._reported and self._stalled_since is None:
            self._stalled_since = attempted - at_lowest + 1
            self._before = attempted - in_a_row
            self._attempted, self._skipped = attempted, skipped
            optimizer.record_overflows()
            self.model.make_train_function(force=True)

    def _report_recorded(self):
        """Reports the stall if there was a step since it was noted."""
        if steps_attempted(self._find_optimizer()) > self._attempted:
            self._report_overflows()

    def _report_overflows(self):
        optimizer = self._find_optimizer()
        # At the end of `fit` there may have been no step that could record.
        has_recorded = int(optimizer.skipped_steps) > self._skipped
        bad = optimizer.overflowed_variables() if has_recorded else None
        message = _diagnosis(self.model, optimizer, self._stalled_since, bad)
        if self._bad_batch is not None:
            message += self._bad_batch.write(self._stalled_since, bad or [])
        self._stalled_since = None
        if self.on_stall == "restore":
            self._restore(optimizer, message)
        else:
            self._report(OVERFLOWS, [*message, _ADVICE])

    def _restore(self, optimizer, message):
        """Goes back to a copy and lowers the learning rate, or raises an error."""
        copy = None
        if not self.retries:
            failure = "No copy is restored, because `retries` is 0."
        elif self._copies.restored == self.retries:
            times = "once" if self.retries == 1 else f"{self.retries} times"
            failure = f"Restoring a copy {times} did not help."
        else:
            failure = "There is no copy from before that step to restore."
            copy = self._copies.restore(self.model, self._steps(), self._before)
        if copy is None:
            raise FloatingPointError(_paragraphs([*message, failure]))
        optimizer._counters.stop_recording_overflows()
        self.model.make_train_function(force=True)
        went_back = (
            f"Training goes on from the weights after step {copy.attempted}, at "
            f"{self.learning_rate_factor:g} times the learning rate (retry "
            f"{self._copies.restored} of {self.retries})."
        )
        _warn([*message, went_back])

    def _report_refused(self, variables):
        attempted = steps_attempted(self._find_optimizer())
        message = (
            f"The run was not copied after step {attempted}, because variables of "
            f"these layers hold inf or NaN: {_name_layers(variables)}. If training "
            "stalls, an older copy is restored, if there is one."
        )
        self._report(COPIES, [message])

    def _report(self, cause, parts):
        if cause in self._reported:
            return
        self._reported.add(cause)
        if cause != COPIES and self.on_stall in ("raise", "restore"):
            raise FloatingPointError(_paragraphs(parts))
        _warn(parts)
        if self.on_stall == "stop":
            self.model.stop_training = True


# --- In words ----------------------------------------------------------------------


def _diagnosis(model, optimizer, since, overflowed):
    """Returns paragraphs on the stall since a step, and on the layers involved."""
    lowest = optimizer.loss_scale_policy.min_scale
    parts = [
        f"Training has stalled. All steps since step {since} were skipped at the "
        f"lowest loss scale ({lowest:g}): the gradients are inf or NaN at any scale."
    ]
    if overflowed is not None:
        layers = _name_layers(overflowed)
        parts.append(f"Layers whose gradients are not finite: {layers}.")
    kept = [*model.variables, *unlisted_state_of(layers_of(model))]
    layers = _name_layers(v for v in kept if not _is_finite(v))
    parts.append(f"Layers whose variables hold inf or NaN: {layers}.")
    return parts


_ADVICE = (
    f"{LOOK_FOR} Without either the model itself has diverged: go back to a checkpoint "
    "from before that step, and lower the learning rate or clip the gradients "
    "(`global_clipnorm` of the inner optimizer)."
)


def _paragraphs(parts):
    lines = "\n".join(parts).split("\n")
    return "\n".join(textwrap.fill(line, 80, break_long_words=False) for line in lines)


def _name_layers(variables):
    """Returns the paths of the first three layers of the variables."""
    paths = (path_of(v) for v in variables)
    layers = list(dict.fromkeys(path.rpartition("/")[0] or path for path in paths))
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return ", ".join(layers[:3]) + more if layers else "none"


def _warn(parts):
    """Warns without the file and line, which would interrupt a progress bar."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"\n{message}\n"
    try:
        warnings.warn(_paragraphs(parts), stacklevel=3)
    finally:
        warnings.formatwarning = before


# --- What the monitor keeps of a run -----------------------------------------------


class _Copy(NamedTuple):
    """The numbers of attempted and applied steps of a run, and its values."""

    attempted: int
    applied: int
    values: list[NDArray[Any]]


class _Copies:
    """The last copies of a model and its optimizer in which all numbers are finite.

    Weights that are not trained and are not finite from the beginning, such as an
    attention mask of -inf, are constants, and may be in a copy. The model is given for
    each copy again: on JAX, `Callback.model` attaches the values to its variables.
    """

    def __init__(self, model, optimizer, every, keep, factor):
        self._optimizer = optimizer
        self._every, self._keep, self._factor = every, keep, factor
        for rate in map(rate_given_to, self._bases()):
            is_known = isinstance(rate, keras.Variable | LearningRateSchedule)
            if factor != 1 and not is_known:
                raise ValueError(
                    '`on_stall="restore"` multiplies the learning rate, which must be '
                    "a number or a schedule. Write the function as the `__call__` of a "
                    "subclass of `LearningRateSchedule`, or "
                    f"`learning_rate_factor=1.0`. Received: learning_rate={rate!r}"
                )
        self._copies: list[_Copy] = []
        # No copy can be due before this number of steps.
        self._due = 0
        # The copy that was restored last, until there is a newer copy.
        self._last: _Copy | None = None
        self.restored = 0
        trained = set(map(id, model.trainable_weights))
        # Positions, since a buffer of PyTorch is a new object each time.
        self._constants = {
            at
            for at, variable in enumerate(_weights_of(model))
            if id(variable) not in trained and not _is_finite(variable)
        }

    def take(self, model, steps):
        """Copies the run if a copy is due after at most so many steps.

        Returns the variables that hold inf or NaN, because of which there is no copy.
        """
        # Usually no copy can be due, which takes no read of the device.
        if steps < self._due or not self._optimizer.built:
            return []
        attempted = steps_attempted(self._optimizer)
        # By NumPy, since `int` does not accept a value that replicas share.
        applied = int(ops.convert_to_numpy(self._optimizer._counters.applied))
        due = self._copies[-1].applied + self._every if self._copies else applied
        self._due = steps + (due - applied if due > applied else self._every)
        if due > applied:
            return []
        variables = [*_weights_of(model), *self._optimizer._state.in_memory]
        values = [backend.host.to_host(variable.value) for variable in variables]
        refused = [
            variable
            for at, (variable, value) in enumerate(zip(variables, values, strict=True))
            if at not in self._constants and not np.isfinite(value).all()
        ]
        if not refused:
            copy = _Copy(attempted, applied, values)
            self._copies = [*self._copies, copy][-self._keep :]
            self._last = None
        return refused

    def restore(self, model, steps, before):
        """Restores the last copy from before the skipped steps, if there is one.

        If that copy has led to a stall before the next copy was due, an older copy is
        restored. The current learning rate is multiplied by the factor.
        """
        self._copies = [c for c in self._copies if c.attempted <= before]
        if len(self._copies) > 1 and self._copies[-1] is self._last:
            self._copies.pop()
        if not self._copies:
            return None
        self._last = copy = self._copies[-1]
        bases = self._bases()
        rates = [_multiplied_rate(base, self._factor) for base in bases]
        weights, state = _weights_of(model), self._optimizer._state
        count = len(weights)
        for variable, value in zip(weights, copy.values[:count], strict=True):
            variable.assign(ops.convert_to_tensor(value, dtype=variable.value.dtype))
        state.assign(state.in_memory, copy.values[count:])
        self.restored += 1
        self._due = steps + self._every
        for base, rate in zip(bases, rates, strict=True):
            base.learning_rate = rate
        return copy

    def _bases(self):
        # A `MultiOptimizer` may know its members only when it is built.
        return bases_of(self._optimizer.inner_optimizer)


def _weights_of(model):
    # Without the states of seeds: random numbers after a restore are new.
    return [*model.weights, *unlisted_state_of(layers_of(model))]


def _is_finite(variable):
    return np.isfinite(backend.host.to_host(variable.value)).all()


def _multiplied_rate(base, factor):
    rate = rate_given_to(base)
    if isinstance(rate, keras.Variable):
        return float(ops.convert_to_tensor(rate) * factor)
    if factor == 1:
        return rate
    if isinstance(rate, Scaled):
        return Scaled(rate.schedule, rate.factor * factor)
    return Scaled(rate, factor)


class _BadBatch:
    """Holds the batches since the last call of `look`, and writes one into a file."""

    def __init__(self, path):
        if pathlib.Path(check_path("save_bad_batch", path)).suffix != ".npz":
            raise refusal("save_bad_batch", path, "be a path that ends with '.npz'")
        self._file = pathlib.Path(path)
        self._model: Any = None
        self._watched: Any = None
        self.end()

    def __reduce__(self):
        """Copies only the path."""
        return type(self), (self._file,)

    def begin(self, model):
        self._model = model
        self.end()

    def watch(self):
        """Watches the batches of the next call of the train function.

        It watches a single call: Keras calls no callback when `fit` ends with an error.
        """
        model, function = self._model, self._model.train_function
        if function is self._watched:
            return

        def watched(*arguments):
            model.train_function = function
            *state, data = arguments
            args = self._batches.append, model.steps_per_execution
            return function(*state, backend.host.shown(data, *args))

        model.train_function = self._watched = watched

    def end(self):
        self._batches: list[Any] = []
        self._found: Any = None

    def look(self, skipped):
        """Keeps only the batch of the first of the last `skipped` steps.

        If this step is older than the batches, its batch was found before, or it is not
        known, because the step belongs to an earlier `fit`.
        """
        if not skipped:
            self._found = None
        elif skipped <= len(self._batches):
            self._found = self._batches[-skipped]
        self._batches.clear()

    def write(self, since, variables):
        """Writes the batch that was found, if any, of the step `since`.

        Returns what to say if it cannot be written, a list of at most one paragraph.
        """
        paths = np.array([path_of(variable) for variable in variables], dtype="str")
        arrays: dict[str, Any] = {"step": np.array(since), "variables": paths}
        try:
            arrays |= _arrays_of(self._found)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            np.savez(self._file, **arrays)
        # Whatever a batch may be, and whatever its disk does: the stall matters more.
        except Exception as error:
            with contextlib.suppress(OSError):
                # NumPy cannot read a part of a file.
                self._file.unlink()
            return [
                f"The bad batch could not be saved to {str(self._file)!r}: "
                f"{type(error).__name__}: {error}."
            ]
        return []


def _arrays_of(batch):
    """Returns the arrays of a batch by their names in a file."""
    arrays = {}
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    for name, part in zip(("x", "y", "sample_weight"), parts, strict=True):
        for path, leaf in keras.tree.flatten_with_path(part):
            if leaf is not None:
                name_of_leaf = "/".join(map(str, (name, *path)))
                arrays[name_of_leaf] = np.asarray(ops.convert_to_numpy(leaf))
    return arrays
