"""Restores moving statistics, such as BatchNormalization's, after a skipped step."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.tensors import ModelT, Tensor
from keras_lso._core.checks import refusal
from keras_lso._core.gradients import as_list
from keras_lso._keras_internals.layers import (
    build_by_batch,
    identity_of,
    layer_state_of,
    optimizers_in,
    train_step_is_stateless,
)
from keras_lso._keras_internals.optimizers import optimizers_in as all_in
from keras_lso._keras_internals.variables import live_storage_of
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.optimizers.guarded import wrapper_for

_Guards = list[LossScaleOptimizer]


def protect_statistics(model: ModelT) -> ModelT:
    """Protects the moving statistics of a model from skipped steps.

    Otherwise an overflow in the forward pass makes the moving statistics of
    `BatchNormalization` NaN, and then all results of `evaluate` and `predict`, although
    the step is skipped (https://github.com/pytorch/pytorch/issues/88474).

    After this call, a skipped step, or a skipped micro-batch, also leaves the
    non-trainable variables of layers unchanged, bit for bit, as well as the states of
    stateful recurrent layers and, on PyTorch, the buffers of a `TorchModuleWrapper`.
    Metrics and the states of seed generators still change. If a train step applies
    several optimizers, like that of a GAN, any of them may skip.

    Not restored are trainable weights that a `call` writes to, variables of a
    `TFSMLayer`'s SavedModel and, unless the model has its own `train_step`, weights of
    frozen layers. The protection takes effect in `fit` and `train_on_batch`, compiled
    or not. For other loops see `restore_if_skipped`.

    Args:
        model: A `keras.Model`, which is returned, before or after `compile`, which may
            be called again. A copy of it, or a model from a file, needs its own call.

    Raises:
        TypeError: If `model` is not a `keras.Model`.
        ValueError: If the model is compiled without a `keras_lso.LossScaleOptimizer`;
            at the first step if it is compiled that way later.

    Example:

    >>> import numpy as np, keras, keras_lso
    >>> norm = keras.layers.BatchNormalization()
    >>> model = keras.Sequential([keras.Input((2,)), norm, keras.layers.Dense(1)])
    >>> model.compile(keras_lso.LossScaleOptimizer(keras.optimizers.SGD()), loss="mse")
    >>> model = keras_lso.protect_statistics(model)
    >>> x = np.full((4, 2), np.inf, "float32")
    >>> history = model.fit(x, np.ones((4, 1)), verbose=0)
    >>> int(model.optimizer.skipped_steps), norm.moving_mean.numpy().tolist()
    (1, [0.0, 0.0])
    """
    if not isinstance(model, keras.Model):
        raise refusal("model", model, "be a `keras.Model`", TypeError)
    if keras.config.is_nnx_enabled():
        raise ValueError(
            "With `keras.config.set_nnx_enabled(True)` `fit` calls the `train_step` of "
            "the model's class, which cannot be changed for one model. Turn NNX off."
        )
    if model.compiled:
        _remember(_guards_of(model))
    if not isinstance(model.train_step, _ProtectedStep):
        model.train_step = _ProtectedStep(model, model.train_step)
        if model.train_function is not None:
            model.make_train_function(force=True)
    return model


@contextlib.contextmanager
def restore_if_skipped(
    model: keras.layers.Layer | Sequence[keras.layers.Layer],
    optimizer: keras.optimizers.Optimizer | Sequence[keras.optimizers.Optimizer],
) -> Iterator[None]:
    """Restores a model's moving statistics after a skipped step of your own loop.

    It does for the step in its `with` block what `protect_statistics` does for `fit`,
    and also restores weights of frozen layers. It does not synchronise with the device,
    and works in a `tf.function` and in the replicas of a `tf.distribute.Strategy`. For
    `jax.jit` use `stateless_restore_if_skipped`.

    Args:
        model: A built `keras.layers.Layer` that contains all layers that the step
            calls; or a list of such layers.
        optimizer: The `keras_lso.LossScaleOptimizer` of the step; or a list of all
            optimizers of the step, each of which may skip.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If the step creates variables: build the model before.

    Example:

    >>> import numpy as np, keras, keras_lso
    >>> norm = keras.layers.BatchNormalization()
    >>> model = keras.Sequential([keras.Input((2,)), norm, keras.layers.Dense(1)])
    >>> optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD())
    >>> x = np.full((4, 2), np.inf, "float32")
    >>> loss = lambda: keras.ops.mean(model(x, training=True))
    >>> with keras_lso.restore_if_skipped(model, optimizer):
    ...     gradients = optimizer.minimize(loss, model.trainable_variables)
    >>> norm.moving_mean.numpy().tolist()
    [0.0, 0.0]
    """
    layers, guards = _check_layers(model), _check_optimizers(optimizer)

    def state() -> list[Any]:
        variables = [v for layer in layers for v in layer_state_of(layer, True)]
        return list({identity_of(v): v for v in variables}.values())

    with _restored(state, guards):
        yield


def stateless_restore_if_skipped(
    model: keras.layers.Layer,
    optimizer: keras.optimizers.Optimizer,
    before: tuple[Iterable[Tensor], Iterable[Tensor]],
    after: tuple[Iterable[Tensor], Iterable[Tensor]],
) -> list[Tensor]:
    """Returns the non-trainable variables after a step, or before it if it was skipped.

    It is `restore_if_skipped` for `jax.jit`: it takes and returns values. Those of
    `model.stateless_call` do not include the states of stateful recurrent layers.

    Args:
        model: A built `keras.layers.Layer`.
        optimizer: The `keras_lso.LossScaleOptimizer`, or an optimizer that wraps it.
        before: Tuple of two lists of tensors, the values of
            `model.non_trainable_variables` and of `optimizer.variables`.
        after: The same lists after the step.

    Raises:
        TypeError: If `model` is not a layer, or `optimizer` not a `LossScaleOptimizer`.
        ValueError: If the lists have the wrong lengths.

    Example:

    ```python
    trainable, new_state = optimizer.stateless_apply(state, grads, trainable)
    non_trainable = keras_lso.stateless_restore_if_skipped(
        model, optimizer, (non_trainable, state), (new_non_trainable, new_state)
    )
    ```
    """
    # Only one of each, since their values are in one list.
    [layer], guards = _check_layers([model]), _check_optimizers([optimizer])
    expected = [len(layer.non_trainable_variables), len(optimizer.variables)]
    for name, pair in {"before": before, "after": after}.items():
        lists = as_list(name, pair, "two lists of tensors")
        lengths = [len(as_list(name, values, "tensors")) for values in lists]
        if lengths != expected:
            raise ValueError(
                f"`{name}` must be a tuple of the values of the layer's non-trainable "
                f"variables and of `optimizer.variables`, of the lengths {expected}. "
                f"Received: lists of the lengths {lengths}"
            )
    restored = layer_state_of(layer, includes_frozen=True)
    skipped = _was_skipped(optimizer, guards, before[1], after[1])
    return _select(layer, restored, skipped, before[0], after[0])


class _ProtectedStep:
    """The `train_step` of one model, without a trace of skipped steps."""

    protects_statistics = True

    def __init__(self, model: keras.Model, step: Callable[..., Any]) -> None:
        self._model, self._step = model, step
        function = getattr(step, "__func__", None)
        self._includes_frozen = function is not keras.Model.train_step
        self._has_built = False
        functools.update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        guards = _guards_of(self._model)
        _remember(guards)
        if train_step_is_stateless():
            return self._step_on_values(guards, *args, **kwargs)
        if not self._has_built:
            # A variable that the step creates has no value before the step.
            build_by_batch(self._model, args[0] if args else kwargs["data"])
            self._has_built = True
        with _restored(self._layer_state, guards):
            return self._step(*args, **kwargs)

    def _layer_state(self) -> list[Any]:
        """Returns the variables that a skipped step restores."""
        return layer_state_of(self._model, self._includes_frozen)

    def _step_on_values(self, guards: _Guards, state: Any, data: Any) -> Any:
        """Makes a step that takes the values of variables and returns new ones."""
        logs, new_state = self._step(state, data)
        _, old, before, _ = state
        trainable, new, after, metrics = new_state
        skipped = _was_skipped(self._model.optimizer, guards, before, after)
        selected = _select(self._model, self._layer_state(), skipped, old, new)
        return logs, (trainable, selected, after, metrics)


@contextlib.contextmanager
def _restored(
    find: Callable[[], list[keras.Variable]], guards: _Guards
) -> Iterator[None]:
    """Restores the variables that `find` returns if one of the optimizers skips."""
    variables = find()
    values = backend.copies_of(live_storage_of(variables))
    count = _skipped_by(guards)
    yield
    known = {identity_of(v) for v in variables}
    new = [v.path for v in find() if identity_of(v) not in known]
    if new:
        raise ValueError(
            "The step has created variables, or given a buffer another shape or dtype: "
            "there are no values to restore. Build the model first: call it on a batch "
            "or call `model.build(...)`. Keep a tensor that changes its shape as a "
            f"plain attribute of the module. Received: {new}"
        )
    skipped = ops.not_equal(count, _skipped_by(guards))
    backend.restore(live_storage_of(variables), values, skipped)


def _skipped_by(guards: _Guards) -> Tensor:
    """Returns how many steps the optimizers have skipped together."""
    return sum(guard.skipped_steps for guard in guards)


def _was_skipped(
    optimizer: keras.optimizers.Optimizer, guards: _Guards, before: Any, after: Any
) -> Tensor:
    """Returns whether one of the guards skipped, given the optimizer's values."""
    counts = []
    for values in (before, after):
        mapping = list(zip(optimizer.variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            counts.append(_skipped_by(guards))
    return ops.not_equal(*counts)


def _select(
    layer: keras.layers.Layer, restored: list[Any], skipped: Tensor, old: Any, new: Any
) -> list[Tensor]:
    """Returns non-trainable values after a step; of a skipped one, those to restore."""
    ids = {id(variable) for variable in restored}
    rows = zip(layer.non_trainable_variables, old, new, strict=True)
    return [ops.where(skipped, a, b) if id(v) in ids else b for v, a, b in rows]


def _remember(guards: _Guards) -> None:
    """Lets the configs of optimizers say that they train a protected model."""
    for guard in guards:
        if not guard._protects:
            guard._protects = True


def _guards_of(model: keras.Model) -> _Guards:
    """Returns the optimizers of a compiled model that skip steps."""
    guards = _skipping(optimizers_in(model))
    if train_step_is_stateless():
        # Another optimizer, such as that of a nested model, cannot apply in this train
        # step.
        known = {id(v) for v in getattr(model.optimizer, "variables", ())}
        guards = [o for o in guards if id(o.dynamic_scale) in known]
    if not guards:
        wrapper = f"keras_lso.{wrapper_for(model)}"
        raise ValueError(
            f"`protect_statistics` needs a `{wrapper}`, which tells which step was "
            f"skipped. Write `model.compile({wrapper}(optimizer), ...)`. Received: "
            f"model.optimizer={getattr(model, 'optimizer', None)!r}"
        )
    return guards


def _check_optimizers(optimizer: Any) -> _Guards:
    """Returns the optimizers in an argument that skip steps; each must have some."""
    guards = []
    for item in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        inner = all_in(item) if isinstance(item, keras.Optimizer) else []
        if not _skipping(inner):
            requirement = "be a `keras_lso.LossScaleOptimizer`, or a list of them"
            raise refusal("optimizer", optimizer, requirement, TypeError)
        guards += _skipping(inner)
    return guards


def _skipping(optimizers: list[keras.optimizers.Optimizer]) -> _Guards:
    """Returns those of the optimizers that skip steps."""
    return [o for o in optimizers if isinstance(o, LossScaleOptimizer)]


def _check_layers(model: Any) -> list[keras.layers.Layer]:
    """Returns the layers in an argument."""
    layers = list(model) if isinstance(model, list | tuple) else [model]
    if not all(isinstance(layer, keras.Layer) for layer in layers):
        raise refusal("model", model, "be a `keras.Model` or another layer", TypeError)
    return layers
