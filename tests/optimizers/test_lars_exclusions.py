"""Which variables `LARS` excludes from decay and from layer adaptation."""

import numpy as np
import pytest
from keras import ops

from keras_lso import LARS
from testing.keras_versions import excluded_before_build
from testing.lars import PATHS, SHAPES, values_of, variable
from testing.optimizer_steps import SCALE, apply, in_loss_scale_optimizer

ALL, NONE = set(PATHS), set()


def treatment(variables, wrap=lambda o: o, exclude_by_method=None, **settings):
    """Which paths decay, and which adapt, as told from one step of each."""
    # With an epsilon the ratio does not make up for the length of the direction.
    inner = LARS(
        1.0,
        momentum=0.0,
        weight_decay_rate=0.5,
        eeta=0.125,
        epsilon=1.0,
        **settings,
    )
    optimizer = wrap(inner)
    if exclude_by_method:
        optimizer.exclude_from_weight_decay(**exclude_by_method)
    before = values_of(variables)
    grads = [np.ones(w.shape) for w in before]
    apply(optimizer, grads, variables)
    decaying, adapting = set(), set()
    for v, old, g, new in zip(
        variables, before, grads, values_of(variables), strict=True
    ):
        possible = {}
        for decays in (True, False):
            for adapts in (True, False):
                d = g + 0.5 * old * decays
                ratio = 0.125 * np.linalg.norm(old) / (np.linalg.norm(d) + 1.0)
                possible[decays, adapts] = old - (ratio if adapts else 1.0) * d
        matching = [k for k, e in possible.items() if np.allclose(e, new, 1e-6, 1e-6)]
        assert len(matching) == 1, (v.path, new, possible)
        [(decays, adapts)] = matching
        decaying |= {v.path} if decays else NONE
        adapting |= {v.path} if adapts else NONE
    return decaying, adapting


@pytest.fixture
def variables():
    return [
        variable(p, np.full(s, 2.0, "float32"))
        for p, s in zip(PATHS, SHAPES, strict=True)
    ]


def test_variables_of_fixture_have_given_paths(variables):
    assert [v.path for v in variables] == PATHS


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
def test_exclusion_patterns_are_searched_as_regexes_in_full_path(
    wrap, variables, patterns, excluded
):
    decaying, adapting = treatment(
        variables,
        wrap,
        exclude_from_weight_decay=patterns,
        exclude_from_layer_adaptation=[],
    )
    assert (decaying, adapting) == (ALL - excluded, ALL)


def test_unmatched_patterns_warn_and_exclude_nothing(wrap, variables):
    idle = ["BETA", "^bn", "^gamma", "block$"]
    with pytest.warns(UserWarning, match="'BETA', '\\^bn', '\\^gamma', 'block\\$' of"):
        treated = treatment(variables, wrap, exclude_from_weight_decay=idle)
    assert treated == (ALL, ALL)


GAMMA, BIAS = {"block/bn/gamma"}, {"dense/bias"}


@pytest.mark.parametrize(
    "no_decay, no_adaptation, excluded, not_adapted",
    [
        (None, None, NONE, NONE),
        (None, [], NONE, NONE),
        (None, ["bias"], NONE, BIAS),
        ([], None, NONE, NONE),
        ([], [], NONE, NONE),
        ([], ["bias"], NONE, BIAS),
        # None means the same as the other list; an empty list excludes none.
        (["gamma"], None, GAMMA, GAMMA),
        (["gamma"], [], GAMMA, NONE),
        (["gamma"], ["bias"], GAMMA, BIAS),
        (["gamma"], ["gamma", "bias"], GAMMA, GAMMA | BIAS),
    ],
)
def test_exclusion_lists_distinguish_none_from_empty_list(
    wrap, variables, no_decay, no_adaptation, excluded, not_adapted
):
    decaying, adapting = treatment(
        variables,
        wrap,
        exclude_from_weight_decay=no_decay,
        exclude_from_layer_adaptation=no_adaptation,
    )
    assert (ALL - decaying, ALL - adapting) == (excluded, not_adapted)


@pytest.mark.parametrize(
    "lists, excluded, not_adapted",
    [
        ({}, NONE, NONE),
        (
            {"exclude_from_weight_decay": ["conv"]},
            {"block/conv/kernel"},
            {"block/conv/kernel"},
        ),
        (
            {
                "exclude_from_weight_decay": ["conv"],
                "exclude_from_layer_adaptation": [],
            },
            {"block/conv/kernel"},
            NONE,
        ),
    ],
)
def test_exclude_1d_excludes_vectors_and_scalars_from_decay_and_adaptation(
    wrap, variables, lists, excluded, not_adapted
):
    flat = ALL - {"block/conv/kernel"}
    decaying, adapting = treatment(variables, wrap, exclude_1d=True, **lists)
    assert (ALL - decaying, ALL - adapting) == (flat | excluded, flat | not_adapted)


def test_keras_exclusion_method_excludes_from_decay_only(wrap, variables):
    decaying, adapting = treatment(
        variables,
        wrap,
        exclude_by_method={"var_list": [variables[0]], "var_names": ["bias", "gam"]},
    )
    assert ALL - decaying == {"block/conv/kernel", "dense/bias", "block/bn/gamma"}
    assert adapting == ALL


def test_keras_exclusion_method_and_list_combine(wrap, variables):
    decaying, adapting = treatment(
        variables,
        wrap,
        exclude_by_method={"var_names": ["gamma"]},
        exclude_from_weight_decay=["bias"],
    )
    assert ALL - decaying == {"dense/bias", "block/bn/gamma"}
    assert ALL - adapting == {"dense/bias"}


def test_exclusions_apply_to_keras_decoupled_weight_decay(wrap, variables):
    optimizer = wrap(
        LARS(
            1.0,
            eeta=0.0,
            weight_decay=0.25,
            exclude_from_weight_decay=["bn"],
            exclude_from_layer_adaptation=[],
        )
    )
    # With an eeta of 0 a layer moves by its decay alone.
    apply(optimizer, [np.ones(s) for s in SHAPES], variables)
    firsts = [float(np.ravel(w)[0]) for w in values_of(variables)]
    after = dict(zip(PATHS, firsts, strict=True))
    assert {path for path, w in after.items() if w == 2.0} == {
        "block/bn/gamma",
        "block/bn/beta",
    }
    assert set(after.values()) == {2.0, 1.5}


def test_adaptation_exclusions_apply_without_weight_decay_rate(variables):
    optimizer = LARS(
        1.0, momentum=0.0, eeta=0.5, exclude_from_layer_adaptation=["bias"]
    )
    apply(optimizer, [np.ones(s) for s in SHAPES], variables)
    # |w| / |g| is 2 for each.
    firsts = [float(np.ravel(w)[0]) for w in values_of(variables)]
    np.testing.assert_allclose(firsts, [1.0] * len(PATHS), rtol=1e-6)
    apply(optimizer, [np.full(s, 4.0) for s in SHAPES], variables)
    firsts = [float(np.ravel(w)[0]) for w in values_of(variables)]
    expected = [1.0 - 4.0 if path == "dense/bias" else 0.5 for path in PATHS]
    np.testing.assert_allclose(firsts, expected, rtol=1e-6)


def test_masters_inherit_exclusions_of_float16_variables():
    variables = [
        variable(p, np.full(s, 2.0, "float32"), "float16")
        for p, s in zip(PATHS, SHAPES, strict=True)
    ]
    inner = LARS(
        1.0,
        momentum=0.0,
        weight_decay_rate=0.5,
        eeta=0.25,
        exclude_from_weight_decay=["bn"],
    )
    optimizer = in_loss_scale_optimizer(inner)
    optimizer.exclude_from_weight_decay(var_list=[variables[3]])
    optimizer.apply([ops.full(s, SCALE, dtype="float16") for s in SHAPES], variables)
    # Decayed, d is 2 and the ratio 1/4; by the method d is 1 and the ratio 1/2.
    expected = {"block/conv/kernel": 1.5, "dense/bias": 1.5, "scale": 1.5}
    expected |= {"block/bn/gamma": 1.0, "block/bn/beta": 1.0}
    actual = [float(np.ravel(w)[0]) for w in values_of(variables)]
    assert dict(zip(PATHS, actual, strict=True)) == expected


@excluded_before_build
def test_keras_exclusion_method_applies_after_build():
    w, bias = variable("kernel", [3.0, 4.0]), variable("bias", [1.0, 2.0])
    optimizer = LARS(1.0, weight_decay_rate=0.5, eeta=1.0, momentum=0.0)
    optimizer.build([w, bias])
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.apply([ops.zeros(2), ops.zeros(2)], [w, bias])
    # Without decay a gradient of zero moves nothing.
    assert values_of([bias])[0].tolist() == [1.0, 2.0]
    assert (values_of([w])[0] < [3.0, 4.0]).all()
