"""OpenSeq2Seq's learning-rate policies as functions of the step.

Each function constructs a schedule from its other arguments and calls it with the step.
Optimizers take the schedules themselves. The module has the same name in OpenSeq2Seq.
"""

import inspect
from collections.abc import Callable
from typing import Final, ParamSpec, Protocol

from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.tensors import Tensor
from keras_lso.compat.open_seq2seq import schedules
from keras_lso.schedules.runs import FixedLR

__all__ = [
    "cosine_decay",
    "exp_decay",
    "fixed_lr",
    "inv_poly_decay",
    "piecewise_constant",
    "poly_decay",
    "transformer_policy",
]


def __dir__() -> list[str]:
    return __all__


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
    """Returns the function of the step and of a schedule's arguments."""

    def policy(
        global_step: int | Tensor, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Tensor:
        return cls(*args, **kwargs)(global_step)

    *parameters, last = inspect.signature(cls).parameters.values()
    step = last.replace(name="global_step", default=last.empty)
    # Only one of the functions has an argument `name`.
    own_name = [] if name is None else [last.replace(default=name)]
    signature = inspect.Signature([step, *parameters, *own_name])
    policy.__signature__ = signature  # type: ignore[attr-defined]
    policy.__name__ = policy.__qualname__ = function
    policy.__doc__ = f"Returns the rate of `{cls.__qualname__}` at a step."
    return policy


fixed_lr: Final = _policy("fixed_lr", FixedLR)
piecewise_constant: Final = _policy("piecewise_constant", schedules.PiecewiseConstant)
exp_decay: Final = _policy("exp_decay", schedules.ExpDecay)
poly_decay: Final = _policy("poly_decay", schedules.PolyDecay)
inv_poly_decay: Final = _policy(
    "inv_poly_decay", schedules.InvPolyDecay, name="learning_rate"
)
cosine_decay: Final = _policy("cosine_decay", schedules.CosineDecayPolicy)
transformer_policy: Final = _policy("transformer_policy", schedules.TransformerPolicy)
