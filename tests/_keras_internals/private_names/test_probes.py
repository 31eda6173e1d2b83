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
def test_sets_finds_attributes_in_code_of_methods(name, is_set):
    assert sets(Derived, name) is is_set


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
def test_takes_checks_arguments_accepted_by_method(name, arguments, found):
    assert takes(*arguments)(Derived, name) is found


def test_says_finds_string_only_in_named_method():
    assert says("the_suffix")(Derived, "build")
    assert not says("the_suffix")(Derived, "_add")
    assert not says("another_suffix")(Derived, "build")


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
def test_probe_holds_only_if_owner_and_name_exist(owner, name, found, holds):
    assert Probe(owner, name, found).holds() is holds


def test_all_probes_hold_in_this_environment():
    assert list(map(str, missing(HERE))) == []


@pytest.mark.parametrize("probe", HERE, ids=lambda p: f"{p.owner}.{p.name}")
def test_probe_fails_if_attribute_is_missing(probe):
    is_of_newer = probe.owner == "keras.optimizers" and probe.name == "_momentums"
    if is_of_newer and not hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        pytest.skip("ScheduleFreeAdamW, whose attribute this is, needs a newer Keras")
    assert not probe._replace(name=f"{probe.name}_gone").holds()


def test_missing_reports_method_with_changed_signature(monkeypatch):
    [index_of] = [p for p in HERE if p.name == "_get_variable_index"]
    monkeypatch.setattr(
        keras.optimizers.Optimizer, index_of.name, lambda self: 0, raising=False
    )
    assert missing(HERE) == [index_of]


def test_probe_with_backend_applies_only_to_that_backend():
    everywhere, on_torch = Probe("a", "b"), Probe("a", "b", backend="torch")
    assert of_backend([everywhere, on_torch], "torch") == [everywhere, on_torch]
    assert of_backend([everywhere, on_torch], "jax") == [everywhere]
