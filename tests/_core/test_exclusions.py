"""Exclusion from weight decay, by any API and at any time."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LAMB, LARC, LARS, LossScaleOptimizer, NovoGrad
from keras_lso._core import exclusions
from keras_lso.schedules import mlperf_bert
from testing.keras_versions import (
    excluded_before_build,
    excludes_after_build,
    multi_optimizer,
)

DECAYS = dict(weight_decay=0.5)
OWN = dict(weight_decay_rate=0.5)


class OwnStep(keras.optimizers.SGD):
    """An optimizer without a rule: its step is not fused."""


INNER = {
    "SGD": lambda: keras.optimizers.SGD(0.5, **DECAYS),
    "AdamW": lambda: keras.optimizers.AdamW(0.5, **DECAYS),
    "its own step": lambda: OwnStep(0.5, **DECAYS),
    "averages": lambda: keras.optimizers.SGD(0.5, use_ema=True, **DECAYS),
    "LARC": lambda: LARC(keras.optimizers.SGD(0.5, **DECAYS)),
    "LARS": lambda: LARS(0.5, momentum=0.0, **OWN),
    "LARS, decoupled": lambda: LARS(0.5, momentum=0.0, **DECAYS),
    "LAMB": lambda: LAMB(0.5, **OWN),
    "NovoGrad": lambda: NovoGrad(0.5, beta_1=0.0, **OWN),
}


def by_the_wrapper(optimizer, **arguments):
    optimizer.exclude_from_weight_decay(**arguments)


def by_the_inner_optimizer(optimizer, **arguments):
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    optimizer.exclude_from_weight_decay(**arguments)


def two_variables(dtype):
    return [
        keras.Variable(np.ones(2, dtype), dtype=dtype, name=name)
        for name in ("kernel", "bias")
    ]


def step(optimizer, variables):
    """Steps with gradients of zero, in which only decay moves a variable."""
    zeros = [ops.zeros(v.shape, v.dtype) for v in variables]
    optimizer.apply(zeros, variables)
    return [float(ops.convert_to_numpy(v)[0]) for v in variables]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("names", [False, True], ids=["var_list", "var_names"])
@pytest.mark.parametrize("exclude", [by_the_wrapper, by_the_inner_optimizer])
@pytest.mark.parametrize("make", INNER.values(), ids=INNER)
@pytest.mark.exhaustive
def test_exclusion_takes_effect_before_build_after_build_and_between_steps(
    make, exclude, names, dtype
):
    late = ("after build", "between steps") if excludes_after_build else ()
    for when in ("before build", *late):
        kernel, bias = variables = two_variables(dtype)
        optimizer = LossScaleOptimizer(make(), initial_scale=1.0)
        what = {"var_names": ["bias"]} if names else {"var_list": [bias]}
        if when != "before build":
            optimizer.build(variables)
        if when == "between steps":
            # The second step uses the groups that the first one has made.
            assert step(optimizer, variables)[1] < 1
            step(optimizer, variables)
        before = [float(ops.convert_to_numpy(v)[0]) for v in variables]
        exclude(optimizer, **what)
        after = step(optimizer, variables)
        assert after[0] < before[0], when
        assert after[1] == before[1], when
        if not excludes_after_build:
            continue
        # Another exclusion takes the place of the first one, as in Keras.
        exclude(optimizer, var_list=[kernel])
        again = step(optimizer, variables)
        assert again[0] == after[0], when
        assert again[1] < after[1], when


def of_two(first, second, start="second"):
    return multi_optimizer(lambda v: second if v.path.startswith(start) else first)


@pytest.mark.parametrize(
    "when",
    [
        "before build",
        pytest.param("after build", marks=excluded_before_build),
        pytest.param("between steps", marks=excluded_before_build),
    ],
)
@pytest.mark.parametrize("make", [INNER["SGD"], INNER["LARS"]], ids=["SGD", "LARS"])
def test_exclusion_in_multi_optimizer_member_takes_effect(make, when):
    names = "first", "second", "second_bias"
    variables = [
        keras.Variable(np.ones(2, "float16"), dtype="float16", name=n) for n in names
    ]
    members = make(), make()
    optimizer = LossScaleOptimizer(of_two(*members), initial_scale=1.0)
    if when != "before build":
        optimizer.build(variables)
    if when == "between steps":
        step(optimizer, variables)
    before = [float(ops.convert_to_numpy(v)[0]) for v in variables]
    members[1].exclude_from_weight_decay(var_list=variables[2:])
    after = step(optimizer, variables)
    assert [a < b for a, b in zip(after, before, strict=True)] == [True, True, False]


def in_a_layer(dtype):
    layer = keras.layers.Dense(2, name="first", dtype=dtype, bias_initializer="ones")
    model = keras.Sequential([keras.Input((2,), dtype=dtype), layer], name="model")
    return model.trainable_variables


def excluded_by(optimizer, variables):
    """Returns the names of the variables that do not decay."""
    before = [ops.convert_to_numpy(v) for v in variables]
    optimizer.apply([ops.zeros(v.shape, v.dtype) for v in variables], variables)
    pairs = zip(variables, before, strict=True)
    return [v.name for v, old in pairs if (ops.convert_to_numpy(v) == old).all()]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("make", [INNER["SGD"], INNER["its own step"]])
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:A pattern matches no variable")
def test_wrapped_optimizer_excludes_same_names_as_bare_optimizer(make, dtype):
    """On TensorFlow, Keras searches other names, such as `model/first/bias:0`."""
    for name in ("bias", "^bias$", "bias:0", "first", "/bias"):
        excluded = []
        for wrap in (lambda o: o, lambda o: LossScaleOptimizer(o, initial_scale=1.0)):
            variables, inner = in_a_layer(dtype), make()
            inner.exclude_from_weight_decay(var_names=[name])
            excluded.append(excluded_by(wrap(inner), variables))
        assert excluded[0] == excluded[1], name


def transformer():
    """The variables of a model whose layers have the names that Keras gives them."""
    layers = [keras.Input((2,))]
    for number in ("", "_1"):
        layers.append(keras.layers.Dense(2, name=f"dense{number}"))
        name = f"layer_normalization{number}"
        layers.append(keras.layers.LayerNormalization(name=name))
    return keras.Sequential(layers, name="model").trainable_variables


@pytest.fixture(scope="module")
def variables():
    return transformer()


def lars(patterns, **arguments):
    return LARS(
        0.5, weight_decay_rate=0.5, exclude_from_weight_decay=patterns, **arguments
    )


def adamw(*names):
    inner = keras.optimizers.AdamW(0.5)
    inner.exclude_from_weight_decay(var_names=list(names))
    return inner


def warnings_of(optimizer, variables):
    """Returns the warnings of two calls of `build`."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.build(variables)
        optimizer.build(variables)
    return [str(w.message) for w in seen]


@pytest.mark.parametrize("patterns", [["LayerNorm"], ["LayerNorm", "bias"]])
@pytest.mark.parametrize(
    "wrap", [lambda o: o, LossScaleOptimizer, LARC], ids=["alone", "scaled", "LARC"]
)
def test_pattern_that_excludes_nothing_warns_once(wrap, patterns, variables):
    [message] = warnings_of(wrap(lars(patterns)), variables)
    assert "none: 'LayerNorm' of `exclude_from_weight_decay` in LARS" in message
    assert "searched in paths such as 'model/dense/kernel'" in message
    parts = "'model', 'dense', 'kernel', 'bias', 'layer_normalization', 'gamma', 'beta'"
    assert message.endswith(parts)


QUIET = {
    "with TensorFlow's end": ["bias:0", "/gamma:0$", "beta:0"],
    "nothing": [],
    "none": None,
    "all match": ["layer_norm", r"/bias$"],
}


@pytest.mark.parametrize("patterns", QUIET.values(), ids=QUIET)
def test_complete_or_empty_pattern_list_does_not_warn(patterns, variables):
    assert warnings_of(lars(patterns), variables) == []


def test_unmatched_pattern_does_not_warn_with_exclude_1d_or_without_variables(
    variables,
):
    assert warnings_of(lars(["LayerNorm"], exclude_1d=True), variables) == []
    lamb = LAMB(1.0, **mlperf_bert(8192).lamb)
    assert warnings_of(lamb, variables[:1]) == []
    assert warnings_of(lars(["LayerNorm"]), []) == []


def test_unmatched_var_names_of_keras_optimizer_warn(variables):
    [message] = warnings_of(LossScaleOptimizer(adamw("LayerNorm", "bias")), variables)
    assert "none: 'LayerNorm' of" in message
    assert "`exclude_from_weight_decay(var_names=...)` in AdamW" in message
    assert "var_list=[v for v in model.trainable_variables if" in message
    for matching in (("gamma", "bias"), ("(gamma|x)", "bia[|s]")):
        assert warnings_of(LossScaleOptimizer(adamw(*matching)), variables) == []
    inner = lars([])
    inner.exclude_from_weight_decay(var_names=["LayerNorm"])
    assert len(warnings_of(LossScaleOptimizer(inner), variables)) == 1
    # Keras's optimizers search whole paths on TensorFlow only.
    on_tensorflow = keras.backend.backend() == "tensorflow"
    for names in (("layer_norm", "bias"), ("bias:0", "gamma", "beta")):
        seen = warnings_of(LossScaleOptimizer(adamw(*names)), variables)
        assert len(seen) == (0 if on_tensorflow else 1)


def test_warning_names_no_form_that_wrapper_has_added(variables):
    """It adds `bias$`, which matches in `bias:0`'s place, and `nothing$`."""
    optimizer = LossScaleOptimizer(adamw())
    optimizer.exclude_from_weight_decay(var_names=["bias:0", "nothing:0"])
    [message] = warnings_of(optimizer, variables)
    assert "none: 'nothing:0' of" in message


def test_multi_optimizer_members_warn_of_unmatched_names(variables):
    multi = of_two(adamw("Bias"), lars(["Gamma"]), "model/layer")
    of_lars, of_adamw = warnings_of(LossScaleOptimizer(multi), variables)
    assert "'Gamma' of" in of_lars
    assert "'Bias' of" in of_adamw


def test_exclusion_on_multi_optimizer_itself_warns():
    optimizer = LossScaleOptimizer(of_two(INNER["SGD"](), INNER["SGD"]()))
    with pytest.warns(UserWarning, match="of its optimizers that use weight decay"):
        optimizer.exclude_from_weight_decay(var_names=["bias"])


@pytest.mark.filterwarnings("ignore:A pattern matches no variable.*'0\\$'")
def test_names_with_tensorflow_suffix_exclude_variables():
    for patterns, excluded in (
        (["/bias:0$"], ["bias"]),
        (["kernel:0"], ["kernel"]),
        # No name of Keras 3 ends in 0.
        (["0$", "bias"], ["bias"]),
    ):
        optimizer = lars(patterns, momentum=0.0)
        assert excluded_by(optimizer, in_a_layer("float32")) == excluded
    for make, name in ((INNER["LARS"], "^bias:0$"), (INNER["LARS, decoupled"], "s:0")):
        optimizer = make()
        optimizer.exclude_from_weight_decay(var_names=[name])
        assert excluded_by(optimizer, in_a_layer("float32")) == ["bias"]


REFUSED = {
    "a name": (dict(var_names="bias"), TypeError, "`var_names` must be a list"),
    "a number": (dict(var_names=[3]), TypeError, "`var_names` must hold strings"),
    "no expression": (dict(var_names=["bias("]), ValueError, "regular expressions"),
    "names for variables": (dict(var_list=["bias"]), TypeError, "variables only"),
}


@pytest.mark.parametrize("arguments, error, words", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("make", [INNER["LARC"], INNER["LARS"]], ids=["LARC", "LARS"])
def test_invalid_exclusion_is_rejected_and_previous_exclusion_kept(
    make, arguments, error, words
):
    variables, optimizer = two_variables("float32"), make()
    optimizer.exclude_from_weight_decay(var_list=variables[1:])
    with pytest.raises(error, match=words):
        optimizer.exclude_from_weight_decay(**arguments)
    # The previous exclusion still holds.
    assert step(optimizer, variables)[1] == 1.0


@pytest.mark.parametrize(
    "name, built", [("LARC", "all"), ("LARC", "the innermost alone"), ("LARS", "all")]
)
def test_late_exclusion_is_rejected_where_keras_excludes_only_before_build(
    name, built, monkeypatch
):
    monkeypatch.setattr(exclusions, "is_keras_3_16", lambda: True)
    variables, optimizer = two_variables("float32"), INNER[name]()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    innermost = getattr(optimizer, "inner_optimizer", optimizer)
    (optimizer if built == "all" else innermost).build(variables)
    with pytest.raises(ValueError, match="before it.* Received: .*'kernel'"):
        optimizer.exclude_from_weight_decay(var_names=["kernel"])
    kernel, bias = step(optimizer, variables)
    assert kernel < 1.0 and bias == 1.0
