"""OpenSeq2Seq's learning-rate policies as functions of the step.

Each function constructs a schedule from its other arguments and calls it with the step.
Optimizers take the schedules themselves. The module has the same name in OpenSeq2Seq.
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, Protocol

from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._backend.types import Tensor
from keras_lso.compat.open_seq2seq import schedules
from keras_lso.schedules._plain import FixedLR

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
    cls: Callable[_Arguments, LearningRateSchedule], name: str | None = None
) -> Callable[[Callable[[], None]], _Policy[_Arguments]]:
    """Returns a decorator that gives a function the step and a schedule's arguments.

    `name` is the default of the argument `name`, which only one of the functions has.
    """

    def decorate(function: Callable[[], None]) -> _Policy[_Arguments]:
        @functools.wraps(function)
        def policy(
            global_step: int | Tensor,
            *args: _Arguments.args,
            **kwargs: _Arguments.kwargs,
        ) -> Tensor:
            return cls(*args, **kwargs)(global_step)

        *parameters, last = inspect.signature(cls).parameters.values()
        step = last.replace(name="global_step", default=last.empty)
        own_name = [] if name is None else [last.replace(default=name)]
        signature = inspect.Signature([step, *parameters, *own_name])
        policy.__signature__ = signature  # type: ignore[attr-defined]
        return policy

    return decorate


@_policy(FixedLR)
def fixed_lr() -> None:
    """Returns the rate of `FixedLR` at a step."""


@_policy(schedules.PiecewiseConstant)
def piecewise_constant() -> None:
    """Returns the rate of `PiecewiseConstant` at a step."""


@_policy(schedules.ExpDecay)
def exp_decay() -> None:
    """Returns the rate of `ExpDecay` at a step."""


@_policy(schedules.PolyDecay)
def poly_decay() -> None:
    """Returns the rate of `PolyDecay` at a step."""


@_policy(schedules.InvPolyDecay, name="learning_rate")
def inv_poly_decay() -> None:
    """Returns the rate of `InvPolyDecay` at a step."""


@_policy(schedules.CosineDecayPolicy)
def cosine_decay() -> None:
    """Returns the rate of `CosineDecayPolicy` at a step."""


@_policy(schedules.TransformerPolicy)
def transformer_policy() -> None:
    """Returns the rate of `TransformerPolicy` at a step."""
