"""`optimize_loss`: constructs a training op, and an optimizer by its name in TF1."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor
from keras_lso._core.checks import (
    check_bool,
    check_choice,
    check_items,
    check_positive,
    check_positive_int,
    check_scale,
    refusal,
)
from keras_lso._core.gradients import check_variables
from keras_lso._keras_internals.optimizers import check_known
from keras_lso._keras_internals.state import schedule_of, slots_of
from keras_lso.compat.backend import check_processes_run
from keras_lso.compat.open_seq2seq._training_op import (
    OPTIMIZER_SUMMARIES,
    TrainingOp,
    _clip_by_global_norm,
    _clip_gradients_by_norm,
)
from keras_lso.compat.open_seq2seq.automatic_loss_scaler import (
    AutomaticLossScaler,
    check_names,
)
from keras_lso.compat.open_seq2seq.mp_wrapper import MixedPrecisionOptimizerWrapper
from keras_lso.compat.open_seq2seq.regularization import get_regularization_loss
from keras_lso.optimizers.larc import LARC
from keras_lso.optimizers.lars import LARS
from keras_lso.optimizers.novograd import NovoGrad

__all__ = [
    "OPTIMIZER_CLS_NAMES",
    "OPTIMIZER_SUMMARIES",
    "_clip_by_global_norm",
    "_clip_gradients_by_norm",
    "get_regularization_loss",
    "optimize_loss",
]


def __dir__() -> list[str]:
    return __all__


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
    """Returns a training op: `train_op(*batch)` runs a compiled step, returns the loss.

    It has the attributes `optimizer`, `global_step`, `variables` and `accumulators`.

    Args:
        loss: Returns a scalar for a batch. Call the model in it with `training=True`.
        optimizer: A name from `OPTIMIZER_CLS_NAMES`, a Keras class or an instance.
        optimizer_params: Dict of the optimizer's arguments; by name those of TF1, with
            its defaults, or those of Keras. None or empty for an instance.
        learning_rate_decay_fn: Callable of the number of applied steps that returns the
            rate, such as those in `lr_policies`, or a Keras schedule. If None,
            `optimizer_params` or the instance determine the rate.
        var_list: The variables to train. Defaults to `None`: the trainable variables of
            `model`; without a model, those that the loss reads.
        dtype: `"mixed"`: the loss is scaled, and float16 variables have float32 master
            weights. Or a float dtype, without effect. Defaults to `"float32"`.
        clip_gradients: The global norm to clip to. Defaults to `None`: no clipping.
        summaries: Names from `OPTIMIZER_SUMMARIES`, which
            `train_op.write_summaries(log_dir)` writes. Defaults to `None`:
            `"learning_rate"`, `"global_gradient_norm"` and `"loss_scale"`.
        larc_params: Dict of `larc_eta`, and optionally `larc_mode`, `min_update` and
            `epsilon`, for `keras_lso.LARC`. Defaults to `None`: no LARC.
        loss_scaling: For `dtype="mixed"`: a number, `"Backoff"` or `"LogMax"` in any
            case. Defaults to `1.0`.
        loss_scaling_params: The `params` of `AutomaticLossScaler`. Defaults to `None`.
        on_horovod: Whether to average gradients over all processes: of JAX,
            `torch.distributed` or a `tf.distribute.Strategy`. Defaults to `False`.
        iter_size: The number of batches whose mean gradient updates. Defaults to `1`.
        skip_update_ph: A boolean variable, or a callable that returns a bool: whether a
            call only accumulates. Defaults to `None`: each `iter_size`-th call updates.
        model: The Keras model to train. Defaults to `None`.

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
    """
    _check_step(loss, clip_gradients, larc_params)
    if summaries is None:
        summaries = ["learning_rate", "global_gradient_norm", "loss_scale"]
    check_summary = partial(check_choice, choices=OPTIMIZER_SUMMARIES)
    summaries = check_items(check_summary, "summaries", summaries)
    if var_list is not None:
        var_list = check_variables("var_list", var_list)
    iter_size = check_positive_int("iter_size", iter_size)
    if check_bool("on_horovod", on_horovod):
        check_processes_run()
    schedule = _as_schedule(learning_rate_decay_fn)
    made = inner = _make_optimizer(optimizer, optimizer_params, schedule)
    if larc_params is not None:
        made = _in_larc(made, larc_params)
    loss_scale = _loss_scale(loss_scaling, loss_scaling_params)
    if isinstance(dtype, str) and dtype == "mixed":
        made = MixedPrecisionOptimizerWrapper(made, loss_scale)
    elif not keras.backend.is_float_dtype(dtype):
        raise refusal("dtype", dtype, "be 'mixed' or a float dtype such as 'float32'")
    if inner.built and var_list is not None:
        check_known(inner, var_list)
    # Last, so that a call that raises an error leaves the instance unchanged.
    if inner is optimizer and schedule is not None:
        optimizer.learning_rate = schedule
    return TrainingOp(
        loss,
        made,
        variables=var_list,
        model=model,
        clip_gradients=clip_gradients,
        summaries=summaries,
        on_horovod=on_horovod,
        iter_size=iter_size,
        skip_update_ph=skip_update_ph,
    )


def _check_step(loss: Any, clip_gradients: Any, larc_params: Any) -> None:
    """Checks the loss, and the two arguments that change its gradients."""
    if not callable(loss):
        requirement = (
            "be a function of a batch, `def loss(x, y): return loss_fn(y, model(x, "
            "training=True))`, since Keras 3 has no graph in which a tensor could be "
            "computed again"
        )
        raise refusal("loss", loss, requirement, TypeError)
    if clip_gradients is not None:
        check_positive("clip_gradients", clip_gradients)
        if larc_params is not None:
            raise AttributeError(
                "LARC and gradient norm clipping should not be used together. "
                f"Received: clip_gradients={clip_gradients!r}, "
                f"larc_params={larc_params!r}"
            )


def _in_larc(inner: keras.optimizers.Optimizer, params: Any) -> LARC:
    """Returns a `LARC` around the optimizer, from `larc_params`."""
    if not isinstance(params, dict) or "larc_eta" not in params:
        requirement = "be a dict with 'larc_eta', such as {'larc_eta': 0.002}"
        raise refusal("larc_params", params, requirement)
    known = ("larc_eta", "larc_mode", "min_update", "epsilon")
    check_names("LARC", "larc_params", params, known)
    return LARC(inner, **{k.removeprefix("larc_"): v for k, v in params.items()})


def _loss_scale(loss_scaling: Any, params: Any) -> AutomaticLossScaler | float:
    """Returns the loss scale of `loss_scaling` and `loss_scaling_params`."""
    if isinstance(loss_scaling, str):
        return AutomaticLossScaler(loss_scaling, params)
    if params is not None:
        raise ValueError(
            "`loss_scaling_params` are for `loss_scaling='Backoff'` or 'LogMax'. "
            f"Received: loss_scaling={loss_scaling!r}, loss_scaling_params={params!r}"
        )
    return check_scale("loss_scaling", loss_scaling)


# --- The optimizer and its schedule -------------------------------------------


def _make_optimizer(
    optimizer: Any, params: dict[str, Any] | None, schedule: LearningRateSchedule | None
) -> keras.optimizers.Optimizer:
    """Returns the optimizer; the caller assigns the schedule to an instance."""
    params = dict(params or {})
    made = optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        if schedule is not None and "learning_rate" in params:
            raise ValueError(
                "`learning_rate_decay_fn` determines the learning rate. Leave "
                "'learning_rate' out of `optimizer_params`, or pass "
                f"learning_rate_decay_fn=None. Received: optimizer_params={params!r}"
            )
        rate = {} if schedule is None else {"learning_rate": schedule}
        made = _factory(optimizer)(**params, **rate)
    elif params:
        raise ValueError(
            "An optimizer that is an instance has its parameters already. Set "
            f"them there, or pass the class. Received: optimizer_params={params!r}"
        )
    elif schedule is not None and schedule_of(optimizer) is not None:
        raise ValueError(
            "The optimizer has a learning-rate schedule of its own, or one that "
            "another training op gave it. Pass `learning_rate_decay_fn=None` to "
            f"keep it, or another optimizer. Received: optimizer={optimizer!r}"
        )
    is_of_keras = type(made) is keras.optimizers.LossScaleOptimizer
    if is_of_keras or made.loss_scale_factor is not None:
        raise ValueError(
            "The optimizer must not scale the loss by Keras's own means, a "
            "`loss_scale_factor` or Keras's LossScaleOptimizer. Leave them out, and "
            "write `dtype='mixed'` with `loss_scaling`. Received: "
            f"optimizer={optimizer!r}, optimizer_params={params!r}"
        )
    return made


def _factory(optimizer: Any) -> Callable[..., keras.optimizers.Optimizer]:
    """Returns the callable that constructs the optimizer from its parameters."""
    if isinstance(optimizer, str):
        name = check_choice("optimizer", optimizer, OPTIMIZER_CLS_NAMES)
        return OPTIMIZER_CLS_NAMES[name]
    is_class = isinstance(optimizer, type)
    is_optimizer = is_class and issubclass(optimizer, keras.optimizers.Optimizer)
    if is_optimizer or isinstance(optimizer, NamedOptimizer):
        return optimizer
    requirement = (
        "be a name from `OPTIMIZER_CLS_NAMES`, a subclass of "
        "`keras.optimizers.Optimizer` or an instance of one"
    )
    raise refusal("optimizer", optimizer, requirement, TypeError)


def _as_schedule(decay_fn: Any) -> LearningRateSchedule | None:
    """Returns a `learning_rate_decay_fn` as a schedule."""
    if decay_fn is None or isinstance(decay_fn, LearningRateSchedule):
        return decay_fn
    if callable(decay_fn):
        return _DecayFunction(decay_fn)
    requirement = "be a function of the step or a schedule, such as PolyDecay(0.1, 9)"
    raise refusal("learning_rate_decay_fn", decay_fn, requirement, TypeError)


class _DecayFunction(LearningRateSchedule):
    """A function of the step as a schedule."""

    def __init__(self, decay_fn: Callable[[Any], Any]) -> None:
        self._decay_fn = decay_fn

    def __call__(self, step: int | Tensor) -> Tensor:
        rate = self._decay_fn(ops.convert_to_tensor(step))
        # In eager mode the decays of TF1 return functions.
        rate = rate() if callable(rate) else rate
        return ops.convert_to_tensor(rate, dtype="float32")

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError(
            "A `learning_rate_decay_fn` cannot be saved. Pass a schedule in its "
            "place, such as `keras_lso.compat.open_seq2seq.PolyDecay(...)`."
        )


# --- The optimizers that OpenSeq2Seq has names for, with the arguments of TF1 ---------


@dataclasses.dataclass(frozen=True)
class NamedOptimizer:
    """Constructs an optimizer from its arguments in TF1 or in Keras.

    `renamed` maps the names of arguments in TF1 to their names in Keras. `defaults`
    maps names in Keras to the defaults in TF1, where these differ from Keras's.
    `required` is an argument that has a default in Keras, and must be given.
    """

    make: Callable[..., keras.optimizers.Optimizer]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: str | None = None

    def __call__(self, **params: Any) -> keras.optimizers.Optimizer:
        # Keras never updates a variable concurrently.
        params.pop("use_locking", None)
        if self.required is not None and params.get(self.required) is None:
            raise ValueError(
                f"`optimizer_params` must hold {self.required!r}: it has no default. "
                f"Received: optimizer_params={params!r}"
            )
        for old, new in self.renamed.items():
            if old in params and new in params:
                raise TypeError(
                    f"`{old}` is TF1's name for `{new}`: give one of them. Received: "
                    f"{old}={params[old]!r}, {new}={params[new]!r}"
                )
        params = {self.renamed.get(k, k): v for k, v in params.items()}
        return self.make(**{**self.defaults, **params})


def _adagrad(initial_accumulator_value: Any, **params: Any) -> keras.optimizers.Adagrad:
    """Returns Keras's Adagrad with a positive initial accumulator."""
    # Without an epsilon, the accumulator must not start at 0.
    start = check_positive("initial_accumulator_value", initial_accumulator_value)
    return keras.optimizers.Adagrad(initial_accumulator_value=start, **params)


@keras.saving.register_keras_serializable(
    "keras_lso", name="compat.open_seq2seq.RMSProp"
)
class RMSProp(keras.optimizers.RMSprop):
    """RMSprop with averages initialised to 1, as in TF1: the first steps are short."""

    def build(self, variables: Iterable[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        # Once, not in each step of a `tf.function` that calls `build`.
        with backend.host.outside_of_functions():
            for average in slots_of(self)["rms"]:
                average.assign(ops.ones(average.shape, average.dtype))


_BETAS = {"beta1": "beta_1", "beta2": "beta_2"}

OPTIMIZER_CLS_NAMES = {
    "Adagrad": NamedOptimizer(
        _adagrad, defaults={"initial_accumulator_value": 0.1, "epsilon": 0.0}
    ),
    "Adam": NamedOptimizer(keras.optimizers.Adam, _BETAS, {"epsilon": 1e-8}),
    # It decays by the learning rate times `weight_decay`, as in OpenSeq2Seq, not TF1.
    "AdamW": NamedOptimizer(
        keras.optimizers.AdamW, _BETAS, {"epsilon": 1e-8}, "weight_decay"
    ),
    "Ftrl": NamedOptimizer(keras.optimizers.Ftrl),
    "LARS": NamedOptimizer(LARS),
    # TF1's `v = momentum * v + g; w = w - learning_rate * v`: LARS's popular momentum.
    "Momentum": NamedOptimizer(
        LARS,
        {"use_nesterov": "nesterov"},
        {"classic_momentum": False, "exclude_from_layer_adaptation": [""]},
        "momentum",
    ),
    "NovoGrad": NamedOptimizer(
        NovoGrad, {**_BETAS, "weight_decay": "weight_decay_rate"}
    ),
    "RMSProp": NamedOptimizer(RMSProp, {"decay": "rho"}, {"epsilon": 1e-10}),
    "SGD": NamedOptimizer(keras.optimizers.SGD),
}
