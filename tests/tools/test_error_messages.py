"""The page of error messages has each message of the package."""

import pathlib
import re

import keras
import pytest

import keras_lso

# A source distribution has no tools.
error_messages = pytest.importorskip("tools.error_messages")

pytestmark = pytest.mark.one_backend


def test_error_message_page_matches_sources():
    assert error_messages.PAGE.read_text() == error_messages.make_page(), (
        "Run `python -m tools.error_messages`"
    )


# A message that a program gets, by what raises it.
RAISED = {
    "of a class": lambda: keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(), dynamic=False
    ),
    "of a helper": lambda: keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale="high"
    ),
    "of a schedule": lambda: keras_lso.schedules.mlperf_resnet(5, 10),
    "of a file": lambda: keras_lso.mixed_precision.load_optimizer_state(
        keras.optimizers.SGD(), "nowhere"
    ),
    "of a loss-scale policy": lambda: keras_lso.loss_scales.get("static"),
}


@pytest.mark.parametrize("call", RAISED.values(), ids=RAISED)
def test_raised_error_message_is_on_page(call):
    with pytest.raises(Exception) as raised:
        call()
    lines = [
        line.replace("\\", "").replace("&lt;", "<").removeprefix("- **").split(":** ")
        for line in error_messages.PAGE.read_text().splitlines()
        if line.startswith("- **")
    ]
    patterns = [
        re.escape(text).replace(r"\.\.\.", ".*")
        for kind, text in lines
        if kind == type(raised.value).__name__
    ]
    assert any(re.fullmatch(p, str(raised.value), re.DOTALL) for p in patterns)


def test_messages_are_assembled_from_source_code():
    source = '''
LIMIT = "of at most 4"

def check(value):
    """Raises ValueError("no message of the package at all")."""
    requirement = f"be a number {LIMIT}"
    if value > 4:
        raise refusal("size", value, requirement, TypeError)
    warnings.warn("It will be " + name(value) + f"{value!r}{'' if value else 1} then")
    raise ValueError(value)

def composed(value):
    """A docstring, which is no message."""
    return [f"The number {value} is too large.", "kind"]
'''
    messages = list(error_messages.messages_of(source, {"composed": "Warning"}))
    assert messages == [
        ("TypeError", "Argument `size` must be a number of at most 4. Received: ..."),
        ("Warning", "It will be ... then"),
        ("Warning", "The number ... is too large."),
    ]


def test_as_markdown_escapes_markup_outside_code():
    text = error_messages.as_markdown("2.0**15 in `a_b**c` of [x] <y> z_1")
    assert text == r"2.0\*\*15 in `a_b**c` of \[x\] &lt;y> z\_1"


def test_every_group_has_messages_and_links_to_existing_pages():
    page = error_messages.make_page()
    for part in page.split("\n## ")[1:]:
        assert "\n- **" in part, part
    docs = pathlib.Path(error_messages.PAGE).parent
    for link in re.findall(r"\]\(([\w/.-]+\.md)", page):
        assert (docs / link).exists(), link
