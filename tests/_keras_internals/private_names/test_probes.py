"""How a probe looks for an attribute, without making or calling anything."""

import keras
import pytest

from keras_lso._keras_internals.private_names import of_frameworks, of_keras
from keras_lso._keras_internals.private_names.probes import (
    Probe,
    missing,
    module,
    of_backend,
    says,
    sets,
    takes,
)

BACKEND = keras.backend.backend()
HERE = of_backend([*of_keras.PROBES, *of_frameworks.PROBES], BACKEND)


class Base:
    """Made of all the kinds of code in which an attribute can be set."""

    def __init__(self):
        raise AssertionError("A probe makes nothing.")

    def build(self, names):
        self._one, self._two = names
        for name in names:
            self._add(name, suffix="the_suffix")

    def _add(self, name, suffix=None):
        raise AssertionError("A probe calls nothing.")

    @property
    def rate(self):
        return self._rate

    @rate.setter
    def rate(self, rate):
        self._rate = rate

    @property
    def lazy(self):
        self._lazy = True
        return self._lazy

    @staticmethod
    def _static(value):
        return value._of_another


class Derived(Base):
    of_class = None


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("name", "is_set"),
    [
        ("_one", True),
        ("_two", True),
        ("_lazy", True),
        ("_rate", True),
        ("of_class", True),
        ("_add", True),
        ("_three", False),
        ("_of_another", False),
    ],
)
def test_what_methods_set_is_found_in_their_code(name, is_set):
    assert sets(Derived, name) is is_set


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("name", "arguments", "found"),
    [
        ("_add", ["name"], True),
        ("_add", ["name", "suffix"], True),
        ("_add", [], False),
        ("_add", ["name", "suffix", "one more"], False),
        ("of_class", [], False),
        ("_no_such_method", [], False),
    ],
)
def test_a_method_has_to_take_what_is_passed(name, arguments, found):
    assert takes(*arguments)(Derived, name) is found


@pytest.mark.one_backend
def test_a_string_is_looked_for_in_one_method():
    assert says("the_suffix")(Derived, "build")
    assert not says("the_suffix")(Derived, "_add")
    assert not says("another_suffix")(Derived, "build")


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("owner", "name", "found", "holds"),
    [
        ("keras.optimizers.SGD", "build", hasattr, True),
        ("keras.optimizers.SGD", "bild", hasattr, False),
        ("keras.optimizers.NoSuchOptimizer", "build", sets, False),
        ("no_such_package.module", "name", hasattr, False),
        ("keras.src", "utils", module, True),
        ("keras.src", "no_such_module", module, False),
    ],
)
def test_a_probe_holds_where_owner_and_name_are_found(owner, name, found, holds):
    assert Probe(owner, name, found).holds() is holds


def test_here_all_probes_hold():
    assert list(map(str, missing(HERE))) == []


@pytest.mark.parametrize("probe", HERE, ids=lambda p: f"{p.owner}.{p.name}")
def test_every_probe_notices_that_its_attribute_is_gone(probe):
    assert not probe._replace(name=f"{probe.name}_gone").holds()


def test_a_method_that_takes_other_arguments_is_noticed(monkeypatch):
    [index_of] = [p for p in HERE if p.name == "_get_variable_index"]
    monkeypatch.setattr(
        keras.optimizers.Optimizer, index_of.name, lambda self: 0, raising=False
    )
    assert missing(HERE) == [index_of]


@pytest.mark.one_backend
def test_a_probe_of_one_backend_is_for_no_other():
    everywhere, on_torch = Probe("a", "b"), Probe("a", "b", backend="torch")
    assert of_backend([everywhere, on_torch], "torch") == [everywhere, on_torch]
    assert of_backend([everywhere, on_torch], "jax") == [everywhere]
