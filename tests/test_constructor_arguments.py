"""Every argument of every public constructor refuses what it cannot be, by its name.

`tests/schedules/test_arguments.py` has those of the schedules.
"""

import inspect
import re

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import callbacks, loss_scales
from keras_lso.compat import open_seq2seq
from keras_lso.compat.v1 import mixed_precision as v1
from keras_lso.mixed_precision import experimental
from testing.refusals import sgd

MODULES = [keras_lso, callbacks, loss_scales, open_seq2seq, v1, experimental]
CLASSES = {
    f"{module.__name__}.{cls.__qualname__}": cls
    for module in MODULES
    for cls in map(vars(module).get, module.__all__)
    if inspect.isclass(cls)
    and not issubclass(cls, keras.optimizers.schedules.LearningRateSchedule)
}
# Arguments without a default.
REQUIRED = {
    "inner_optimizer": sgd,
    "optimizer": sgd,
    "opt": sgd,
    "loss_scale": lambda: 8.0,
    "loss_scale_value": lambda: 8.0,
    "initial_loss_scale": lambda: 8.0,
}
VALUES = {
    "array": np.array([1.0, 2.0]),
    "array of strings": np.array(["a", "b"]),
    "array without axes": np.array(1.5),
    "list": [1, 2],
    "None": None,
    "string": "no such",
    "dict": {"a": 1},
    "object": object(),
}
LEGAL = dict.fromkeys(("name", "log_dir"), ("None", "string"))


def parameters_of(cls):
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    found = inspect.signature(cls).parameters.values()
    return [p for p in found if p.kind not in kinds]


def arguments_of(cls):
    """Returns valid arguments of a class."""
    required = [p.name for p in parameters_of(cls) if p.default is p.empty]
    return {name: REQUIRED[name]() for name in required}


CASES = [
    pytest.param(cls, parameter, id=f"{name}({parameter.name})")
    for name, cls in CLASSES.items()
    for parameter in parameters_of(cls)
]


@pytest.mark.parametrize("cls, parameter", CASES)
def test_argument_of_wrong_type_is_rejected_by_its_name(cls, parameter):
    name, values = parameter.name, VALUES
    if "float" in str(parameter.annotation):
        values = VALUES | {"infinite in float32": 1e39}
    arguments = arguments_of(cls)
    cls(**arguments)
    for kind, value in values.items():
        is_default = parameter.default is None and value is None
        if is_default or kind in LEGAL.get(name, ()):
            continue
        with pytest.raises((TypeError, ValueError)) as caught:
            cls(**arguments_of(cls) | {name: value})
        message = str(caught.value)
        is_named = re.search(rf"`{name}\b|\b{name}[`=]", message)
        assert is_named, f"{kind}: {message}"


@pytest.mark.parametrize("keyword", ["weight_decay", "clipnorm", "use_ema"])
@pytest.mark.parametrize("value", [VALUES["array"], True, 0.5, [1]])
def test_keyword_of_inner_optimizer_is_rejected_by_its_name(keyword, value):
    with pytest.raises(ValueError, match=f"does not support `{keyword}`"):
        keras_lso.LossScaleOptimizer(sgd(), **{keyword: value})


@pytest.mark.parametrize(
    "make",
    [
        keras_lso.LossScaleOptimizer,
        keras_lso.GuardedOptimizer,
        keras_lso.LARC,
        lambda _: keras_lso.LARS(),
    ],
)
@pytest.mark.parametrize("stranger", [None, "w", np.ones(2), [None]])
def test_list_of_variables_with_another_object_is_rejected(make, stranger):
    variable, grads = keras.Variable([1.0, 2.0]), [np.ones(2, "float32")] * 2
    for call, argument in (
        (lambda o: o.apply(grads, [variable, stranger]), "trainable_"),
        (lambda o: o.build([variable, stranger]), ""),
    ):
        optimizer = make(sgd())
        words = rf"`{argument}variables` takes variables only.* It holds: "
        with pytest.raises(TypeError, match=words):
            call(optimizer)
        assert not optimizer.built
