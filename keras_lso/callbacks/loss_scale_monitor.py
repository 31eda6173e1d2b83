"""`LossScaleMonitor`: the loss scale in `fit`, and a warning when it cannot help."""

import os
import textwrap
import warnings
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import keras

from keras_lso._core.checks import (
    check_choice,
    check_factor,
    check_int,
    check_positive_int,
    check_share,
)
from keras_lso._core.counters import REMEDIES
from keras_lso._core.step_record import steps_attempted
from keras_lso._keras_internals.layers import unlisted_state_of
from keras_lso._keras_internals.rules import why_skipped
from keras_lso._keras_internals.variables import layers_of, path_of
from keras_lso.callbacks.bad_batch import BadBatch
from keras_lso.callbacks.optimizer_callback import OptimizerCallback
from keras_lso.callbacks.run_copies import RunCopies, is_finite

# The causes of a stall, and copies that hold inf or NaN. Each is reported once.
OVERFLOWS, RATES, COPIES = "overflows", "rates", "copies"


class _Stall(NamedTuple):
    """A stall that was noted, and is reported after one more step.

    That step records the layers whose gradients are not finite.
    """

    since: int  # The first step that was skipped at the lowest scale.
    before: int  # The number of steps before the first skipped one.
    # The numbers of all and of skipped steps when the stall was noted.
    attempted: int
    skipped: int


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
    `BatchNormalization` for example), and remedies. It also warns once if `patience`
    steps in a row were skipped because the learning rate, or another coefficient of the
    inner optimizer, is not finite.

    With `on_stall="restore"` training recovers automatically: the monitor restores its
    last copy of weights and optimizer from before the first skipped step, or an older
    copy at another stall before the next copy is due. It lowers the learning rate,
    warns, and continues with the next batch. Random states and the metrics of the epoch
    are not restored.

    Steps are counted as in `StepRecord`, applied or not. With
    `gradient_accumulation_steps` they are micro-batches.

    The monitor synchronises with the device only at the end of an epoch, every
    `patience` batches, and, with `on_stall="restore"`, every `keep_every` batches.

    Args:
        log_dir: The directory of an event file for TensorBoard. The file gets the two
            scalars for each epoch and for every `patience` batches, by the step of the
            optimizer, applied or skipped. Each `fit` writes its own file. Defaults to
            `None`: no file is written.
        patience: Number of steps skipped in a row that make a stall. Defaults to `50`.
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
            scale (`x`, `y` and `sample_weight`; `x/name` for nested inputs), unless
            that was in an earlier `fit`, its number (`step`), and the paths of the
            variables whose gradients are not finite (`variables`). The monitor holds up
            to `patience` batches for it. If the file cannot be written, the report of
            the stall says so. Defaults to `None`: no file is written.

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
        self._bad_batch = None if save_bad_batch is None else BadBatch(save_bad_batch)
        self._reset()

    def _reset(self) -> None:
        """Forgets the last `fit`."""
        self._batches = 0
        self._per_execution = 1
        self._stall: _Stall | None = None
        self._reported: set[str] = set()
        self._copies: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy, without the copies of the run."""
        return {**vars(self), "_copies": None}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._reset()
        optimizer = self._find_optimizer()
        if self.on_stall == "restore":
            options = self.keep_every, self.keep, self.learning_rate_factor
            self._copies = RunCopies(self.model, optimizer, *options)
        self._per_execution = self.model.steps_per_execution
        if self._bad_batch is not None:
            self._bad_batch.begin(self.model)

    # Not at the end of a batch, which would make Keras synchronise after each batch.
    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        every = max(1, self.patience // self._per_execution)
        if self._stall is not None:
            self._report_stall_if_recorded(self._stall)
        elif self._batches and self._batches % every == 0:
            self._read()
        if self._copies is not None:
            self._report_not_copied(self._copies.take(self.model, self._most_steps()))
        if self._bad_batch is not None:
            self._bad_batch.watch()
        self._batches += 1

    def _most_steps(self) -> int:
        """Returns an upper bound of the number of steps so far."""
        return self._batches * self._per_execution

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # A run is restored before the next batch: a callback that swaps weights at the
        # end of an epoch puts the old ones back at the beginning of the next.
        if self._stall is not None and self.on_stall != "restore":
            self._report_stall_if_recorded(self._stall)
        scale, skipped = self._read()
        if logs is not None:
            logs["loss_scale"] = scale
            if skipped:
                logs["skipped_steps"] = skipped
            elif (history := getattr(self.model, "history", None)) is not None:
                history.history.setdefault("skipped_steps", []).append(0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        if self._stall is not None:
            self._report_stall(self._stall)
            if self.on_stall == "restore":
                # As `fit` did before, with the averages of the stalled run.
                weights = self.model.trainable_weights
                self.model.optimizer.finalize_variable_values(weights)
        if self._bad_batch is not None:
            self._bad_batch.end()

    def _read(self) -> tuple[float, int]:
        """Writes and returns scale and skipped steps, and checks for a stall."""
        optimizer = self._find_optimizer()
        attempted = steps_attempted(optimizer)
        scale, skipped = float(optimizer.loss_scale), int(optimizer.skipped_steps)
        if self._events is not None:
            scalars = {"loss_scale": scale, "skipped_steps": skipped}
            self._events.write([(attempted, scalars)])
        in_a_row, at_lowest = optimizer._counters.skips()
        if self._bad_batch is not None:
            self._bad_batch.select(at_lowest)
        try:
            optimizer.check_stalled(self.patience)
        except FloatingPointError:
            before = attempted - in_a_row
            reason = why_skipped(optimizer.inner_optimizer)
            if reason is not None:
                happened = f"All steps since step {before + 1} were skipped."
                self._report(RATES, ["Training has stalled. " + happened, reason])
            elif OVERFLOWS not in self._reported and self._stall is None:
                since = attempted - at_lowest + 1
                self._stall = _Stall(since, before, attempted, skipped)
                self._starts_recording = optimizer._counters.overflows is None
                optimizer.record_overflows()
                self.model.make_train_function(force=True)
        return scale, skipped

    def _report_stall_if_recorded(self, stall: _Stall) -> None:
        """Reports a stall if there was a step since it was noted."""
        if steps_attempted(self._find_optimizer()) > stall.attempted:
            self._report_stall(stall)

    def _report_stall(self, stall: _Stall) -> None:
        """Reacts to a stall by overflows."""
        self._stall = None
        optimizer = self._find_optimizer()
        # At the end of `fit` there may have been no step that could record.
        has_recorded = int(optimizer.skipped_steps) > stall.skipped
        bad = optimizer._variables_overflowed() if has_recorded else None
        message = self._diagnosis(stall.since, bad)
        if self._bad_batch is not None:
            message += self._bad_batch.write(stall.since, bad or [])
        if self._copies is not None:
            self._restore(stall.before, message)
        else:
            self._report(OVERFLOWS, [*message, REMEDIES])

    def _diagnosis(self, since: int, bad: list[keras.Variable] | None) -> list[str]:
        """Returns paragraphs on the stall since a step, and on the layers involved."""
        lowest = self._find_optimizer().loss_scale_policy.min_scale
        parts = [
            f"Training has stalled. All steps since step {since} were skipped at the "
            f"lowest loss scale ({lowest:g}): the gradients are inf or NaN at any "
            "scale."
        ]
        if bad is not None:
            layers = _name_layers(bad)
            parts.append(f"Layers whose gradients are not finite: {layers}.")
        state = [*self.model.variables, *unlisted_state_of(layers_of(self.model))]
        layers = _name_layers(v for v in state if not is_finite(v))
        return [*parts, f"Layers whose variables hold inf or NaN: {layers}."]

    def _restore(self, before: int, message: list[str]) -> None:
        """Goes back to a copy and lowers the learning rate, or raises an error."""
        copy, copies = None, self._copies
        if not self.retries:
            failure = "No copy is restored, because `retries` is 0."
        elif copies.restored == self.retries:
            times = "once" if self.retries == 1 else f"{self.retries} times"
            failure = f"Restoring a copy {times} did not help."
        else:
            failure = "There is no copy from before that step to restore."
            copy = copies.restore(self.model, self._most_steps(), before)
        if copy is None:
            raise FloatingPointError(_paragraphs([*message, failure]))
        if self._starts_recording:
            self._find_optimizer()._stop_recording_overflows()
        self.model.make_train_function(force=True)
        went_back = (
            f"Training goes on from the weights after step {copy.attempted}, at "
            f"{self.learning_rate_factor:g} times the learning rate (retry "
            f"{copies.restored} of {self.retries})."
        )
        _warn([*message, went_back])

    def _report_not_copied(self, variables: list[Any]) -> None:
        """Warns of variables because of which the run was not copied, if any."""
        if variables:
            attempted = steps_attempted(self._find_optimizer())
            message = (
                f"The run was not copied after step {attempted}, because variables of "
                f"these layers hold inf or NaN: {_name_layers(variables)}. If training "
                "stalls, an older copy is restored, if there is one."
            )
            self._report(COPIES, [message])

    def _report(self, cause: str, parts: list[str]) -> None:
        """Warns of a cause, or raises an error, once in each `fit`."""
        if cause in self._reported:
            return
        self._reported.add(cause)
        if cause != COPIES and self.on_stall in ("raise", "restore"):
            raise FloatingPointError(_paragraphs(parts))
        _warn(parts)
        if self.on_stall == "stop":
            self.model.stop_training = True


def _paragraphs(parts: list[str]) -> str:
    """Returns paragraphs in lines of at most 80 characters."""
    lines = "\n".join(parts).split("\n")
    return "\n".join(textwrap.fill(line, 80, break_long_words=False) for line in lines)


def _name_layers(variables: Iterable[Any]) -> str:
    """Returns the paths of the first three layers of the variables."""
    paths = (path_of(v) for v in variables)
    layers = list(dict.fromkeys(path.rpartition("/")[0] or path for path in paths))
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return ", ".join(layers[:3]) + more if layers else "none"


def _warn(parts: list[str]) -> None:
    """Warns without the file and line, which would interrupt a progress bar."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"\n{message}\n"
    try:
        warnings.warn(_paragraphs(parts), stacklevel=3)
    finally:
        warnings.formatwarning = before
