"""OpenSeq2Seq's learning-rate policies as functions of the step.

Each function constructs a schedule from its other arguments and calls it with the step.
Optimizers take the schedules themselves. The module has the same name in OpenSeq2Seq.
"""

import inspect
from collections.abc import Callable
from typing import ParamSpec, Protocol

from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.types import Tensor
from keras_lso.compat.open_seq2seq import schedules
from keras_lso.schedules.constant import FixedLR

__all__ = [
    "cosine_decay",
    "exp_decay",
    "fixed_lr",
    "inv_poly_decay",
    "piecewise_constant",
    "poly_decay",
    "transformer_policy",
]

_Arguments = ParamSpec("_Arguments")


class _Policy(Protocol[_Arguments]):
    def __call__(
        self,
        global_step: int | Tensor,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> Tensor: ...


def _policy(
    function: str,
    cls: Callable[_Arguments, LearningRateSchedule],
    name: str | None = None,
) -> _Policy[_Arguments]:
    """Returns a function of the step and the arguments of a schedule.

    `name` is the default of the argument `name`, which only one of the functions has.
    """

    def policy(
        global_step: int | Tensor, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Tensor:
        return cls(*args, **kwargs)(global_step)

    *parameters, last = inspect.signature(cls).parameters.values()
    step = last.replace(name="global_step", default=last.empty)
    own_name = [] if name is None else [last.replace(default=name)]
    policy.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [step, *parameters, *own_name]
    )
    policy.__name__ = policy.__qualname__ = function
    policy.__doc__ = (
        f"Returns the rate of `keras_lso.schedules.{cls.__qualname__}` at a step.\n\n"
        "Args:\n    global_step: The step, from 0.\n\n"
        "The other arguments are those of the schedule."
    )
    return policy


fixed_lr = _policy("fixed_lr", FixedLR)
"""The rate of `keras_lso.schedules.FixedLR` at a step."""
piecewise_constant = _policy("piecewise_constant", schedules.PiecewiseConstant)
"""The rate of `keras_lso.schedules.PiecewiseConstant` at a step."""
exp_decay = _policy("exp_decay", schedules.ExpDecay)
"""The rate of `keras_lso.schedules.ExpDecay` at a step."""
poly_decay = _policy("poly_decay", schedules.PolyDecay)
"""The rate of `keras_lso.schedules.PolyDecay` at a step."""
inv_poly_decay = _policy("inv_poly_decay", schedules.InvPolyDecay, "learning_rate")
"""The rate of `keras_lso.schedules.InvPolyDecay` at a step."""
cosine_decay = _policy("cosine_decay", schedules.CosineDecayPolicy)
"""The rate of `keras_lso.schedules.CosineDecayPolicy` at a step."""
transformer_policy = _policy("transformer_policy", schedules.TransformerPolicy)
"""The rate of `keras_lso.schedules.TransformerPolicy` at a step."""
