"""`measure`: overflows are found, and the largest magnitude and norms are NumPy's."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso._backend.framework import MeasureOptions
from keras_lso._backend.leaves import Leaves
from keras_lso._keras_internals import rules
from keras_lso.optimizers.lars import LARSRule
from keras_lso.optimizers.novograd import NovoGradRule
from testing.primitives import (
    DTYPES,
    MODEL_GARDEN,
    NOT_FINITE,
    PAPER,
    REFERENCE,
    implementations,
    in_each_way,
)
from testing.tensors import number, numpy, tensor

# JAX has float64 only where x64 is on; `tensor` skips where it is not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
]

each_measure = in_each_way("measure", implementations("measure"))
ADAPTIVE = LARSRule(1.0, momentum=0.9, weight_decay=0.0, trust_ratio=MODEL_GARDEN)
# With the norms that each of them needs, the check is done another way.
MEASURED_RULES = {
    "no rule": None,
    "without norms": rules.Momentum(1.0, 0.9),
    "classic": ADAPTIVE,
    "decayed": LARSRule(1.0, 0.9, weight_decay=0.5, trust_ratio=MODEL_GARDEN),
    "popular": LARSRule(
        1.0, 0.9, 0.5, MODEL_GARDEN, nesterov=True, classic_momentum=False
    ),
    "paper": LARSRule(1.0, 0.9, weight_decay=0.5, trust_ratio=PAPER),
    "excluded": LARSRule(1.0, 0.9, weight_decay=0.0, trust_ratio=None),
    "novograd": NovoGradRule(1.0, 0.9, 0.98, 1e-8),
}
with_and_without_rules = pytest.mark.parametrize(
    "rule", MEASURED_RULES.values(), ids=MEASURED_RULES
)


def measured_for(rule, grads):
    """What `measure` is told of the rules: variables of 2, slots of -1."""
    if rule is None:
        return {}
    columns = [[ops.full(g.shape, value) for g in grads] for value in (2.0, -1.0, 0.0)]
    leaves = Leaves(columns[0], columns[1 : 1 + len(rule.slots)])
    return {"rules": [rule] * len(grads), "leaves": leaves}


@pytest.mark.exhaustive
@each_measure
@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_measure_finds_one_nonfinite_element_at_any_position(measure, dtype, bad):
    shapes = [(2, 3), (), (4,)]
    good = [np.full(shape, 0.5) for shape in shapes]
    for which, shape in enumerate(shapes):
        for position in np.ndindex(shape):
            grads = [values.copy() for values in good]
            grads[which][position] = bad
            found = measure([tensor(g, dtype) for g in grads])
            assert not bool(found.finite), (which, position)
    assert bool(measure([tensor(g, dtype) for g in good]).finite)


@pytest.mark.exhaustive
@each_measure
@with_and_without_rules
@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_measure_finds_nonfinite_elements_for_every_rule(measure, dtype, bad, rule):
    for position in range(4):
        values = [0.5, -0.5, 0.25, 1.0]
        values[position] = bad
        grads = [tensor([1.0], dtype), tensor(values, dtype)]
        assert not bool(measure(grads, **measured_for(rule, grads)).finite)
    for values, finite in (
        ([0.5, -0.5, 0.25, 1.0], True),
        ([bad, 1.0, -bad, 0.5], False),  # Of opposite signs.
    ):
        grads = [tensor([1.0], dtype), tensor(values, dtype)]
        assert bool(measure(grads, **measured_for(rule, grads)).finite) is finite


LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1e300}


@pytest.mark.exhaustive
@each_measure
@with_and_without_rules
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_huge_gradients_are_finite(measure, dtype, rule):
    assert_huge_is_finite(measure, dtype, rule)


@each_measure
def test_huge_float64_gradients_are_finite(measure):
    # There is no rule for them: `takes_update` refuses them.
    assert_huge_is_finite(measure, "float64", None)


def assert_huge_is_finite(measure, dtype, rule):
    huge = LARGEST[dtype]
    for grads in (
        [[huge] * 5],  # the sum overflows
        [[huge, huge, -huge, -huge]],  # so may part of it
        [[huge], [huge], [-huge]],
        [[min(huge, 1e20)]],  # the sum does not, but its square does
        [[min(huge, 1e25)] * 3],
    ):
        grads = [tensor(g, dtype) for g in grads]
        assert bool(measure(grads, **measured_for(rule, grads)).finite), grads


SQUARED = [
    # values, inv_scale, whether their squares are finite
    ([1.8e19, -1.0], 1.0, True),
    ([1.9e19, -1.0], 1.0, False),
    ([1.8e19] * 8, 1.0, True),  # the norm's square is not
    ([1e24, -1.0], 2.0**-17, True),
    ([1e24, -1.0], 2.0**-15, False),
    ([6e4, -1.0], 2.0**14, True),
    ([6e4, -1.0], 2.0**50, False),
    ([1.0, np.inf], 2.0**-15, False),
    ([np.nan, 1.0], 1.0, False),
]


@each_measure
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_headroom_for_squares_is_measured(measure, dtype):
    for values, inv_scale, finite in SQUARED:
        if np.nanmax(np.abs(values)) > LARGEST[dtype] and np.isfinite(values).all():
            continue
        grads, scale = [tensor(values, dtype), tensor([0.25], dtype)], tensor(inv_scale)
        for asked in ({}, {"norm": True}, {"amax": True}):
            found = measure(grads, inv_scale=scale, headroom=2.0**64, **asked)
            assert bool(found.finite) is finite, (values, inv_scale, asked)


@each_measure
@pytest.mark.parametrize("size", [15, 16])
def test_compiled_check_of_squares_reads_every_element(measure, compiled, size):
    """TensorFlow's XLA adds up magnitudes in vectors of eight where none is left."""
    told = {"inv_scale": 1.0, "headroom": 2.0**64}
    call = compiled(lambda values: measure([values], **told).finite, [])
    fine = np.where(np.arange(size) % 3, 1e18, -1e18)
    assert bool(call(tensor(fine)))
    for bad in (*NOT_FINITE, -1e24):
        for values in np.where(np.eye(size), bad, fine):
            assert not bool(call(tensor(values))), values


@each_measure
def test_empty_gradients_are_finite_with_zero_magnitude(measure):
    found = measure([tensor(np.zeros(0)), tensor(np.zeros((3, 0)))], amax=True)
    assert bool(found.finite)
    assert number(found.amax) == 0.0


@pytest.mark.exhaustive
@each_measure
@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_magnitude_matches_numpy_in_float64(measure, dtype):
    random = np.random.default_rng(0)
    shapes = [(3, 4, 5), (), (0,), (7,), (2, 0)]
    grads = [tensor(random.normal(size=shape), dtype) for shape in shapes]
    found = measure(grads, amax=True)
    exact = [numpy(g) for g in grads]
    assert bool(found.finite)
    top = max(np.abs(e).max() for e in exact if e.size)
    assert number(found.amax) == np.float32(top)


@each_measure
def test_measure_accepts_mixed_gradient_dtypes(measure):
    grads = [tensor([3.0, 4.0], "float16"), tensor([-12.0], "bfloat16"), tensor(5.0)]
    found = measure(grads, amax=True, **measured_for(ADAPTIVE, grads))
    assert bool(found.finite)
    assert number(found.amax) == 12.0


@each_measure
def test_float32_overflows_beside_float64_once_unscaled(measure):
    grads = [tensor([1e36]), tensor([1.0], "float64")]
    assert not bool(measure(grads, inv_scale=tensor(1024.0)).finite)
    assert bool(measure(grads[::-1], inv_scale=tensor(2.0)).finite)
    assert bool(measure([tensor([1e50], "float64"), tensor([1.0])]).finite)


@each_measure
def test_measure_returns_norms_and_magnitude_only_on_request(measure):
    found = measure([tensor([1.0])])
    assert found.rule_norms is found.amax is found.norm is None


@each_measure
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-9, 1.0, 1e15, 1e19, 1e25, 1e36])
def test_norm_of_all_matches_numpy_at_any_magnitude(measure, size, dtype):
    random = np.random.default_rng(0)
    grads = [tensor(random.normal(size=s) * size, dtype) for s in [(20_000,), (7,), ()]]
    for inv_scale in (1.0, 2.0**-10):
        for told in ({"norm": True}, {"clips": True}):
            found = measure(grads, inv_scale=tensor(inv_scale), headroom=4.0, **told)
            squares = [np.square(numpy(g).astype("float64")).sum() for g in grads]
            right = np.sqrt(sum(squares)) * inv_scale
            # Sums of up to 20,000 squares in float32.
            np.testing.assert_allclose(number(found.norm), right, rtol=1e-5)
            limit = 3.4e38 if "norm" in told else 1.8e19
            largest = max(np.abs(numpy(g).astype("float64")).max() for g in grads)
            value = largest * inv_scale if "norm" in told else right
            assert bool(number(found.finite)) == (value * 4.0 < limit)


@each_measure
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_norm_of_few_elements_is_right_in_compiled_functions(measure, compiled, shape):
    """XLA multiplied the constants of the square of one element first."""
    norm = compiled(lambda g: measure([g], clips=True).norm, [])
    for value in (0.0, 1e-30, 1.0, 1e18, 1e25, np.inf):
        right = np.sqrt(np.prod(shape)) * value
        found = norm(tensor(np.full(shape, value)))
        np.testing.assert_allclose(number(found), right, rtol=1e-5)


@each_measure
@with_and_without_rules
def test_norm_of_all_changes_no_other_result(measure, rule):
    for bad in (1.0, 1e20, 3.4e38, np.inf, np.nan):
        grads = [tensor([1.0, -2.0]), tensor([[bad, 1.0]])]
        told = measured_for(rule, grads)
        for amax in (False, True):
            alone = measure(grads, amax=amax, **told)
            observed = measure(grads, amax=amax, norm=True, **told)
            one, other = map(keras.tree.flatten, (alone, observed._replace(norm=None)))
            for a, b in zip(one, other, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    np.testing.assert_array_equal(number(a), number(b))


def test_reference_measure_returns_norms_requested_by_each_rule():
    # The variable is 2, 2 and the slot -1, -1; the gradient is unscaled first.
    grads = [tensor([12.0, 16.0])]
    of_the_variable = np.sqrt(8.0)
    # Popular: d is 4, 5; v is 3.1, 4.1; u is 0.9 * v + d.
    expected = {
        "without norms": None,
        "classic": (5.0, of_the_variable),
        "decayed": (np.hypot(4, 5), of_the_variable),
        "popular": (np.hypot(6.79, 8.69), of_the_variable),
        "paper": (5.0, of_the_variable),
        "excluded": None,
        "novograd": (5.0,),
    }
    for name, by_hand in expected.items():
        told = measured_for(MEASURED_RULES[name], grads)
        options = MeasureOptions(inv_scale=0.25, **told)
        [norms] = REFERENCE.measure(grads, options).rule_norms
        if by_hand is None:
            assert norms is None, name
        else:
            # A few roundings of 6e-8.
            actual = [number(n) for n in norms]
            np.testing.assert_allclose(actual, by_hand, rtol=5e-7, err_msg=name)


MEASURED = [
    # values, inv_scale, finite
    ([1.0, -2.0], 1.0, True),
    ([3e38, 3e38], 1.0, True),
    ([1.0, np.nan], 1.0, False),
    ([-np.inf, -2.0], 1.0, False),
    ([3e38, np.inf], 1.0, False),
    ([0.5, -1e38], 2.0, True),
    ([0.5, -1e38], 8.0, False),
    ([0.5, -1e25], 1e15, False),
    ([0.5, -1e25], 1e10, True),
    ([0.5, -1e15], 1e25, False),  # the norm is finite
    ([0.5, -1e15], 1e20, True),
    ([0.5, -np.inf], 2.0**-15, False),
    ([0.5, -3e38], 2.0**-15, True),
    ([0.5, -3e38], 1.0, True),
    ([0.5, np.nan], 1e-3, False),
]


@pytest.mark.exhaustive
@each_measure
@with_and_without_rules
def test_compiled_measure_finds_overflows_and_largest_magnitude(
    measure, compiled, rule
):
    def measured(grads, inv_scale):
        told = measured_for(rule, grads)
        alone = measure(grads, inv_scale=inv_scale, **told)
        found = measure(grads, amax=True, inv_scale=inv_scale, **told)
        return alone.finite, found.finite, found.amax

    call = compiled(measured, [])
    for values, inv_scale, finite in MEASURED:
        *verdicts, amax = call([tensor(values), tensor([0.25])], tensor(inv_scale))
        assert [bool(v) for v in verdicts] == [finite] * 2, (values, inv_scale)
        if np.all(np.isfinite(values)):
            assert number(amax) == np.float32(np.abs(values).max())


@pytest.mark.exhaustive
@each_measure
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_measure_finds_nonfinite_element_in_sparse_gradient(
    measure, sparse_gradient, bad
):
    for row in range(3):
        values = np.ones((3, 2), "float32")
        values[row, 1] = bad
        grads = [tensor([1.0]), sparse_gradient(values, [4, 1, 4], (5, 2))]
        assert not bool(measure(grads).finite), row


@each_measure
def test_largest_magnitude_of_sparse_gradient_sums_duplicate_rows(
    measure, sparse_gradient, compiled
):
    values = np.array([[3.0, -1.0], [1.0, 2.0], [1.0, 5.0], [-4.0, 2.0]], "float32")
    rows = [4, 1, 4, 4]
    dense = np.zeros((6, 2))
    np.add.at(dense, rows, values.astype("float64"))
    assert np.abs(dense).max() == 6.0  # and 5.0 in `values`

    def measured(grads):
        found = measure(grads, amax=True)
        return found.finite, found.amax

    gradient = sparse_gradient(values, rows, (6, 2))
    finite, amax = compiled(measured, [])([gradient])
    assert bool(finite)
    assert number(amax) == 6.0


@each_measure
def test_measure_finds_duplicate_rows_whose_sum_overflows(measure, sparse_gradient):
    # Float16 rows add up in float16, as the optimizer would have added them up.
    values = np.array([[60000.0], [60000.0]], "float16")
    assert not bool(measure([sparse_gradient(values, [2, 2], (3, 1))]).finite)
    assert bool(measure([sparse_gradient(values, [2, 1], (3, 1))]).finite)
