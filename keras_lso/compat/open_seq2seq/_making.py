"""Constructs the optimizer and the schedule from the arguments of `optimize_loss`.

`optimizers.py` checks the remaining arguments.
"""

import inspect

import keras
from keras import ops

from keras_lso._keras_internals.optimizers import schedule_of
from keras_lso.compat.open_seq2seq._optimizer_names import (
    OPTIMIZER_CLS_NAMES,
    NamedOptimizer,
)


def make_optimizer(optimizer, params, schedule):
    """Returns the optimizer; the caller assigns the schedule to an instance."""
    if params is not None and not isinstance(params, dict):
        raise TypeError(
            "Argument `optimizer_params` must be a dict, such as {'momentum': 0.9}. "
            f"Received: optimizer_params={params!r} of type {type(params).__name__}"
        )
    params = dict(params or {})
    if isinstance(optimizer, keras.optimizers.Optimizer):
        _check_instance(optimizer, params, schedule)
        made = optimizer
    else:
        made = _factory(optimizer)(**_with_schedule(params, schedule))
    is_keras_own = type(made) is keras.optimizers.LossScaleOptimizer
    if is_keras_own or made.loss_scale_factor is not None:
        raise ValueError(
            "The optimizer must not scale the loss by Keras's own means, a "
            "`loss_scale_factor` or Keras's LossScaleOptimizer. Leave them out, and "
            "write `dtype='mixed'` with `loss_scaling`. Received: "
            f"optimizer={optimizer!r}, optimizer_params={params!r}"
        )
    return made


def _check_instance(optimizer, params, schedule):
    if params:
        raise ValueError(
            "An optimizer that is an instance has its parameters already. Set them "
            f"there, or pass the class. Received: optimizer_params={params!r}"
        )
    if schedule is not None and schedule_of(optimizer) is not None:
        raise ValueError(
            "The optimizer has a learning-rate schedule of its own, or one that "
            "another training op gave it. Pass `learning_rate_decay_fn=None` to keep "
            f"it, or another optimizer. Received: optimizer={optimizer!r}"
        )


def _with_schedule(params, schedule):
    if schedule is None:
        return params
    if "learning_rate" in params:
        raise ValueError(
            "`learning_rate_decay_fn` determines the learning rate. Leave "
            "'learning_rate' out of `optimizer_params`, or pass "
            f"learning_rate_decay_fn=None. Received: optimizer_params={params!r}"
        )
    return {**params, "learning_rate": schedule}


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


def as_schedule(decay_fn):
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
        if rate is None or isinstance(rate, str):
            raise TypeError(
                "`learning_rate_decay_fn` must return the learning rate, a number or a "
                f"scalar tensor. It returned {rate!r}"
            )
        return ops.convert_to_tensor(rate, dtype="float32")

    def get_config(self):
        raise NotImplementedError(
            "A `learning_rate_decay_fn` cannot be saved. Pass a schedule of "
            "`keras_lso.schedules` in its place, such as `PolyDecay(...)`."
        )
