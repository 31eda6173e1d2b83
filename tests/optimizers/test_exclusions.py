"""Which variables LARS, LAMB and NovoGrad exclude from decay and from adaptation."""

import keras
import numpy as np
import pytest

from keras_lso import LARS, NovoGrad
from testing.layer_wise import (
    FORMULAS,
    OF_EACH,
    PATHS,
    assert_as,
    assert_close,
    each,
    make_variables,
)
from testing.optimizer_steps import apply

ALL, NONE, FLAT = set(PATHS), set(), set(PATHS[1:])
KERNEL, GAMMA, BIAS = {PATHS[0]}, {PATHS[1]}, {PATHS[3]}
LAYERWISE = pytest.mark.parametrize(
    "cls, settings", [OF_EACH["LARS"], OF_EACH["LAMB"]], ids=["LARS", "LAMB"]
)


def check(optimizer, inner, start, gradients, not_decayed, not_adapted=NONE):
    """Compares six steps with the formula that excludes variables by path."""
    variables = make_variables(start)
    reference = FORMULAS[type(inner)](
        start, not_decayed=not_decayed, not_adapted=not_adapted
    )
    reference.weight_decay_rate = inner.weight_decay_rate
    reference.eeta = getattr(inner, "eeta", None)
    # The decay is a share of each that shows.
    for grads in [list(map(np.sign, grads)) for grads in gradients]:
        apply(optimizer, grads, variables)
        reference.step(grads, 0.5)
    assert_as(inner, variables, reference)


@pytest.mark.parametrize(
    "patterns, excluded",
    [
        (["bn"], {"block/bn/gamma", "block/bn/beta"}),
        (["^block/bn/"], {"block/bn/gamma", "block/bn/beta"}),
        (["gamma$", "bias"], {"block/bn/gamma", "dense/bias"}),
        (["bn/(gamma|beta)", "^scale$"], {"block/bn/gamma", "block/bn/beta", "scale"}),
        (["block.bn.gamma"], {"block/bn/gamma"}),
        (["(?i)BETA"], {"block/bn/beta"}),
        (("bias",), {"dense/bias"}),
        ([""], ALL),
        ([], NONE),
        (None, NONE),
    ],
)
@each
def test_exclusion_patterns_are_searched_as_regexes_in_full_path(
    wrap, start, gradients, patterns, excluded, cls, settings
):
    lists = {"exclude_from_weight_decay": patterns}
    if cls is not NovoGrad:
        lists["exclude_from_layer_adaptation"] = []
    inner = cls(0.5, **settings, **lists)
    check(wrap(inner), inner, start, gradients, excluded)


def test_unmatched_patterns_warn_and_exclude_nothing(wrap, start, gradients):
    idle = ["BETA", "^bn", "^gamma", "block$"]
    inner = LARS(0.5, weight_decay_rate=0.1, exclude_from_weight_decay=idle)
    with pytest.warns(UserWarning, match="'BETA', '\\^bn', '\\^gamma', 'block\\$' of"):
        check(wrap(inner), inner, start, gradients, NONE)


@pytest.mark.parametrize(
    "no_decay, no_adaptation, is_flat, excluded, not_adapted",
    [
        (None, None, False, NONE, NONE),
        (None, [], False, NONE, NONE),
        (None, ["bias"], False, NONE, BIAS),
        ([], None, False, NONE, NONE),
        ([], ["bias"], False, NONE, BIAS),
        # None means the same as the other list; an empty list excludes none.
        (["gamma"], None, False, GAMMA, GAMMA),
        (["gamma"], [], False, GAMMA, NONE),
        (["gamma"], ["bias"], False, GAMMA, BIAS),
        (["gamma"], ["gamma", "bias"], False, GAMMA, GAMMA | BIAS),
        # With `exclude_1d`, which excludes vectors and scalars.
        (None, None, True, FLAT, FLAT),
        (["conv"], None, True, FLAT | KERNEL, FLAT | KERNEL),
        (["conv"], [], True, FLAT | KERNEL, FLAT),
    ],
)
@LAYERWISE
def test_exclusion_lists_distinguish_none_from_empty_list(
    start,
    gradients,
    cls,
    settings,
    no_decay,
    no_adaptation,
    is_flat,
    excluded,
    not_adapted,
):
    inner = cls(
        0.5,
        **settings,
        exclude_from_weight_decay=no_decay,
        exclude_from_layer_adaptation=no_adaptation,
        exclude_1d=is_flat,
    )
    check(inner, inner, start, gradients, excluded, not_adapted)


@LAYERWISE
def test_adaptation_exclusions_apply_without_weight_decay_rate(
    start, gradients, cls, settings
):
    inner = cls(0.5, **settings, exclude_from_layer_adaptation=["bias"])
    inner.weight_decay_rate = 0.0
    check(inner, inner, start, gradients, NONE, BIAS)


@each
def test_keras_exclusion_method_and_list_combine_for_both_decays(
    wrap, start, gradients, cls, settings
):
    # The method excludes from decay only; so does the list, where there is another.
    lists = {"exclude_from_weight_decay": ["bias"]}
    inner = cls(0.5, **settings, **lists)
    optimizer = wrap(inner)
    optimizer.exclude_from_weight_decay(var_names=["gam"])
    not_adapted = NONE if cls is NovoGrad else BIAS
    check(optimizer, inner, start, gradients, BIAS | GAMMA, not_adapted)
    # Keras's decay of 0.25, at a gradient of zeros without a decay of ours.
    inner = cls(0.5, **lists)
    inner.weight_decay = 0.25
    optimizer, variables = wrap(inner), make_variables(start)
    optimizer.exclude_from_weight_decay(var_list=[variables[1]])
    apply(optimizer, [np.zeros_like(w) for w in start], variables)
    factors = [0.875, 1.0, 0.875, 1.0, 0.875]
    assert_close(variables, [w * f for w, f in zip(start, factors, strict=True)])


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow",
    reason="Keras's optimizers take bare variables on TensorFlow alone",
)
def test_tensorflow_variable_is_excluded_by_name(wrap):
    import tensorflow as tf

    names = ["bn/gamma", "kernel"]
    variables = [tf.Variable([3.0, 4.0], name=name) for name in names]
    optimizer = wrap(LARS(1.0, eeta=0.5, exclude_from_weight_decay=["gamma"]))
    apply(optimizer, [[0.0, 16.0]] * 2, variables)
    assert [v.numpy().tolist() for v in variables] == [[3.0, -12.0], [3.0, 1.5]]
