"""What follows from the declaration of a schedule: constructor, checks, docstring."""

import inspect
import re

import keras
import pytest

from keras_lso import schedules
from keras_lso.schedules import _check as check
from keras_lso.schedules import _texts
from keras_lso.schedules._declared import Schedule, declared, field

pytestmark = pytest.mark.one_backend


@declared("ScheduleOfTheTests")
class Renamed(Schedule):
    """A schedule.

    Args:
        count: Positive int. Defaults to `2`, as
            in the papers.
        rate: Float.
        limits: List of floats.
        {{others}}

    {{open_seq2seq}}
    """

    rate: float = field(check.rate)
    count: int = field(check.positive_int, default=2)
    limits: list | None = field(check.optional(check.list_of(check.rate)), default=None)
    name: str = field(check.name, default=None)

    def _validate(self):
        if self.limits is not None and len(self.limits) != self.count:
            raise ValueError("as many limits as the count")

    def __call__(self, step):
        return self.rate


# Registered names are public: there is a list of them.
REGISTERED = "keras_lso>ScheduleOfTheTests"
del keras.saving.get_custom_objects()[REGISTERED]

CLASSES = {
    value
    for value in vars(schedules).values()
    if inspect.isclass(value) and issubclass(value, Schedule)
}


def test_the_constructor_is_one_of_python():
    assert str(inspect.signature(Renamed)) == (
        "(rate, count=2, limits=None, name=None)"
    )
    assert Renamed.__init__.__qualname__ == "Renamed.__init__"
    with pytest.raises(TypeError, match=r"^Renamed.__init__\(\) missing 1 .*'rate'"):
        Renamed()
    with pytest.raises(TypeError, match="takes from 2 to 5 positional"):
        Renamed(1, 2, 3, 4, 5)
    # The defaults are the instances'.
    assert not {"rate", "count", "limits", "name"} & vars(Renamed).keys()


def test_the_first_wrong_argument_is_named():
    with pytest.raises(TypeError, match="`rate` must be"):
        Renamed("1", 0)
    with pytest.raises(ValueError, match="`count` must be"):
        Renamed(1, 0, [-1])
    with pytest.raises(ValueError, match=r"`limits\[1\]` must be"):
        Renamed(1, 2, [1, -1, 1])
    # The arguments are checked together after each of them was checked alone.
    with pytest.raises(TypeError, match="`name` must be"):
        Renamed(1, 2, [1], name=1)
    with pytest.raises(ValueError, match="as many limits"):
        Renamed(1, 2, [1])


def test_a_class_is_saved_under_the_name_that_was_declared():
    config = keras.saving.serialize_keras_object(Renamed(1, limits=[1, 2]))
    assert config == {
        "module": __name__,
        "class_name": "ScheduleOfTheTests",
        "registered_name": REGISTERED,
        "config": {
            "rate": 1.0,
            "count": 2,
            "limits": [1.0, 2.0],
            "name": "ScheduleOfTheTests",
        },
    }
    with keras.saving.custom_object_scope({REGISTERED: Renamed}):
        assert type(keras.saving.deserialize_keras_object(config)) is Renamed


def test_what_a_config_holds_is_not_what_the_schedule_holds():
    schedule = Renamed(1, limits=[1, 2])
    schedule.get_config()["limits"].append(3)
    assert schedule.limits == [1.0, 2.0]


def test_a_class_of_the_user_adds_arguments_of_its_own():
    class Shifted(schedules.FixedLR):
        def __init__(self, learning_rate, shift=1.0, name=None):
            super().__init__(learning_rate, name)
            self.shift = shift

        def __call__(self, step):
            return super().__call__(step) + self.shift

        def get_config(self):
            return {**super().get_config(), "shift": self.shift}

    schedule = Shifted.from_config(Shifted(0.5, 2.0).get_config())
    assert schedule.get_config() == {
        "learning_rate": 0.5,
        "name": "Shifted",
        "shift": 2.0,
    }
    assert float(schedule(0)) == 2.5


# --- Docstrings -----------------------------------------------------------------


@pytest.mark.parametrize(
    "cls", sorted(CLASSES, key=repr), ids=lambda cls: cls.__qualname__
)
def test_a_docstring_is_complete(cls):
    docstring = inspect.getdoc(cls)
    assert "{{" not in docstring
    [args] = re.findall(r"^Args:\n((?:    .*\n)+)", docstring, re.MULTILINE)
    named = re.findall(r"^    (\w+): ", args, re.MULTILINE)
    assert named == list(inspect.signature(cls).parameters)
    for section in ("Args:", "Returns:", "Raises:", "Example:"):
        assert f"\n{section}\n" in docstring
    assert max(map(len, docstring.splitlines())) <= 84


def test_a_docstring_has_the_arguments_in_their_order_and_with_their_defaults():
    lines = inspect.getdoc(Renamed).splitlines()
    assert lines[:10] == [
        "A schedule.",
        "",
        "Args:",
        "    rate: Float.",
        "    count: Positive int. Defaults to `2`, as in the papers.",
        "    limits: List of floats. Defaults to `None`.",
        "    name: String. Defaults to `None`.",
        "",
        "Returns:",
        "    A schedule: called with a step, it returns the rate, a float32 scalar.",
    ]
    assert lines[-4:-2] == ["References:", ""]
    # A gap between paragraphs has no spaces.
    assert not re.search(" $", schedules.FixedLR.__doc__, re.MULTILINE)


def test_a_default_is_shown_as_it_is_written():
    assert ' Defaults to `"FixedLR"`.\n' in schedules.FixedLR.__doc__
    assert " Defaults to `0.0001`.\n" in schedules.PolynomialDecayWithOffset.__doc__


def test_the_docstring_of_an_argument_that_is_none_is_refused():
    docstring = """A schedule.

    Args:
        rat: Float.
        {{others}}
    """
    with pytest.raises(AssertionError, match="no such argument: .*'rat'"):
        _texts.complete(docstring, [], returns="a float32 scalar")


def test_python_without_docstrings_has_none():
    assert _texts.complete(None, [], returns="a float32 scalar") is None
