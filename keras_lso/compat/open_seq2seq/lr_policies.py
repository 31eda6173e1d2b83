"""OpenSeq2Seq's learning-rate policies as functions of the step.

Each is a class of `keras_lso.schedules`, made of the other arguments and called with
the step. To give a policy to an optimizer, take the class. They are a module of their
own because OpenSeq2Seq has them in one.
"""

import inspect
import re

from keras_lso import schedules

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

Formula, further notes and refusals: see `keras_lso.schedules.{cls.__qualname__}`.

Args:
    global_step: Int, or a tensor of one. The step, from 0.
{arguments}
Returns:
    The learning rate, {result}.

Example:

>>> from keras_lso.compat.open_seq2seq import lr_policies
{example}
"""


def _policy(function, cls, summary, example, result="a float32 scalar", name=None):
    """Returns a function of the step and the arguments of a schedule.

    Args:
        function: String, its name.
        cls: Class of the schedule.
        summary: String, the first line of the docstring.
        example: String, a doctest.
        result: String that says what the rate is. Defaults to a float32 scalar.
        name: String, the default of its argument `name`. Defaults to `None`: it has
            none, and the schedule its own.
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
            example=example,
        )
    return policy


def _arguments(cls, name):
    """Returns the lines on the arguments in the docstring of a schedule."""
    [lines] = re.findall(
        r"^Args:\n((?:    .*\n)+)", inspect.cleandoc(cls.__doc__), re.M
    )
    own_name = "" if name is None else f'    name: String. Defaults to `"{name}"`.\n'
    return re.sub(r"^    name: .*\n", own_name, lines, flags=re.M)


fixed_lr = _policy(
    "fixed_lr",
    schedules.FixedLR,
    "Returns the same rate at every step.",
    """\
>>> [float(lr_policies.fixed_lr(step, 0.25)) for step in (0, 1, 2)]
[0.25, 0.25, 0.25]""",
)

piecewise_constant = _policy(
    "piecewise_constant",
    schedules.PiecewiseConstant,
    "Returns a rate that changes at some steps or epochs.",
    """\
>>> [float(lr_policies.piecewise_constant(s, 1.0, [1], [0.25])) for s in range(4)]
[1.0, 1.0, 0.25, 0.25]""",
)

exp_decay = _policy(
    "exp_decay",
    schedules.ExpDecay,
    "Returns a rate that waits, then decays exponentially to a minimum.",
    """\
>>> for step in range(4):
...     rate = lr_policies.exp_decay(step, 1.0, 1, 0.5, False, begin_decay_at=1)
...     print(step, f"{float(rate):.2f}")
0 1.00
1 1.00
2 0.50
3 0.25""",
)

poly_decay = _policy(
    "poly_decay",
    schedules.PolyDecay,
    "Returns a rate that warms up, waits, then follows a power to a minimum.",
    """\
>>> for step in range(5):
...     late = lr_policies.poly_decay(step, 1.0, 2, 1.0, 2, warmup_steps=2)
...     early = lr_policies.poly_decay(step, 1.0, 4, warmup_steps=2)
...     print(step, f"{float(late):.3f}", f"{float(early):.3f}")
0 0.000 0.000
1 0.500 0.375
2 1.000 0.500
3 0.500 0.250
4 0.000 0.000""",
)

inv_poly_decay = _policy(
    "inv_poly_decay",
    schedules.InvPolyDecay,
    "Returns a rate that falls as one over a power of the steps, to a minimum.",
    """\
>>> for step in range(4):
...     rate = lr_policies.inv_poly_decay(step, 1.0, 2, min_lr=0.25)
...     print(step, f"{float(rate):.2f}")
0 1.00
1 0.40
2 0.25
3 0.25""",
    name="learning_rate",
)

cosine_decay = _policy(
    "cosine_decay",
    schedules.CosineDecayPolicy,
    "Returns a rate that warms up, waits, then follows half a cosine.",
    """\
>>> for step in range(5):
...     late = lr_policies.cosine_decay(step, 1.0, 2, 1.0, 2, 0.1, warmup_steps=2)
...     early = lr_policies.cosine_decay(step, 1.0, 2, 1.0, 0, 0.1, warmup_steps=2)
...     print(step, f"{float(late):.3f}", f"{float(early):.3f}")
0 0.000 0.000
1 0.500 0.275
2 1.000 0.100
3 0.550 0.100
4 0.100 0.100""",
)

transformer_policy = _policy(
    "transformer_policy",
    schedules.TransformerPolicy,
    "Returns the rate of the Transformer, with a cap.",
    """\
>>> for step in (0, 1, 3, 15):
...     rate = lr_policies.transformer_policy(step, 2.0, 16, 4, max_lr=0.2)
...     print(step, f"{float(rate):.4f}")
0 0.0625
1 0.1250
3 0.2000
15 0.1250""",
    result="a scalar of `dtype`",
)
