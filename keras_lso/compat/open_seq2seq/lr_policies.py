"""OpenSeq2Seq's learning-rate policies as functions of the step.

Each function constructs a schedule of `keras_lso.schedules` from its other arguments
and calls the schedule with the step. Optimizers take the schedules themselves. The
module has the same name in OpenSeq2Seq.
"""

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keras_lso._backend.types import Tensor
from keras_lso.compat.open_seq2seq import schedules
from keras_lso.schedules import FixedLR

__all__ = [
    "cosine_decay",
    "exp_decay",
    "fixed_lr",
    "inv_poly_decay",
    "piecewise_constant",
    "poly_decay",
    "transformer_policy",
]

_DOCSTRING = """{summary}

See `keras_lso.schedules.{cls.__qualname__}` for the formula and the errors.

Args:
    global_step: The step, from 0.
{arguments}
Returns:
    The learning rate, {result}.

Example:

>>> from keras_lso.compat.open_seq2seq.lr_policies import {function}
>>> rates = [{function}(step, {values}) for step in range(5)]
>>> [round(float(rate), 3) for rate in rates]
{rates}
"""


def _policy(
    function, cls, summary, values, rates, result="a float32 scalar", name=None
):
    """Returns a function of the step and the arguments of a schedule.

    Its docstring has an example with the arguments `values` and the first five `rates`.
    `name` is the default of the argument `name`, which only one of the functions has.
    """

    def policy(*args, **kwargs):
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function}() {error}") from None
        bound.apply_defaults()
        global_step, *arguments = bound.args
        return cls(*arguments)(global_step)

    *parameters, last = inspect.signature(cls).parameters.values()
    step = last.replace(name="global_step", default=last.empty)
    own_name = [] if name is None else [last.replace(default=name)]
    signature = inspect.Signature([step, *parameters, *own_name])
    policy.__name__ = policy.__qualname__ = function
    policy.__signature__ = signature  # type: ignore[attr-defined]
    if cls.__doc__ is not None:
        policy.__doc__ = _DOCSTRING.format(
            summary=summary,
            cls=cls,
            arguments=_arguments(cls, name),
            result=result,
            function=function,
            values=values,
            rates=rates,
        )
    return policy


def _arguments(cls, name):
    """Returns the lines about the arguments from the docstring of a schedule."""
    [lines] = re.findall(
        r"^Args:\n((?:    .*\n)+)", inspect.cleandoc(cls.__doc__), re.M
    )
    own_name = "" if name is None else f'    name: Defaults to `"{name}"`.\n'
    return re.sub(r"^    name: .*\n", own_name, lines, flags=re.M)


if TYPE_CHECKING:  # The signatures of the functions that `_policy` returns.

    def fixed_lr(global_step: int | Tensor, learning_rate: float) -> Tensor: ...

    def piecewise_constant(
        global_step: int | Tensor,
        learning_rate: float,
        boundaries: Sequence[float],
        decay_rates: Sequence[float],
        steps_per_epoch: int | None = None,
    ) -> Tensor: ...

    def exp_decay(
        global_step: int | Tensor,
        learning_rate: float,
        decay_steps: int,
        decay_rate: float,
        use_staircase_decay: bool,
        begin_decay_at: int = 0,
        min_lr: float = 0.0,
    ) -> Tensor: ...

    def poly_decay(
        global_step: int | Tensor,
        learning_rate: float,
        decay_steps: int,
        power: float = 1.0,
        begin_decay_at: int = 0,
        min_lr: float = 0.0,
        warmup_steps: int = 0,
    ) -> Tensor: ...

    def inv_poly_decay(
        global_step: int | Tensor,
        learning_rate: float,
        decay_steps: int,
        min_lr: float,
        power: float = 1.0,
        begin_decay_at: int = 0,
        warmup_steps: int = 0,
        name: str = "learning_rate",
    ) -> Tensor: ...

    def cosine_decay(
        global_step: int | Tensor,
        learning_rate: float,
        decay_steps: int,
        power: float = 1.0,
        begin_decay_at: int = 0,
        min_lr: float = 0.0,
        warmup_steps: int = 0,
    ) -> Tensor: ...

    def transformer_policy(
        global_step: int | Tensor,
        learning_rate: float,
        d_model: int,
        warmup_steps: int,
        max_lr: float | None = None,
        coefficient: float = 1.0,
        dtype: str = "float32",
    ) -> Tensor: ...

else:
    fixed_lr = _policy(
        "fixed_lr",
        FixedLR,
        "Returns the same rate at every step.",
        "0.25",
        [0.25, 0.25, 0.25, 0.25, 0.25],
    )

    piecewise_constant = _policy(
        "piecewise_constant",
        schedules.PiecewiseConstant,
        "Returns a rate that changes at given steps or epochs.",
        "1.0, [1, 3], [0.5, 0.25]",
        [1.0, 1.0, 0.5, 0.5, 0.25],
    )

    exp_decay = _policy(
        "exp_decay",
        schedules.ExpDecay,
        "Returns a rate that is constant, then decays exponentially to a minimum.",
        "1.0, 1, 0.5, False, begin_decay_at=1, min_lr=0.2",
        [1.0, 1.0, 0.5, 0.25, 0.2],
    )

    poly_decay = _policy(
        "poly_decay",
        schedules.PolyDecay,
        "Returns a rate that warms up, is constant, then decays to a minimum by a "
        "power.",
        "1.0, 2, 1.0, 2, 0.25, warmup_steps=2",
        [0.0, 0.5, 1.0, 0.625, 0.25],
    )

    inv_poly_decay = _policy(
        "inv_poly_decay",
        schedules.InvPolyDecay,
        "Returns a rate that decays to a minimum as one over a power of the steps.",
        "1.0, 2, min_lr=0.25",
        [1.0, 0.4, 0.25, 0.25, 0.25],
        name="learning_rate",
    )

    cosine_decay = _policy(
        "cosine_decay",
        schedules.CosineDecayPolicy,
        "Returns a rate that warms up, is constant, then follows half a cosine.",
        "1.0, 2, 1.0, 2, 0.1, warmup_steps=2",
        [0.0, 0.5, 1.0, 0.55, 0.1],
    )

    transformer_policy = _policy(
        "transformer_policy",
        schedules.TransformerPolicy,
        "Returns the rate of the Transformer, which may be capped.",
        "2.0, 16, 2, max_lr=0.3",
        [0.177, 0.3, 0.289, 0.25, 0.224],
        result="a scalar of `dtype`",
    )
