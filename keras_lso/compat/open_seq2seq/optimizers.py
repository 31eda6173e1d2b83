"""`optimize_loss`: checks its arguments and constructs a training op from them."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
from keras import ops

from keras_lso._backend.types import Tensor
from keras_lso._core.checks import (
    check_bool,
    check_factor,
    check_list,
    check_names,
    check_positive_int,
    check_scale,
)
from keras_lso._core.gradients import check_variables
from keras_lso._keras_internals.optimizers import check_known, schedule_of
from keras_lso.compat.backend import check_processes_run
from keras_lso.compat.open_seq2seq._clipping import (
    _clip_by_global_norm,
    _clip_gradients_by_norm,
)
from keras_lso.compat.open_seq2seq._optimizer_names import (
    OPTIMIZER_CLS_NAMES,
    NamedOptimizer,
)
from keras_lso.compat.open_seq2seq._summaries import (
    DEFAULT_SUMMARIES,
    OPTIMIZER_SUMMARIES,
)
from keras_lso.compat.open_seq2seq._training_op import TrainingOp
from keras_lso.compat.open_seq2seq.automatic_loss_scaler import AutomaticLossScaler
from keras_lso.compat.open_seq2seq.mp_wrapper import MixedPrecisionOptimizerWrapper
from keras_lso.compat.open_seq2seq.regularization import get_regularization_loss
from keras_lso.loss_scale_optimizer import check_inner_optimizer
from keras_lso.optimizers.larc import LARC

__all__ = [
    "OPTIMIZER_CLS_NAMES",
    "OPTIMIZER_SUMMARIES",
    "_clip_by_global_norm",
    "_clip_gradients_by_norm",
    "get_regularization_loss",
    "optimize_loss",
]

_LARC_PARAMS = {
    "larc_eta": "eta",
    "larc_mode": "mode",
    "min_update": "min_update",
    "epsilon": "epsilon",
}


def optimize_loss(
    loss: Callable[..., Tensor],
    optimizer: str | type[keras.optimizers.Optimizer] | keras.optimizers.Optimizer,
    optimizer_params: dict[str, Any] | None,
    learning_rate_decay_fn: Callable[[Any], Any] | None,
    var_list: Iterable[keras.Variable] | None = None,
    dtype: Any = "float32",
    clip_gradients: float | None = None,
    summaries: Sequence[str] | None = None,
    larc_params: dict[str, Any] | None = None,
    loss_scaling: float | str = 1.0,
    loss_scaling_params: dict[str, Any] | None = None,
    on_horovod: bool = False,
    iter_size: int = 1,
    skip_update_ph: keras.Variable | Callable[[], bool] | None = None,
    model: keras.Model | None = None,
) -> TrainingOp:
    """Returns a training op: a callable that runs one compiled training step.

    ```python
    def loss(x, y):
        predicted = model(x, training=True)
        return ops.mean(keras.losses.mean_squared_error(y, predicted))

    train_op = optimize_loss(
        loss, "Adam", {}, lambda step: poly_decay(step, 1e-3, 10_000), dtype="mixed",
        loss_scaling="Backoff", model=model,
    )
    for x, y in batches:
        value = train_op(x, y)
    ```

    Args:
        loss: Callable of a batch that returns the loss, a scalar. Call the model in it
            with `training=True`.
        optimizer: A name from `OPTIMIZER_CLS_NAMES`, a Keras optimizer class, or an
            instance. Optimizers given by name take the arguments of TF1, with its
            defaults, or the arguments of Keras.
        optimizer_params: Dict of the optimizer's arguments. None or empty for an
            instance.
        learning_rate_decay_fn: Callable of the number of applied steps that returns
            the learning rate, such as those in `lr_policies`, or a
            `keras.optimizers.schedules.LearningRateSchedule`. If None,
            `optimizer_params` or the instance determine the learning rate.
        var_list: The variables to train. Defaults to `None`: the trainable variables of
            `model`; without a model, those that the loss reads.
        dtype: `"mixed"`, or a float dtype. With `"mixed"`, the loss is scaled, and
            float16 variables have float32 master weights. Defaults to `"float32"`. The
            model's dtype policy determines its compute dtype.
        clip_gradients: The global norm to clip the gradients to. Defaults to `None`: no
            clipping.
        summaries: Names from `OPTIMIZER_SUMMARIES`, which
            `train_op.write_summaries(log_dir)` writes. Defaults to `None`:
            `"learning_rate"`, `"global_gradient_norm"` and `"loss_scale"`.
        larc_params: Dict of `larc_eta`, and optionally `larc_mode` (`"clip"` or
            `"scale"`), `min_update` and `epsilon`, for `keras_lso.LARC`. Defaults to
            `None`: no LARC.
        loss_scaling: The loss scale, or `"Backoff"` or `"LogMax"` in any case. Only
            used with `dtype="mixed"`. Defaults to `1.0`.
        loss_scaling_params: Dict of parameters of `AutomaticLossScaler`. Defaults to
            `None`.
        on_horovod: Whether to average the gradients over all processes: those of
            `torch.distributed`, of multi-process JAX, or of a `tf.distribute.Strategy`.
            Defaults to `False`.
        iter_size: The number of batches whose gradients are averaged into one update.
            Defaults to `1`.
        skip_update_ph: A boolean variable, or a callable without arguments that
            returns a bool: whether a call only accumulates its gradients. Defaults to
            `None`: every `iter_size`-th call updates.
        model: The Keras model to train. Defaults to `None`.

    Returns:
        A `TrainingOp`: `train_op(*batch)` runs a step and returns the loss. Its public
        attributes are `optimizer`, `global_step`, `variables` and `accumulators`.

    Raises:
        ValueError, TypeError: If an argument is not valid.
        AttributeError: If both `clip_gradients` and `larc_params` are given.
        RuntimeError: If `on_horovod=True` and no processes were started.

    Example:

    >>> import keras
    >>> from keras import ops
    >>> from keras_lso.compat.open_seq2seq import exp_decay, optimize_loss
    >>> w = keras.Variable([3.0, 4.0])
    >>> train_op = optimize_loss(
    ...     lambda target: ops.sum(ops.square(w - target)) / 2,
    ...     optimizer="SGD",
    ...     optimizer_params={},
    ...     learning_rate_decay_fn=lambda step: exp_decay(step, 0.5, 1, 0.5, False),
    ... )
    >>> [float(train_op(ops.zeros(2))) for _ in range(3)]
    [12.5, 3.125, 1.7578125]

    Reference:

    - [OpenSeq2Seq, optimizers](
        https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html)
    """
    summaries = DEFAULT_SUMMARIES if summaries is None else summaries
    _check_step(loss, summaries, clip_gradients, larc_params)
    if var_list is not None:
        var_list = check_variables("var_list", var_list)
    iter_size = check_positive_int("iter_size", iter_size)
    if check_bool("on_horovod", on_horovod):
        check_processes_run()
    is_mixed = isinstance(dtype, str) and dtype == "mixed"
    if not is_mixed and "float" not in keras.backend.standardize_dtype(dtype):
        raise ValueError(
            "Argument `dtype` must be 'mixed' or a float dtype, such as 'float32' or "
            f"tf.float16. Received: dtype={dtype!r}"
        )
    loss_scale = _loss_scale(loss_scaling, loss_scaling_params)
    schedule = _as_schedule(learning_rate_decay_fn)
    inner = _make_optimizer(optimizer, optimizer_params, schedule)
    if is_mixed:
        check_inner_optimizer(inner, "optimizer")
    wrapped = inner if larc_params is None else _in_larc(inner, larc_params)
    if is_mixed:
        wrapped = MixedPrecisionOptimizerWrapper(wrapped, loss_scale)
    if inner.built and var_list is not None:
        check_known(inner, var_list)
    # Last, so that a call that raises an error leaves the instance unchanged.
    if inner is optimizer and schedule is not None:
        optimizer.learning_rate = schedule
    return TrainingOp(
        loss,
        wrapped,
        variables=var_list,
        model=model,
        clip_gradients=clip_gradients,
        summaries=summaries,
        on_horovod=on_horovod,
        iter_size=iter_size,
        skip_update_ph=skip_update_ph,
    )


def _check_step(loss, summaries, clip_gradients, larc_params):
    if not callable(loss):
        raise TypeError(
            "Argument `loss` must be a callable of a batch, since Keras 3 has no graph "
            "in which a tensor could be recomputed. Write `def loss(x, y): return "
            "loss_fn(y, model(x, training=True))`, pass `loss`, and call "
            f"`train_op(x, y)`. Received: loss={loss!r} of type {type(loss).__name__}"
        )
    for summary in check_list("summaries", summaries):
        if summary not in OPTIMIZER_SUMMARIES:
            raise ValueError(
                f"Summaries should be one of [{', '.join(OPTIMIZER_SUMMARIES)}], you "
                f"provided {summary}."
            )
    if clip_gradients is not None:
        check_factor("clip_gradients", clip_gradients, above=0.0)
        if larc_params is not None:
            raise AttributeError(
                "LARC and gradient norm clipping should not be used together. "
                f"Received: clip_gradients={clip_gradients!r}, "
                f"larc_params={larc_params!r}"
            )


def _in_larc(inner, params):
    if not isinstance(params, dict) or "larc_eta" not in params:
        raise ValueError(
            "Argument `larc_params` must be a dict with 'larc_eta', such as "
            f"{{'larc_eta': 0.002}}. Received: larc_params={params!r}"
        )
    check_names("LARC", "larc_params", params, _LARC_PARAMS)
    return LARC(inner, **{_LARC_PARAMS[name]: value for name, value in params.items()})


def _loss_scale(loss_scaling, params):
    if isinstance(loss_scaling, str):
        return AutomaticLossScaler(loss_scaling, params)
    if params is not None:
        raise ValueError(
            "`loss_scaling_params` are for `loss_scaling='Backoff'` or 'LogMax'. "
            f"Received: loss_scaling={loss_scaling!r}, loss_scaling_params={params!r}"
        )
    return check_scale("loss_scaling", loss_scaling)


# --- The optimizer and its schedule -------------------------------------------


def _make_optimizer(optimizer, params, schedule):
    """Returns the optimizer; the caller assigns the schedule to an instance."""
    params = dict(params or {})
    if isinstance(optimizer, keras.optimizers.Optimizer):
        if params:
            raise ValueError(
                "An optimizer that is an instance has its parameters already. Set "
                f"them there, or pass the class. Received: optimizer_params={params!r}"
            )
        if schedule is not None and schedule_of(optimizer) is not None:
            raise ValueError(
                "The optimizer has a learning-rate schedule of its own, or one that "
                "another training op gave it. Pass `learning_rate_decay_fn=None` to "
                f"keep it, or another optimizer. Received: optimizer={optimizer!r}"
            )
        made = optimizer
    else:
        if schedule is not None and "learning_rate" in params:
            raise ValueError(
                "`learning_rate_decay_fn` determines the learning rate. Leave "
                "'learning_rate' out of `optimizer_params`, or pass "
                "learning_rate_decay_fn=None. Received: "
                f"optimizer_params={params!r}"
            )
        rate = {} if schedule is None else {"learning_rate": schedule}
        made = _factory(optimizer)(**params, **rate)
    is_keras_own = type(made) is keras.optimizers.LossScaleOptimizer
    if is_keras_own or made.loss_scale_factor is not None:
        raise ValueError(
            "The optimizer must not scale the loss by Keras's own means, a "
            "`loss_scale_factor` or Keras's LossScaleOptimizer. Leave them out, and "
            "write `dtype='mixed'` with `loss_scaling`. Received: "
            f"optimizer={optimizer!r}, optimizer_params={params!r}"
        )
    return made


def _factory(optimizer):
    """Returns the callable that constructs the optimizer from its parameters."""
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZER_CLS_NAMES:
            raise ValueError(
                "Optimizer name should be one of "
                f"[{', '.join(OPTIMIZER_CLS_NAMES)}], you provided {optimizer}."
            )
        return OPTIMIZER_CLS_NAMES[optimizer]
    is_class = inspect.isclass(optimizer)
    is_optimizer = is_class and issubclass(optimizer, keras.optimizers.Optimizer)
    if is_optimizer or isinstance(optimizer, NamedOptimizer):
        return optimizer
    raise TypeError(
        "Argument `optimizer` must be a name from `OPTIMIZER_CLS_NAMES`, a subclass of "
        "`keras.optimizers.Optimizer` or an instance of one. Received: "
        f"optimizer={optimizer!r} of type {type(optimizer).__name__}"
    )


def _as_schedule(decay_fn):
    is_schedule = isinstance(decay_fn, keras.optimizers.schedules.LearningRateSchedule)
    if decay_fn is None or is_schedule:
        return decay_fn
    if callable(decay_fn):
        return _DecayFunction(decay_fn)
    raise TypeError(
        "Argument `learning_rate_decay_fn` must be a callable of the step, such as "
        "`lambda step: exp_decay(step, ...)`, or None. Received: "
        f"learning_rate_decay_fn={decay_fn!r} of type {type(decay_fn).__name__}"
    )


class _DecayFunction(keras.optimizers.schedules.LearningRateSchedule):
    """A function of the step as a schedule."""

    def __init__(self, decay_fn):
        self._decay_fn = decay_fn

    def __call__(self, step):
        rate = self._decay_fn(ops.convert_to_tensor(step))
        # In eager mode the decays of TF1 return functions.
        rate = rate() if callable(rate) else rate
        return ops.convert_to_tensor(rate, dtype="float32")

    def get_config(self):
        raise NotImplementedError(
            "A `learning_rate_decay_fn` cannot be saved. Pass a schedule in its "
            "place, such as `keras_lso.compat.open_seq2seq.PolyDecay(...)`."
        )
