"""The text that the docstrings of schedules share, each piece written once.

A docstring names a piece on a line of its own, such as `{{offset}}`, as the docstrings
of Keras's optimizers do. `fill_in` replaces these lines when the class is made.
"""

import re
import textwrap

_PLACEHOLDER = re.compile(r"^( *)\{\{(\w+)\}\}$", re.MULTILINE)

_RAISES = """\
Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If a rate is negative, a number is NaN or infinite, a number of
        steps is not an integer, or an argument is outside of the range above."""

_TEXTS = {
    "name": 'name: String. Defaults to `"{saved_as}"`.',
    "offset": "offset: Int. The step at which the schedule starts. Defaults to `0`.",
    "initial_learning_rate": "initial_learning_rate: Float. The rate at the offset.",
    "learning_rate": "learning_rate: Float. The rate before the decay.",
    "decay_steps": (
        "decay_steps: Positive int. The number of steps (not epochs) of the decay."
    ),
    "exponential_decay": """\
decay_steps: Positive int. The number of steps (not epochs) in which the rate
    is multiplied by `decay_rate` once.
decay_rate: Positive float.""",
    "begin_decay_at": """\
begin_decay_at: Int of zero or more. The first step of the decay. Defaults to
    `0`.""",
    "policy_warmup_steps": """\
warmup_steps: Int of zero or more. The number of steps of the warm-up. Defaults
    to `0`: none.""",
    "overlap": """\
The decay counts from `begin_decay_at` also where the warm-up takes longer: then the
rate that is still warming up is what decays. To have one after the other, write
`begin_decay_at=warmup_steps`.""",
    "schedule_or_rate": """\
schedule_or_rate: A `keras.optimizers.schedules.LearningRateSchedule`, or a
    float, the constant rate after the warm-up. The Model Garden's name for it,
    `after_warmup_lr_sched`, works too, but not both.""",
    "warmup_steps": """\
warmup_steps: Int of zero or more. The number of steps (not epochs) of the
    warm-up. With 0 there is none.""",
    "raises": _RAISES,
    "returns_and_raises": f"""\
Returns:
    A schedule: called with a step, it returns the rate, a float32 scalar.

{_RAISES}""",
    "open_seq2seq": """\
- [OpenSeq2Seq's `lr_policies`](
    https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html)""",
}


def fill_in(docstring, **values):
    """Returns a docstring with the shared text in the place of its placeholders.

    Args:
        docstring: String, or None where Python leaves docstrings out.
        values: Strings that the text holds, such as the name of the class.
    """

    def text(found):
        indent, name = found.groups()
        return textwrap.indent(_TEXTS[name].format(**values), indent)

    return docstring and _PLACEHOLDER.sub(text, docstring)
