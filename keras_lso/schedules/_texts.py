"""The text that the docstrings of schedules share, each piece written once.

A schedule's docstring marks the place of a piece by a line such as `{{open_seq2seq}}`,
as the docstrings of Keras's optimizers do, and documents only its own arguments:
`{{others}}` ends them. `complete` adds the rest when the class is made.
"""

import dataclasses
import inspect
import re
import textwrap

_MARK = re.compile(r"^\{\{(\w+)\}\}$", re.MULTILINE)
_ARGS = re.compile(r"^Args:\n((?:    .*\n)*)    \{\{others\}\}$", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)

_ARGUMENTS = {
    "name": "String.",
    "offset": "Int. The step at which the schedule starts.",
    "initial_learning_rate": "Float. The rate at the offset.",
    "learning_rate": "Float. The rate before the decay.",
    "decay_steps": "Positive int. The number of steps (not epochs) of the decay.",
    "decay_rate": "Positive float. The rate is multiplied by it in each `decay_steps`.",
    "begin_decay_at": "Int of zero or more. The first step of the decay.",
    "warmup_steps": "Int of zero or more. The number of steps (not epochs) of the "
    "warm-up. With 0 there is none.",
    "schedule_or_rate": "A `keras.optimizers.schedules.LearningRateSchedule`, or a "
    "float, the constant rate after the warm-up. The Model Garden's name for it, "
    "`after_warmup_lr_sched`, works too, but not both.",
}

_TEXTS = {
    "before_the_offset": """\
Before the offset the formula extends backwards, and the rate is above the initial
one: put a warm-up in front.""",
    "overlap": """\
The decay counts from `begin_decay_at` even if the warm-up takes longer: then the
rate that is still warming up decays. To have one after the other, write
`begin_decay_at=warmup_steps`.""",
    "decays_of_keras": """\
A schedule of Keras's is called as it is. Compiled, its `PolynomialDecay` may be NaN
from its last step on if `power` is below 1, and miscounts its cycles; the stairs of
its `ExponentialDecay` may begin a step late. Write
`keras_lso.schedules.PolynomialDecayWithOffset` or `ExponentialDecayWithOffset`:
with an offset of 0 they are the same schedules, and exact.""",
    "open_seq2seq": """\
References:

- [OpenSeq2Seq's `lr_policies`](
    https://nvidia.github.io/OpenSeq2Seq/html/api-docs/optimizers.html)""",
}

_SECTIONS = """\
Args:
{args}

Returns:
    A schedule: called with a step, it returns the rate, {returns}.

Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If a rate is negative, a number is NaN or infinite, a number of
        steps is not an integer, or an argument is outside of the range above."""


def complete(docstring, fields, returns):
    """Returns the docstring of a schedule with the shared text in its place.

    Args:
        docstring: String, or None where Python leaves docstrings out.
        fields: The `dataclasses.Field`s of the class, which are its arguments.
        returns: String, the kind of number that the schedule returns.
    """
    if docstring is None:
        return None

    def sections(found):
        own = dict(_ENTRY.findall(found[1]))
        entries = [_entry(f, own.pop(f.name, None)) for f in fields]
        assert not own, f"The class has no such argument: {own}"
        return _SECTIONS.format(args="\n".join(entries), returns=returns)

    docstring = _ARGS.sub(sections, inspect.cleandoc(docstring))
    return _MARK.sub(lambda found: _TEXTS[found[1]], docstring)


def _entry(field, text):
    text = " ".join((text or _ARGUMENTS[field.name]).split())
    default = field.default
    if default is not dataclasses.MISSING and "Defaults to" not in text:
        shown = f'"{default}"' if isinstance(default, str) else default
        text = f"{text} Defaults to `{shown}`."
    return textwrap.fill(
        f"{field.name}: {text}",
        width=84,
        initial_indent=" " * 4,
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )
