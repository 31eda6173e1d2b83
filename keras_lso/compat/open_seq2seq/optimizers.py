"""`optimize_loss`: checks its arguments and constructs a training op from them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from keras_lso._backend import backend
from keras_lso._backend.types import Tensor
from keras_lso._core.checks import (
    check_bool,
    check_factor,
    check_list,
    check_positive_int,
    check_scale,
)
from keras_lso._core.option_checks import check_names, check_variables
from keras_lso._keras_internals.optimizers import check_known
from keras_lso.compat.backend import check_processes_run
from keras_lso.compat.open_seq2seq._clipping import (
    _clip_by_global_norm,
    _clip_gradients_by_norm,
)
from keras_lso.compat.open_seq2seq._making import as_schedule, make_optimizer
from keras_lso.compat.open_seq2seq._optimizer_names import OPTIMIZER_CLS_NAMES
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
        loss,
        optimizer="Adam",
        optimizer_params={},
        learning_rate_decay_fn=lambda step: poly_decay(step, 1e-3, 10_000),
        dtype="mixed",
        loss_scaling="Backoff",
        model=model,
    )
    for x, y in batches:
        value = train_op(x, y)
    ```

    In OpenSeq2Seq the loss was a tensor of a graph. Here it is a function of a batch,
    and the training op takes the batch.

    Args:
        loss: Callable of a batch that returns the loss, a scalar. Call the model in it
            with `training=True`, or dropout and batch normalization run in inference
            mode.
        optimizer: A name from `OPTIMIZER_CLS_NAMES` (`"Adagrad"`, `"Adam"`,
            `"AdamW"`, `"Ftrl"`, `"LARS"`, `"Momentum"`, `"NovoGrad"`, `"RMSProp"`,
            `"SGD"`), a Keras optimizer class, or an instance. Optimizers given by name
            take the arguments of TF1, with its defaults, or the arguments of Keras.
        optimizer_params: Dict of the optimizer's arguments. None or empty for an
            instance.
        learning_rate_decay_fn: Callable of the number of applied steps that returns
            the learning rate, such as those in `lr_policies`, or a
            `keras.optimizers.schedules.LearningRateSchedule`. If None,
            `optimizer_params` or the instance determine the learning rate.
        var_list: The variables to train. Defaults to `None`: the trainable variables of
            `model`; without a model, those that the loss reads.
        dtype: `"mixed"`, or a dtype such as `"float32"`, `"float16"`, `tf.float16`.
            With `"mixed"`, the loss is scaled, and float16 variables have float32
            master weights. Defaults to `"float32"`. The model's dtype policy determines
            its compute dtype.
        clip_gradients: The global norm to clip the gradients to. Defaults to `None`: no
            clipping.
        summaries: Names from `OPTIMIZER_SUMMARIES`. Defaults to `None`:
            `"learning_rate"`, `"global_gradient_norm"` and `"loss_scale"`.
            `train_op.write_summaries(log_dir)` starts writing them.
        larc_params: Dict of `larc_eta`, and optionally `larc_mode` (`"clip"` or
            `"scale"`), `min_update` and `epsilon`, for `keras_lso.LARC`. Defaults to
            `None`: no LARC.
        loss_scaling: The loss scale, or `"Backoff"` or `"LogMax"` in any case. Only
            used with `dtype="mixed"`. Defaults to `1.0`.
        loss_scaling_params: Dict of parameters of `AutomaticLossScaler`. Defaults to
            `None`.
        on_horovod: Whether to average the gradients over all processes: those of
            `torch.distributed`, of multi-process JAX, of a `tf.distribute.Strategy`, or
            of Horovod. Defaults to `False`.
        iter_size: The number of batches whose gradients are averaged into one update.
            Defaults to `1`.
        skip_update_ph: A boolean variable, or a callable without arguments that
            returns a bool: whether a call only accumulates its gradients. Defaults to
            `None`: every `iter_size`-th call updates. For a single call, write
            `train_op(*batch, skip_update=True)`.
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
    _check_loss(loss)
    if summaries is None:
        summaries = DEFAULT_SUMMARIES
    _check_summaries(summaries)
    if clip_gradients is not None:
        _check_clipping(clip_gradients, larc_params)
    _check_model(model)
    if var_list is not None:
        var_list = check_variables("var_list", var_list)
    iter_size = check_positive_int("iter_size", iter_size)
    _check_placeholder(skip_update_ph, iter_size)
    if check_bool("on_horovod", on_horovod):
        check_processes_run()
    larc_arguments = None if larc_params is None else _larc_arguments(larc_params)
    is_mixed = isinstance(dtype, str) and dtype == "mixed"
    if not is_mixed:
        _check_dtype(dtype)
    loss_scale = _loss_scale(loss_scaling, loss_scaling_params)
    schedule = as_schedule(learning_rate_decay_fn)
    inner = make_optimizer(optimizer, optimizer_params, schedule)
    if is_mixed:
        check_inner_optimizer(inner, "optimizer")
    wrapped = inner if larc_arguments is None else LARC(inner, **larc_arguments)
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


def _check_loss(loss):
    if not callable(loss):
        raise TypeError(
            "Argument `loss` must be a callable of a batch, since Keras 3 has no graph "
            "in which a tensor could be recomputed. Write `def loss(x, y): return "
            "loss_fn(y, model(x, training=True))`, pass `loss`, and call "
            f"`train_op(x, y)`. Received: loss={loss!r} of type {type(loss).__name__}"
        )


def _check_summaries(summaries):
    for summary in check_list("summaries", summaries):
        if summary not in OPTIMIZER_SUMMARIES:
            raise ValueError(
                f"Summaries should be one of [{', '.join(OPTIMIZER_SUMMARIES)}], you "
                f"provided {summary}."
            )


def _check_clipping(clip_gradients, larc_params):
    check_factor("clip_gradients", clip_gradients, above=0.0)
    if larc_params is not None:
        raise AttributeError(
            "LARC and gradient norm clipping should not be used together. Received: "
            f"clip_gradients={clip_gradients!r}, larc_params={larc_params!r}"
        )


def _check_model(model):
    if model is not None and not isinstance(model, keras.Layer):
        raise TypeError(
            "Argument `model` must be a Keras model or None. Received: "
            f"model={model!r} of type {type(model).__name__}"
        )


def _check_placeholder(skip_update_ph, iter_size):
    if skip_update_ph is None:
        return
    if not callable(skip_update_ph) and not backend.is_variable(skip_update_ph):
        raise TypeError(
            "Argument `skip_update_ph` must be a boolean variable, such as "
            "`keras.Variable(False, dtype='bool', trainable=False)`, or a callable "
            "without arguments. For a single call write `train_op(*batch, "
            f"skip_update=True)`. Received: skip_update_ph={skip_update_ph!r} of type "
            f"{type(skip_update_ph).__name__}"
        )
    if iter_size == 1:
        raise ValueError(
            "With `iter_size=1` every call updates the variables, so there is nothing "
            f"to skip. Received: skip_update_ph={skip_update_ph!r}, iter_size=1"
        )


def _check_dtype(dtype):
    try:
        name = keras.backend.standardize_dtype(dtype)
    except ValueError:
        name = ""
    if "float" not in name:
        raise ValueError(
            "Argument `dtype` must be 'mixed' or a float dtype, such as 'float32' or "
            f"tf.float16. Received: dtype={dtype!r}"
        )


def _larc_arguments(larc_params):
    if not isinstance(larc_params, dict) or "larc_eta" not in larc_params:
        raise ValueError(
            "Argument `larc_params` must be a dict with 'larc_eta', such as "
            f"{{'larc_eta': 0.002}}. Received: larc_params={larc_params!r}"
        )
    check_names("LARC", "larc_params", larc_params, _LARC_PARAMS)
    return {_LARC_PARAMS[name]: value for name, value in larc_params.items()}


def _loss_scale(loss_scaling, params):
    if isinstance(loss_scaling, str):
        return AutomaticLossScaler(loss_scaling, params)
    if params is not None:
        raise ValueError(
            "`loss_scaling_params` are for `loss_scaling='Backoff'` or 'LogMax'. "
            f"Received: loss_scaling={loss_scaling!r}, loss_scaling_params={params!r}"
        )
    return check_scale("loss_scaling", loss_scaling)
