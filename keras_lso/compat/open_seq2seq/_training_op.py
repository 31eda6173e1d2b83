"""`TrainingOp`: one compiled step of training, which may clip its gradients."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor, in_float32, times
from keras_lso._core.checks import (
    check_path,
    check_positive,
    check_positive_int,
    refusal,
)
from keras_lso._core.gradients import split_pairs
from keras_lso._keras_internals.distribution import reduced_gradients
from keras_lso._keras_internals.optimizers import (
    chain_of,
    check_known,
    iteration_variable,
)
from keras_lso._keras_internals.variables import is_overwritten, path_of, zeros_of
from keras_lso.callbacks.optimizer_callback import SummaryWriter
from keras_lso.compat.backend import (
    average_over_processes,
    check_processes_run,
    compile_step,
)
from keras_lso.compat.open_seq2seq.regularization import model_at_hand
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.optimizers.larc import LARC

OPTIMIZER_SUMMARIES = [
    "learning_rate",
    "gradients",
    "gradient_norm",
    "global_gradient_norm",
    "variables",
    "variable_norm",
    "larc_summaries",
    "loss_scale",
]


@dataclasses.dataclass(eq=False, repr=False)
class TrainingOp:
    """A callable that runs one step of training on a batch.

    ```python
    gradients = gradients_of(loss(*batch))              # unscaled, in float32
    accumulators += gradients / iter_size
    if not skip_update:
        gradients = average_over_processes(accumulators)
        gradients = clip_by_global_norm(gradients, clip_gradients)
        optimizer.apply(gradients)
        accumulators = 0
    ```

    `tf.function` or `jax.jit` compiles the step; on PyTorch it runs eagerly. In a
    `tf.function` of your own, pass `skip_update` with `iter_size` above 1, since Python
    counts calls only during tracing, and write no summaries.

    The attributes are arguments of `optimize_loss`, except these.

    Attributes:
        optimizer: The optimizer that applies the gradients.
        variables: List of the variables to train; None before the first call if
            neither `var_list` nor a built `model` is given.
        accumulators: List of float32 sums of gradients; empty if `iter_size` is 1.
    """

    loss: Callable[..., Tensor]
    optimizer: keras.optimizers.Optimizer
    variables: Any
    model: keras.Model | None
    clip_gradients: float | None
    summaries: Sequence[str]
    on_horovod: bool
    iter_size: int
    skip_update_ph: keras.Variable | Callable[[], bool] | None

    def __post_init__(self) -> None:
        self.accumulators: list[keras.Variable] = []
        chain = chain_of(self.optimizer)
        scalers = (o for o in chain if isinstance(o, LossScaleOptimizer))
        self._scaler = next(scalers, None)
        self._micro_steps, self._updates = 0, 0
        self._writer: Any = None
        self._compiled: dict = {}
        variables, self.variables = self.variables, None
        if variables is None and self.model is not None and _is_built(self.model):
            variables = self.model.trainable_variables
        # As early as possible: outside replicas.
        if variables:
            self._build(variables)

    @property
    def global_step(self) -> keras.Variable:
        """The variable that counts the applied steps."""
        return iteration_variable(chain_of(self.optimizer)[-1])

    def write_summaries(
        self, log_dir: str | os.PathLike[str] = "logs", every: int = 100
    ) -> None:
        """Starts writing the summaries to a file for TensorBoard.

        Each write synchronises host and device, so no `tf.function` may call the op.

        Args:
            log_dir: The directory. Defaults to `"logs"`.
            every: The number of updates between two writes. Defaults to `100`.
        """
        self._write_every = check_positive_int("every", every)
        check_path("log_dir", log_dir)
        writer = SummaryWriter() if self._writer is None else self._writer
        writer.begin(log_dir)
        self._writer = writer

    def __call__(self, *batch: Any, skip_update: bool | None = None) -> Tensor:
        """Runs one step; returns the loss of the batch, a float32 scalar tensor.

        Args:
            *batch: The arguments of the loss: nested structures of arrays or tensors.
            skip_update: Whether to only accumulate the gradients. Defaults to `None`:
                `skip_update_ph`'s value; without it every `iter_size`-th call updates.
        """
        backend.replicas.check_replica_context("train_op")
        batch = keras.tree.map_structure(_as_tensor, batch)
        skips = self._skips_update(skip_update)
        if self.variables is None:
            # The call also lets the layers of the model create their variables.
            read = backend.host.trained_variables(lambda: self._compute_loss(batch))
            self._build(read if self.model is None else self.model.trainable_variables)
        if not skips:
            return self._update(batch)
        loss = self._run(self._accumulate_step, *batch)
        self._micro_steps += 1
        return loss

    def _skips_update(self, skip_update: bool | None) -> bool:
        """Whether a call only accumulates the gradients, given its argument."""
        placeholder = self.skip_update_ph
        if skip_update is None and placeholder is not None:
            value = placeholder() if callable(placeholder) else placeholder
            skip_update = ops.convert_to_numpy(value)
        if skip_update is None:
            return self._micro_steps + 1 < self.iter_size
        if skip_update and self.iter_size == 1:
            raise ValueError(
                "With `iter_size=1` every call updates the variables. Write "
                "`optimize_loss(..., iter_size=n)` to accumulate the gradients of n "
                "batches. Received: skip_update=True"
            )
        return bool(skip_update)

    def _update(self, batch: Sequence[Any]) -> Tensor:
        """Runs a step that updates the variables; returns the loss of its batch."""
        updates = self._updates + 1
        writes = self._writer is not None and updates % self._write_every == 0
        summaries = tuple(self.summaries) if writes else ()
        if self.on_horovod:
            check_processes_run()
            # A program that `jax.jit` compiles cannot wait for another process.
            loss, grads = self._run(self._gradients_step, *batch)
            grads = average_over_processes(grads)
            reports = self._run(self._finish_step, *grads, summaries=summaries)
        else:
            loss, reports = self._run(self._update_step, *batch, summaries=summaries)
        self._updates, self._micro_steps = updates, 0
        if writes:
            # Both counts include the steps from before the optimizer was loaded.
            skipped = 0 if self._scaler is None else self._scaler.skipped_steps
            attempted = ops.convert_to_numpy(ops.add(self.global_step, skipped))
            self._writer.write([(int(attempted), reports)])
        return loss

    # --- Building and compiling ---------------------------------------------

    def _build(self, variables: Iterable[keras.Variable]) -> None:
        """Builds the optimizer and the accumulators for the variables to train."""
        variables = list(variables)
        if not variables:
            raise ValueError(
                "There is nothing to train: the loss reads no trainable variable. Pass "
                "`var_list` or `model`."
            )
        self.optimizer.build(variables)
        check_known(self.optimizer, variables)
        if self.iter_size > 1:
            self.accumulators = [zeros_of(v, "float32") for v in variables]
        # Whether a variable has ever had a gradient.
        self._has_gradient = [False] * len(variables)
        self.variables = variables

    def _run(self, step: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Runs a step compiled; `options` are constants in its program."""
        # A trace fixes the options and which gradients exist.
        key = step.__name__, *options.values(), *self._has_gradient
        if key not in self._compiled:
            self._compiled[key] = compile_step(
                lambda *tensors: step(*tensors, **options)
            )
        return self._compiled[key](*arguments)

    # --- The compiled steps ---------------------------------------------------

    def _update_step(self, *batch: Any, summaries: Sequence[str]) -> tuple[Any, ...]:
        """Returns the loss and the summaries of a step that updates."""
        loss, grads = self._gradients_step(*batch)
        return loss, self._finish_step(*grads, summaries=summaries)

    def _accumulate_step(self, *batch: Any) -> Tensor:
        """Adds a share of the gradients to the accumulators; returns the loss."""
        loss, grads = self._gradients(batch)
        for i, grad in enumerate(grads):
            if grad is not None:
                self._has_gradient[i] = True
                self.accumulators[i].assign_add(backend.to_dense(grad) / self.iter_size)
        return loss

    def _gradients_step(self, *batch: Any) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the loss and the mean gradients of the batches of this update."""
        if not self.accumulators:
            return self._gradients(batch)
        loss = self._accumulate_step(*batch)
        pairs = zip(self.accumulators, self._has_gradient, strict=True)
        means = [ops.copy(a) if has_gradient else None for a, has_gradient in pairs]
        for accumulator in self.accumulators:
            accumulator.assign(ops.zeros(accumulator.shape, "float32"))
        return loss, means

    def _gradients(self, batch: Sequence[Any]) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the loss and its gradients, unscaled and in float32."""
        scale = 1.0 if self._scaler is None else self._scaler.loss_scale
        loss, grads = backend.host.compute_gradients(
            lambda: times(self._compute_loss(batch), scale), self.variables
        )
        inv_scale = 1.0 / scale
        loss = ops.cast(times(ops.stop_gradient(loss), inv_scale), "float32")
        return loss, [
            g
            if g is None or is_overwritten(v)
            else backend.map_values(lambda x: times(x, inv_scale), g)
            for g, v in zip(grads, self.variables, strict=True)
        ]

    def _compute_loss(self, batch: Sequence[Any]) -> Tensor:
        """Returns the loss of a batch, a scalar."""
        with model_at_hand(self.model):
            return _check_scalar(self.loss(*batch))

    def _finish_step(
        self, *grads: Tensor | None, summaries: Sequence[str]
    ) -> dict[str, Tensor]:
        """Applies averaged gradients; returns the summaries' tensors by their tags."""
        reports = {}
        if summaries:
            reports = collect(summaries, self.optimizer, grads, self.variables)
        applied: Sequence[Tensor | None] = grads
        if self.clip_gradients is not None:
            applied, _ = _clip_by_global_norm(grads, self.clip_gradients, None)
        unscaled = {} if self._scaler is None else {"scaled": False}
        with reduced_gradients(self.optimizer, self.on_horovod):
            self.optimizer.apply(applied, self.variables, **unscaled)
        return reports


def _is_built(layer: keras.layers.Layer) -> bool:
    """Whether the layer and all nested layers have created their variables."""
    return layer.built and all(map(_is_built, getattr(layer, "layers", [])))


def _as_tensor(value: Any) -> Tensor | None:
    """Returns a value as a tensor; casts a float64 array to `floatx`, as `fit` does."""
    if value is None or ops.is_tensor(value):
        return value
    array = np.asarray(value)
    if array.dtype == "float64":
        array = array.astype(keras.config.floatx())
    return ops.convert_to_tensor(array)


def _check_scalar(loss: Any) -> Tensor:
    """Returns the loss as a tensor; raises an error if it is not a scalar."""
    if loss is None:
        raise TypeError("The `loss` returns None. Does it end without `return`?")
    loss = ops.convert_to_tensor(loss)
    if tuple(loss.shape):
        raise ValueError(
            "The `loss` must return a scalar, such as `ops.mean(losses)`. It returned "
            f"a tensor of shape {tuple(loss.shape)}"
        )
    return loss


# --- Clipping by the global norm, computed in float32 as in OpenSeq2Seq --------------


def _clip_by_global_norm(
    t_list: Sequence[Tensor | None],
    clip_norm: float | Tensor,
    use_norm: float | Tensor | None,
    name: str | None = None,
) -> tuple[list[Tensor | None], Tensor]:
    """Multiplies all tensors by `clip_norm / max(global_norm, clip_norm)`.

    The norm is accumulated in float32, since the squares of float16 gradients overflow.
    If it is not finite, all values become NaN, so that no infinite gradient is applied.

    Args:
        t_list: Tensors, dense or sparse, or None.
        clip_norm: The global norm to clip to, above 0.
        use_norm: Scalar (tensor). The L2 norm of all elements, or None to compute it.
        name: Defaults to `None`. Keras 3 does not name operations.

    Returns:
        The list of clipped tensors in their dtypes, or None, and the norm in float32.

    Raises:
        TypeError: If `t_list` is not a sequence.
        ValueError: If `clip_norm` is not above 0.

    Example:

    >>> from keras import ops
    >>> from keras_lso.compat.open_seq2seq.optimizers import _clip_by_global_norm
    >>> tensors = [ops.array([3.0, 0.0]), None, ops.array([4.0])]
    >>> [first, none, last], norm = _clip_by_global_norm(tensors, 2.5, None)
    >>> print(ops.convert_to_numpy(first), none, ops.convert_to_numpy(last))
    [1.5 0. ] None [2.]
    >>> float(norm)
    5.0
    """
    if not isinstance(t_list, list | tuple):
        raise refusal("t_list", t_list, "be a list or a tuple of tensors", TypeError)
    if not ops.is_tensor(clip_norm) and not backend.is_variable(clip_norm):
        check_positive("clip_norm", clip_norm)
    tensors = backend.as_gradients(t_list)
    norm = global_norm(tensors) if use_norm is None else use_norm
    norm = ops.convert_to_tensor(norm, dtype="float32")
    clip_norm = ops.convert_to_tensor(clip_norm, dtype="float32")
    factor = clip_norm / ops.maximum(norm, clip_norm)
    # `maximum` does not propagate NaN in every framework. inf - inf is NaN.
    factor = ops.where(ops.isfinite(norm), factor, norm - norm)

    def clip(values):
        return ops.cast(times(values, factor), values.dtype)

    return [t if t is None else backend.map_values(clip, t) for t in tensors], norm


def global_norm(tensors: Iterable[Tensor | None]) -> Tensor:
    """Returns the norm of all tensors together as a float32 scalar tensor."""
    tensors = [t for t in tensors if t is not None]
    if not tensors:
        return ops.zeros((), dtype="float32")
    norms = [ops.cast(norm, "float32") for norm in backend.l2_norms(tensors)]
    return norm_of(ops.stack(norms))


def norm_of(tensor: Tensor) -> Tensor:
    """Returns the L2 norm of a tensor, dense or sparse, in float32 or wider."""
    [norm] = backend.l2_norms([tensor])
    return norm


def _clip_gradients_by_norm(
    grads_and_vars: Iterable[tuple[Tensor | None, keras.Variable]],
    clip_gradients: float,
) -> list[tuple[Tensor | None, keras.Variable]]:
    """Returns the `(gradient, variable)` pairs, clipped to a global norm above 0."""
    grads, variables = split_pairs(grads_and_vars)
    clipped, _ = _clip_by_global_norm(grads, clip_gradients, None)
    return list(zip(clipped, variables, strict=True))


# --- Summaries for TensorBoard ----------------------------------------------------


_FROM_GRADIENT = {"gradients": backend.to_dense, "gradient_norm": norm_of}
_FROM_VARIABLE = {
    # A copy, since on PyTorch the step updates the variable in place.
    "variables": lambda variable: ops.copy(in_float32(variable)),
    "variable_norm": lambda variable: norm_of(ops.convert_to_tensor(variable)),
}


def collect(
    summaries: Sequence[str],
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Tensor | None],
    variables: Sequence[keras.Variable],
) -> dict[str, Tensor]:
    """Returns tensors by their tags, before the step with these gradients."""
    chain = chain_of(optimizer)
    reports: dict[str, Tensor] = {}
    if "learning_rate" in summaries:
        rate = ops.convert_to_tensor(chain[-1].learning_rate)
        reports["learning_rate"] = ops.cast(rate, "float32")
    if "global_gradient_norm" in summaries:
        reports["global_gradient_norm"] = _finite(global_norm(grads))
    from_gradient = {n: f for n, f in _FROM_GRADIENT.items() if n in summaries}
    from_variable = {n: f for n, f in _FROM_VARIABLE.items() if n in summaries}
    paths: list[str] = []
    for variable in variables:
        path = path_of(variable)
        paths.append(f"{path}_{paths.count(path)}" if path in paths else path)
    for path, grad, variable in zip(paths, grads, variables, strict=True):
        if grad is not None:
            for name, compute in from_gradient.items():
                reports[f"{name}/{path}"] = _finite(compute(grad))
        for name, compute in from_variable.items():
            reports[f"{name}/{path}"] = compute(variable)
    for wrapper in chain:
        if "loss_scale" in summaries and isinstance(wrapper, LossScaleOptimizer):
            reports["loss_scale"] = wrapper.loss_scale
        if "larc_summaries" in summaries and isinstance(wrapper, LARC):
            ratios = zip(paths, wrapper.ratios(grads, variables), strict=True)
            reports |= {f"larc_ratio/{p}": r for p, r in ratios if r is not None}
    return reports


def _finite(values: Tensor) -> Tensor:
    """Replaces non-finite values by 0, since no histogram accepts them."""
    values = ops.convert_to_tensor(values)
    return ops.where(ops.isfinite(values), values, ops.zeros_like(values))
