"""The primitives of the backend seam, each held against something independent.

`measure` and `l2_norms` against NumPy in float64, `run_if` bit for bit, `fused_step`
against the Keras optimizer's own step and, for LARS, against its formula in NumPy
float64, `compute_gradients` against derivatives by hand; and the reference in
`Framework` as well as the chosen framework's own.
"""

import types
from functools import partial
from unittest import mock

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from keras import ops

from keras_lso import LAMB, LARS, NovoGrad
from keras_lso._backend import backend
from keras_lso._backend.framework import Framework
from keras_lso._backend.measurement import Measurement
from keras_lso._backend.rule import TrustRatio
from keras_lso._backend.targets import Targets
from keras_lso._core.fused_step import FusedStep, slots_of, stored_in
from keras_lso._keras_internals import rules
from keras_lso._keras_internals.optimizers import iteration_variable
from keras_lso._keras_internals.rules import fitting_rule
from keras_lso._keras_internals.variables import storage_of
from keras_lso.optimizers.lamb import LAMBRule
from keras_lso.optimizers.lars import LARSRule
from keras_lso.optimizers.novograd import NovoGradRule
from testing import optimizers as table
from testing.tiers import is_full

# JAX has float64 only where x64 is on; `tensor` skips where it is not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
]

DTYPES = ["float16", "bfloat16", "float32"]
if keras.backend.backend() != "jax":
    # A combination with one that is skipped would stand for its other values.
    DTYPES.append("float64")
NOT_FINITE = [np.inf, -np.inf, np.nan]


# What tells a step that it runs on a CPU, where to look at a tensor costs nothing.
TELLS_OF_CPU = {
    "torch": "keras_lso._backend.torch.measure.is_on_host",
    "jax": "keras_lso._backend.jax.measure._is_on_cpu",
}.get(keras.backend.backend())


def on_an_accelerator(function):
    """A primitive as it runs where nobody may look at a tensor."""

    def call(*args, **kwargs):
        with mock.patch(TELLS_OF_CPU, lambda *args: False):
            return function(*args, **kwargs)

    return call


IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
PRIMITIVES = ["measure", "run_if", "fused_step", "l2_norms", "reduce_gradients"]
# Of these, what looks at tensors on a CPU.
LOOK_AT_TENSORS = {
    "torch": ["measure", "run_if", "fused_step"],
    "jax": ["measure"],
}.get(keras.backend.backend(), [])
REFERENCE = Framework()
KERNELS = {
    "framework": backend,
    "reference": REFERENCE,
    "accelerator": types.SimpleNamespace(
        **{name: getattr(backend, name) for name in PRIMITIVES}
        | {name: on_an_accelerator(getattr(backend, name)) for name in LOOK_AT_TENSORS}
    ),
}


def is_reference(primitive):
    """Whether it is the plain `Framework`'s, which a backend may have inherited."""
    function = getattr(primitive, "__func__", primitive)
    return function is getattr(Framework, function.__name__, None)


def implementations(*primitives):
    """The functions of each of `KERNELS`: `{name: function}`, or tuples of several.

    Of those that are the same here, as `fused_step` is on JAX, one is enough. The
    reference's is not called on TensorFlow, where it takes long; JAX's is the same.
    """
    found, seen = {}, []
    for name, kernels in KERNELS.items():
        if name == "reference" and "fused_step" in primitives and IS_TENSORFLOW:
            continue
        methods = tuple(getattr(kernels, primitive) for primitive in primitives)
        functions = [getattr(method, "__func__", method) for method in methods]
        if functions not in seen:
            seen.append(functions)
            found[name] = methods
    return found if primitives[1:] else {name: f for name, [f] in found.items()}


def in_each_way(argument, ways):
    return pytest.mark.parametrize(argument, ways.values(), ids=ways)


each_measure = in_each_way("measure", implementations("measure"))
each_run_if = in_each_way("run_if", implementations("run_if"))
each_fused_step = in_each_way("fused_step", implementations("fused_step"))
each_l2_norms = in_each_way("l2_norms", implementations("l2_norms"))

# How many ways each primitive has: the reference, the framework's, an accelerator's.
WAYS = {
    "tensorflow": {"measure": 2, "run_if": 2, "fused_step": 1, "l2_norms": 1},
    "jax": {"measure": 3, "run_if": 2, "fused_step": 1, "l2_norms": 1},
    "torch": {"measure": 3, "run_if": 3, "fused_step": 3, "l2_norms": 2},
}[keras.backend.backend()]


@pytest.mark.parametrize("primitive, count", WAYS.items(), ids=WAYS)
def test_a_primitive_is_tested_in_each_way_and_in_none_twice(primitive, count):
    assert len(set(implementations(primitive).values())) == count
    assert len(implementations(primitive)) == count


def tensor(values, dtype="float32"):
    result = ops.convert_to_tensor(np.asarray(values, "float64"), dtype=dtype)
    if keras.backend.standardize_dtype(result.dtype) != dtype:
        pytest.skip(f"This backend has no {dtype} here (JAX: x64 is off)")
    return result


def numpy(values):
    if keras.backend.standardize_dtype(values.dtype) == "bfloat16":
        values = ops.cast(values, "float32")
    return ops.convert_to_numpy(values).astype("float64")


def transposed(values):
    """On PyTorch a view, whose elements do not lie in their order."""
    return ops.transpose(values, axes=tuple(range(len(values.shape)))[::-1])


def number(value):
    return float(ops.convert_to_numpy(ops.cast(value, "float32")))


# --- measure ----------------------------------------------------------------

MODEL_GARDEN, PAPER = (
    TrustRatio(eeta=0.1),
    TrustRatio(eeta=0.1, epsilon=1e-3, upper=1.0, paper=True),
)
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
    slots = list(zip(*columns[1 : 1 + len(rule.slots)], strict=True))
    return {
        "rules": [rule] * len(grads),
        "targets": Targets(columns[0], slots or [()] * len(grads)),
    }


@pytest.mark.exhaustive
@each_measure
@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_anywhere_is_found(measure, dtype, bad):
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
def test_one_bad_element_is_found_for_every_rule(measure, dtype, bad, rule):
    for position in range(4):
        values = [0.5, -0.5, 0.25, 1.0]
        values[position] = bad
        grads = [tensor([1.0], dtype), tensor(values, dtype)]
        assert not bool(measure(grads, **measured_for(rule, grads)).finite)
    grads = [tensor([1.0], dtype), tensor([0.5, -0.5, 0.25, 1.0], dtype)]
    assert bool(measure(grads, **measured_for(rule, grads)).finite)


@pytest.mark.exhaustive
@each_measure
@with_and_without_rules
def test_infinities_that_cancel_are_found(measure, rule):
    grads = [tensor([np.inf, -np.inf, 1.0])]
    assert not bool(measure(grads, **measured_for(rule, grads)).finite)


LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1e300}


@pytest.mark.exhaustive
@each_measure
@with_and_without_rules
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_huge_gradients_are_finite(measure, dtype, rule):
    assert_huge_is_finite(measure, dtype, rule)


@each_measure
def test_huge_float64_gradients_are_finite(measure):
    # There is no rule for them: `fused_step_takes` refuses them.
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


UNSCALED = [
    # magnitude, inv_scale, finite
    (1e38, 2.0, True),
    (1e38, 8.0, False),
    (1e25, 1e15, False),
    (1e25, 1e10, True),
    (1e15, 1e25, False),  # the norm is finite
    (1e15, 1e20, True),
    (np.inf, 2.0**-15, False),
    (3e38, 2.0**-15, True),
    (3e38, 1.0, True),
    (np.nan, 1e-3, False),
]


@pytest.mark.exhaustive
@each_measure
@with_and_without_rules
@pytest.mark.parametrize("magnitude, inv_scale, finite", UNSCALED)
def test_gradients_that_overflow_only_when_unscaled_are_found(
    measure, magnitude, inv_scale, finite, rule
):
    grads = [tensor([1.0]), tensor([0.5, -magnitude])]
    told = measured_for(rule, grads)
    found = measure(grads, inv_scale=tensor(inv_scale), **told)
    assert bool(found.finite) is finite


@each_measure
@pytest.mark.parametrize("rule", ["no rule", "classic", "novograd"])
def test_a_finite_norm_proves_nothing_where_unscaling_enlarges(measure, rule):
    # The squares of these are finite, and their products with 1e25 are not.
    grads = [tensor([1.0]), tensor([0.5, -1e15])]
    told = measured_for(MEASURED_RULES[rule], grads)
    assert not bool(measure(grads, inv_scale=tensor(1e25), **told).finite)


@each_measure
def test_empty_gradients_are_finite(measure):
    found = measure([tensor(np.zeros(0)), tensor(np.zeros((3, 0)))], amax=True)
    assert bool(found.finite)
    assert number(found.amax) == 0.0


@pytest.mark.exhaustive
@each_measure
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_magnitude_equals_numpy_in_float64(measure, dtype):
    random = np.random.default_rng(0)
    shapes = [(3, 4, 5), (), (0,), (7,), (2, 0)]
    grads = [tensor(random.normal(size=shape), dtype) for shape in shapes]
    found = measure(grads, amax=True)
    exact = [numpy(g) for g in grads]
    assert bool(found.finite)
    top = max(np.abs(e).max() for e in exact if e.size)
    assert number(found.amax) == np.float32(top)


@each_measure
def test_dtypes_may_be_mixed(measure):
    grads = [tensor([3.0, 4.0], "float16"), tensor([-12.0], "bfloat16"), tensor(5.0)]
    found = measure(grads, amax=True, **measured_for(ADAPTIVE, grads))
    assert bool(found.finite)
    assert number(found.amax) == 12.0


@each_measure
def test_the_results_are_float32_and_boolean_scalars(measure):
    found = measure([tensor([1.0], "float16")], amax=True)
    results = found.finite, found.amax
    assert [keras.backend.standardize_dtype(r.dtype) for r in results] == [
        "bool",
        "float32",
    ]
    assert [tuple(r.shape) for r in results] == [(), ()]


@each_measure
def test_norms_and_largest_magnitude_come_only_when_asked_for(measure):
    found = measure([tensor([1.0])])
    assert found.gradient_norms is found.rule_norms is None
    assert found.amax is None


def test_the_reference_returns_the_norms_that_each_rule_asks_for():
    # The variable is 2, 2 and the slot -1, -1; the gradient is unscaled first.
    grads = [tensor([12.0, 16.0])] * len(MEASURED_RULES)
    told = [measured_for(rule, grads[:1]) for rule in list(MEASURED_RULES.values())[1:]]
    found = REFERENCE.measure(
        grads[1:],
        inv_scale=0.25,
        rules=[t["rules"][0] for t in told],
        targets=Targets(
            [t["targets"].variables[0] for t in told],
            [t["targets"].slots[0] for t in told],
        ),
    )
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
    for norms, (name, by_hand) in zip(found.rule_norms, expected.items(), strict=True):
        if by_hand is None:
            assert norms is None, name
        else:
            # A few roundings of 6e-8.
            actual = [number(n) for n in norms]
            np.testing.assert_allclose(actual, by_hand, rtol=5e-7, err_msg=name)


@pytest.mark.exhaustive
@with_and_without_rules
def test_measuring_is_the_same_when_compiled(compiled, rule):
    def measure(grads, inv_scale):
        told = measured_for(rule, grads)
        found = backend.measure(grads, amax=True, inv_scale=inv_scale, **told)
        return found.finite, found.amax

    call = compiled(measure, [])
    for values, inv_scale, finite in [
        ([1.0, -2.0], 1.0, True),
        ([3e38, 3e38], 1.0, True),
        ([1.0, np.nan], 1.0, False),
        ([-np.inf, -2.0], 1.0, False),
        ([3e38, np.inf], 1.0, False),
        *(([0.5, -m], inv_scale, finite) for m, inv_scale, finite in UNSCALED),
    ]:
        found = call([tensor(values), tensor([0.25])], tensor(inv_scale))
        assert bool(found[0]) is finite, (values, inv_scale)
        if np.all(np.isfinite(values)):
            assert number(found[1]) == np.float32(np.abs(values).max())


@pytest.mark.exhaustive
@each_measure
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_a_bad_element_in_a_sparse_gradient_is_found(measure, sparse_gradient, bad):
    for row in range(3):
        values = np.ones((3, 2), "float32")
        values[row, 1] = bad
        grads = [tensor([1.0]), sparse_gradient(values, [4, 1, 4], (5, 2))]
        assert not bool(measure(grads).finite), row


@each_measure
def test_the_largest_magnitude_adds_up_rows_that_come_twice(
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
def test_rows_that_overflow_only_when_added_up_are_found(measure, sparse_gradient):
    # Float16 rows add up in float16, as the optimizer would have added them up.
    values = np.array([[60000.0], [60000.0]], "float16")
    assert not bool(measure([sparse_gradient(values, [2, 2], (3, 1))]).finite)
    assert bool(measure([sparse_gradient(values, [2, 1], (3, 1))]).finite)


# --- l2_norms and reduce_gradients -------------------------------------------------


@each_l2_norms
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_numpy_in_float64(l2_norms, dtype):
    random = np.random.default_rng(0)
    shapes = [(3, 4, 5), (), (0,), (7,), (2, 0)]
    values = [tensor(random.normal(size=shape), dtype) for shape in shapes]
    norms = l2_norms(values)
    assert [tuple(n.shape) for n in norms] == [()] * 5
    # At most 60 squares are added up in float32: 60 roundings of 6e-8 each, of
    # which the square root halves the effect. In float64 they are of 1e-16.
    np.testing.assert_allclose(
        [float(ops.convert_to_numpy(n)) for n in norms],
        [np.sqrt(np.sum(numpy(v) ** 2)) for v in values],
        rtol=1e-14 if dtype == "float64" else 2e-6,
    )


@each_l2_norms
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_norms_are_summed_up_and_returned_in_float32(l2_norms, dtype):
    # 256 squared is 65536, which float16 does not hold; nor does it the second norm.
    norms = l2_norms([tensor([192.0, -256.0], dtype), tensor([49152.0] * 4, dtype)])
    assert [keras.backend.standardize_dtype(n.dtype) for n in norms] == ["float32"] * 2
    assert [number(n) for n in norms] == [320.0, 98304.0]


@each_l2_norms
def test_norms_of_mixed_dtypes_are_each_right(l2_norms):
    values = [tensor([3.0, 4.0], "float16"), tensor([-12.0], "bfloat16"), tensor(5.0)]
    assert [number(n) for n in l2_norms(values)] == [5.0, 12.0, 5.0]


@each_l2_norms
def test_a_wide_tensor_among_others_keeps_its_range(l2_norms):
    values = [tensor([3.0, 4.0]), tensor([3e30, 4e30], "float64")]
    norms = [float(ops.convert_to_numpy(n)) for n in l2_norms(values)]
    np.testing.assert_allclose(norms, [5.0, 5e30], rtol=1e-14)


@each_l2_norms
def test_norms_of_many_elements_keep_their_digits(l2_norms, compiled):
    # As large as the last layer of a VGG. One by one in float32 the squares would
    # add up with an error of 1e-4; in blocks or by halves it is some 1e-7.
    values = np.random.default_rng(0).standard_normal(2**22, dtype="float32")
    exact = np.linalg.norm(values.astype("float64"))

    def norms(values):
        return l2_norms([values])

    [norm] = compiled(norms, [])(ops.convert_to_tensor(values))
    np.testing.assert_allclose(number(norm), exact, rtol=1e-6)


@each_l2_norms
def test_norms_of_a_transposed_tensor_are_its_own(l2_norms):
    values = np.arange(6.0).reshape(2, 3)
    [norm] = l2_norms([transposed(tensor(values))])
    np.testing.assert_allclose(number(norm), np.linalg.norm(values), rtol=2e-7)


@each_l2_norms
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_norms_of_what_is_not_finite_are_not_finite(l2_norms, bad):
    [norm] = l2_norms([tensor([1.0, bad])])
    assert not np.isfinite(number(norm))


@each_l2_norms
def test_norms_of_a_sparse_gradient_add_up_rows_that_come_twice(
    l2_norms, sparse_gradient, compiled
):
    values = np.array([[3.0, -1.0], [1.0, 2.0], [1.0, 5.0], [-4.0, 2.0]], "float32")
    rows = [4, 1, 4, 4]
    dense = np.zeros((6, 2))
    np.add.at(dense, rows, values.astype("float64"))
    assert np.linalg.norm(dense) != np.linalg.norm(values)

    def norms(grads):
        return l2_norms(grads)

    grads = [tensor([3.0, 4.0]), sparse_gradient(values, rows, (6, 2))]
    found = compiled(norms, [])(grads)
    np.testing.assert_allclose(
        [number(n) for n in found], [5.0, np.linalg.norm(dense)], rtol=1e-6
    )


@in_each_way("reduce", implementations("reduce_gradients"))
def test_on_one_replica_gradients_are_reduced_already(reduce):
    values = [[3.0, 4.0], 5.0]
    for result, value in zip(reduce([tensor(v) for v in values]), values, strict=True):
        np.testing.assert_array_equal(numpy(result), value)


# --- run_if -----------------------------------------------------------------


@pytest.fixture
def state():
    return [
        keras.Variable(np.array([1.0, -0.0, np.inf], "float32")),
        keras.Variable(np.array(-0.0, "float32")),
        keras.Variable(7, dtype="int32", trainable=False),
    ]


@each_run_if
@pytest.mark.parametrize("finite", [True, False])
def test_a_step_is_run_whole_or_leaves_every_bit(
    run_if, compiled, snapshot, state, finite
):
    weights, slot, count = state

    def step(grads):
        gradient, nothing = grads
        assert nothing is None
        slot.assign(slot + gradient[0])
        # Reads what it has just written.
        weights.assign(weights + slot * ops.ones(3))
        count.assign_add(1)

    def run(finite, gradient):
        run_if(finite, step, [gradient, None], state=state)

    before = snapshot(state)
    compiled(run, state)(ops.convert_to_tensor(finite), tensor([0.0, np.nan]))
    if finite:
        # -0.0 + 0.0 is 0.0.
        expected = [np.array([1.0, 0.0, np.inf], "float32"), np.float32(0), np.int32(8)]
        assert snapshot(state) == [value.tobytes() for value in expected]
    else:
        assert snapshot(state) == before


@each_run_if
@pytest.mark.parametrize("finite", [True, False])
def test_what_a_step_reads_back_is_what_it_wrote(run_if, compiled, finite):
    a, b = keras.Variable([1.0]), keras.Variable([10.0])

    def step(grads):
        a.assign_add(grads[0])
        b.assign(b * a)
        a.assign(a * 2.0)

    def run(finite, gradient):
        run_if(finite, step, [gradient], state=[a, b])

    call = compiled(run, [a, b])
    call(ops.convert_to_tensor(finite), tensor([2.0]))
    call(ops.convert_to_tensor(True), tensor([1.0]))
    # Skipped or not at first: (1 + 2) * 2 = 6, 10 * 3 = 30.
    before = (6.0, 30.0) if finite else (1.0, 10.0)
    expected = (2 * (before[0] + 1), before[1] * (before[0] + 1))
    assert (float(a.numpy()[0]), float(b.numpy()[0])) == expected


# --- fused_step -------------------------------------------------------------

# What the table has at one rate, with other hyperparameters as well.
MORE = {
    "adam": partial(keras.optimizers.Adam, 0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-5),
    "adam with a schedule": partial(
        keras.optimizers.Adam, keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
    "nadam": partial(keras.optimizers.Nadam, 0.01, beta_1=0.8, beta_2=0.95),
    "adamax": partial(keras.optimizers.Adamax, 0.01, beta_1=0.8, beta_2=0.95),
    "lion": partial(keras.optimizers.Lion, 0.01, beta_1=0.8, beta_2=0.95),
    "rmsprop": partial(keras.optimizers.RMSprop, 0.1, rho=0.8, epsilon=1e-5),
    "lars with a schedule and decay": partial(
        LARS, keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5), decay=0.5
    ),
    "lamb, bounded": partial(
        LAMB, 0.1, 0.8, 0.95, bias_correction=False, min_trust_ratio=0.25
    ),
}
# Few of them are as sensitive to the rate as their norms are.
RATES = {"keras lamb": 0.01, **dict.fromkeys(table.OURS, 0.5), "lamb": 0.1}
OPTIMIZERS = {
    **MORE,
    **{
        f"{name} at {rate}{', with decay' if options else ''}": partial(
            make, rate, **options
        )
        for name, make in table.OPTIMIZERS.items()
        for rate in [RATES.get(name, 0.01)]
        for options in ({}, table.decaying(make))
    },
}
if keras.backend.backend() == "jax":
    # No other rule has a fused step there: XLA fuses the optimizer's own.
    OPTIMIZERS = {
        n: make for n, make in OPTIMIZERS.items() if n.startswith(("la", "novo"))
    }


class StepByStepLARS(LARS):
    """A subclass, which Keras updates variable by variable."""


class StepByStepLAMB(LAMB):
    """Another."""


class StepByStepNovoGrad(NovoGrad):
    """Another."""


STEP_BY_STEP = {
    LARS: StepByStepLARS,
    LAMB: StepByStepLAMB,
    NovoGrad: StepByStepNovoGrad,
}


def plain_optimizer(make):
    """The optimizer itself, whose steps no kernel takes."""
    optimizer = make()
    if type(optimizer) in STEP_BY_STEP:
        twin = STEP_BY_STEP[type(optimizer)]
        return twin.from_config(optimizer.get_config())
    return optimizer


def storage(fused_step, variables):
    """What `fused_step` changes. The reference takes variables on all backends."""
    if is_reference(fused_step):
        return variables
    return storage_of(variables)


LAMBS = LAMBRule, rules.Lamb


class FusedOptimizer:
    """A Keras optimizer whose steps are taken by `fused_step`."""

    def __init__(self, make, weights, fused_step, low=None):
        self.fused_step = fused_step
        self.low = low
        self.weights = [keras.Variable(w) for w in weights]
        self.optimizer = make()
        self.optimizer.build(self.weights)
        self.state = self.weights + self.optimizer.variables
        initial = map(ops.convert_to_numpy, self.state)
        self.largest = np.array([np.abs(v).max(initial=0) for v in initial])
        self.rule = fitting_rule(self.optimizer, self.weights)

    def step(self, grads, finite, inv_scale):
        slots = slots_of(self.rule, self.optimizer, self.weights)
        written = Targets(self.weights, slots)
        targets = stored_in(written)
        made = FusedStep(
            self.rule, self.optimizer, targets.variables, written, targets
        ).rules()
        weights, slots = (storage(self.fused_step, v) for v in (self.weights, slots))
        low = self.low and [
            None if v is None else storage(self.fused_step, [v])[0] for v in self.low
        ]
        found = Measurement(finite)
        targets = Targets(weights, slots, low)
        self.fused_step(made, targets, grads, found, inv_scale)
        if self.rule.finish:
            made[0].finish(self.optimizer, finite)
        iteration = iteration_variable(self.optimizer)
        iteration.assign_add(ops.cast(finite, iteration.dtype))

    def assert_close_to(self, weights, optimizer):
        """Equal to a share of the largest magnitude that each tensor has had."""
        actual = [ops.convert_to_numpy(v) for v in self.state]
        magnitudes = [np.abs(a).max(initial=0) for a in actual]
        self.largest = np.maximum(self.largest, magnitudes)
        # Weights: some eight roundings of 1.2e-7 each. Slots: 1 - beta_2 is 0.001 to
        # Keras and 1 - float32(0.999) to a kernel in float32. These are 1.3e-5 apart,
        # and the velocities are proportional to it. Nadam's formula has the latter, but
        # on PyTorch Keras has the former; its steps are divided by the root of them.
        # LAMB's rate is of the norm of the weights, which feeds their errors back.
        of_weights = {rules.Nadam: 1e-5, **dict.fromkeys(LAMBS, 2e-6)}
        of_weights = of_weights.get(self.rule, 1e-6)
        shares = [of_weights] * len(weights) + [2e-5] * len(optimizer.variables)
        expected = [*weights, *optimizer.variables]
        for a, e, tolerance in zip(
            actual, expected, shares * self.largest, strict=True
        ):
            e = ops.convert_to_numpy(e)
            np.testing.assert_allclose(a, e, rtol=0, atol=tolerance)


SHAPES = st_numpy.array_shapes(min_dims=0, max_dims=2, max_side=3)
if keras.backend.backend() == "jax":
    # It compiles each operation for each new shape.
    SHAPES = st.sampled_from([(), (3,), (2, 3)])


# An eager step takes ten times as long there, and is the same for all numbers.
EXAMPLES = 4 if IS_TENSORFLOW and not is_full() else 10


@each_fused_step
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@hypothesis.settings(max_examples=EXAMPLES)
@hypothesis.given(
    shapes=st.lists(SHAPES, min_size=1, max_size=2),
    pattern=st.lists(st.booleans(), min_size=1, max_size=4),
    scale=st.sampled_from([1.0, 2.0**-14, 1000.0, 2.0**15, 2.0**24]),
    magnitude=st.sampled_from([1e-4, 1.0, 1e4]),
    dtype=st.sampled_from(["float32", "float16"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_fused_steps_equal_the_steps_of_the_keras_optimizer(
    make, fused_step, shapes, pattern, scale, magnitude, dtype, seed
):
    random = np.random.default_rng(seed)
    weights = [random.normal(size=s).astype("float32") for s in shapes]
    fused = FusedOptimizer(make, weights, fused_step)
    plain, plain_weights = plain_optimizer(make), [keras.Variable(w) for w in weights]
    for finite in pattern:
        largest = 6e4 if dtype == "float16" else 3e38
        grads = [
            np.clip(random.normal(size=s) * magnitude * scale, -largest, largest)
            for s in shapes
        ]
        grads = [np.asarray(g, dtype) for g in grads]
        if not finite:
            grads[-1] = np.full_like(grads[-1], np.inf)
        before = [np.array(v.numpy()).tobytes() for v in fused.state]
        fused.step(
            [ops.convert_to_tensor(g) for g in grads],
            ops.convert_to_tensor(finite),
            ops.convert_to_tensor(1.0 / scale, dtype="float32"),
        )
        if finite:
            unscaled = [g.astype("float32") / np.float32(scale) for g in grads]
            plain.apply([ops.convert_to_tensor(g) for g in unscaled], plain_weights)
            fused.assert_close_to(plain_weights, plain)
        else:
            after = [np.array(v.numpy()).tobytes() for v in fused.state]
            assert after == before


OF_THE_FRAMEWORK = implementations("fused_step")
if len(OF_THE_FRAMEWORK) > 1:
    # Keras itself has another formula for PyTorch: its `1 - beta` is not rounded.
    del OF_THE_FRAMEWORK["reference"]


TO_THE_BIT = [keras.optimizers.Lion]
if backend.UPDATES_IN_PLACE:
    # The kernels do there what Keras does, in its order; XLA and TensorFlow's do not.
    TO_THE_BIT += [keras.optimizers.RMSprop, keras.optimizers.Adagrad]
    TO_THE_BIT += [keras.optimizers.Nadam, keras.optimizers.Adamax]


@pytest.mark.parametrize("make", TO_THE_BIT)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@in_each_way("fused_step", OF_THE_FRAMEWORK)
def test_fused_steps_are_keras_own_to_the_bit(fused_step, dtype, make, snapshot):
    random = np.random.default_rng(0)
    # What packs small tensors and what does not.
    weights = [random.normal(size=s).astype("float32") for s in [(), (3, 5), (40_001,)]]
    fused = FusedOptimizer(make, weights, fused_step)
    plain, plain_weights = make(), list(map(keras.Variable, weights))
    scale = 2.0**8
    for finite in [True, True, False, True]:
        grads = [
            np.asarray(random.normal(size=w.shape) * scale, dtype) for w in weights
        ]
        grads[0] = grads[0] if finite else np.asarray(np.nan, dtype)
        given = [ops.convert_to_tensor(g) for g in grads]
        fused.step(given, ops.convert_to_tensor(finite), tensor(1.0 / scale))
        if finite:
            unscaled = [g.astype("float32") / np.float32(scale) for g in grads]
            plain.apply([ops.convert_to_tensor(g) for g in unscaled], plain_weights)
        assert snapshot(fused.state) == snapshot([*plain_weights, *plain.variables])


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_fused_steps_are_the_same_when_compiled(make, compiled, snapshot):
    random = np.random.default_rng(0)
    weights = [random.normal(size=s).astype("float32") for s in [(3, 4), (), (5,)]]
    scale = 2.0**10
    fast = FusedOptimizer(make, weights, backend.fused_step)
    plain, plain_weights = plain_optimizer(make), [keras.Variable(w) for w in weights]
    step = compiled(fast.step, fast.state)
    for finite in [True, True, False, True]:
        grads = [random.normal(size=w.shape).astype("float32") for w in weights]
        arguments = (
            [tensor(g * scale if finite else g * np.nan) for g in grads],
            ops.convert_to_tensor(finite),
            tensor(1.0 / scale),
        )
        before = snapshot(fast.state)
        step(*arguments)
        assert (snapshot(fast.state) == before) is not finite
        if finite:
            plain.apply([tensor(g) for g in grads], plain_weights)
        fast.assert_close_to(plain_weights, plain)


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@each_fused_step
def test_fifty_fused_steps_from_zero_equal_those_of_the_keras_optimizer(
    make, fused_step, compiled_once
):
    # A weight that starts at zero is nothing but its steps: their relative errors
    # are its own. All gradients have the same sign, so that none of them cancel.
    random = np.random.default_rng(0)
    weights = [np.zeros((3, 4), "float32"), np.zeros(4, "float32")]
    fused = FusedOptimizer(make, weights, fused_step)
    plain, plain_weights = plain_optimizer(make), [keras.Variable(w) for w in weights]
    plain.build(plain_weights)

    def step_both(*grads):
        fused.step(list(grads), ops.convert_to_tensor(True), tensor(1.0))
        plain.apply(list(grads), plain_weights)

    state = fused.state + plain_weights + plain.variables
    step_both = compiled_once(step_both, state)
    for _ in range(50):
        grads = [random.uniform(0.5, 1.5, size=w.shape) for w in weights]
        step_both(*(tensor(g) for g in grads))
    fused.assert_close_to(plain_weights, plain)


# As the variables of masters: of one dtype, of another, and of none; of a size that is
# and one that is not a multiple of four elements.
LOW_PRECISION = [
    ("float16", (2, 4)),
    ("bfloat16", (3,)),
    (None, (3,)),
    ("float16", (5,)),
]


@pytest.mark.exhaustive
@each_fused_step
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_fused_steps_of_masters_keep_their_variables_in_step(
    make, fused_step, compiled
):
    random = np.random.default_rng(0)
    weights = [random.normal(size=s).astype("float32") for _, s in LOW_PRECISION]
    weights[0][0] = -0.0, 0.0, 1e-9, 7e4
    low = [dtype and keras.Variable(ops.zeros(s), dtype) for dtype, s in LOW_PRECISION]
    fused = FusedOptimizer(make, weights, fused_step, low)
    alone = FusedOptimizer(make, weights, fused_step)

    def write():
        for v, master in zip(low, fused.weights, strict=True):
            if v is not None:
                v.assign(backend.rounded(ops.convert_to_tensor(master), v.dtype))

    write()
    present = [v for v in low if v is not None]
    step = compiled(fused.step, fused.state + present)
    for number, finite in enumerate([True, True, False, True]):
        if number == 1:
            # The last one is assigned from outside: its master starts from there.
            low[-1].assign(low[-1] + 1)
            alone.weights[-1].assign(ops.cast(low[-1], "float32"))
        if number == 2:
            # On an overflow nothing changes, not even what differs.
            low[0].assign(low[0] * 2)
        grads = [tensor(random.normal(size=w.shape) * 2.0**10) for w in weights]
        rest = ops.convert_to_tensor(finite), tensor(2.0**-10)
        before = [array.tobytes() for array in map(numpy, present + fused.state)]
        step(grads, *rest)
        if not finite:
            after = [array.tobytes() for array in map(numpy, present + fused.state)]
            assert after == before
            low[0].assign(low[0] * 0.5)
            continue
        alone.step(grads, *rest)
        fused.assert_close_to(alone.weights, alone.optimizer)
        kept = [numpy(v) for v in low if v is not None]
        write()
        for v, value in zip(present, kept, strict=True):
            np.testing.assert_array_equal(numpy(v), value)
    assert np.isfinite(numpy(low[0])).all()


@pytest.mark.exhaustive
@each_fused_step
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_skipped_fused_step_keeps_negative_zeros(
    make, fused_step, compiled, snapshot
):
    negative_zeros = np.full(3, -0.0, "float32")
    fused = FusedOptimizer(make, [negative_zeros], fused_step)
    for variable in fused.state:
        if variable.shape == (3,):
            variable.assign(np.full(3, -0.0, "float32"))
    before = snapshot(fused.state)
    step = compiled(fused.step, fused.state)
    step([tensor([np.inf, 0.0, 1.0])], ops.convert_to_tensor(False), tensor(1.0))
    assert snapshot(fused.state) == before


@pytest.mark.exhaustive
@each_fused_step
@pytest.mark.parametrize("learning_rate", [1e-3, 0.3, 0.0])
def test_many_small_decays_add_up(fused_step, learning_rate, compiled_once):
    # No gradient: the weights do nothing but decay.
    def make():
        return keras.optimizers.AdamW(learning_rate, weight_decay=0.0041)

    weights = np.linspace(-1.0, 1.0, 1001, dtype="float32")
    fused = FusedOptimizer(make, [weights], fused_step)
    step = compiled_once(fused.step, fused.state)
    for _ in range(300):
        step([tensor(np.zeros(1001))], ops.convert_to_tensor(True), tensor(1.0))
    decay = float(np.float32(learning_rate) * np.float32(0.0041))
    expected = weights.astype("float64") * (1.0 - decay) ** 300
    error = numpy(fused.weights[0]) - expected
    # Each step rounds each weight by up to 3e-8, a weight often to the same side.
    assert np.abs(error).max() <= 300 * 3e-8
    # On average over the weights that is nothing, unless the factor itself is rounded.
    is_large = np.abs(expected) > 0.5
    relative = np.divide(error, expected, where=is_large, out=np.zeros_like(error))
    assert abs(np.mean(relative)) <= 3e-7


def test_the_reference_never_claims_to_be_the_faster_way():
    assert REFERENCE.fused_step_takes(None, [], []) is False


# --- fused_step of LARS -----------------------------------------------------

LEARNING_RATE = 0.5


def lars_rule(**settings):
    return LARSRule(learning_rate=tensor(LEARNING_RATE), **settings)


def lars_in_numpy(rule, g, w, v):
    """One step in float64, written from the formulas in the class's docstring."""

    def rate(direction):
        trust = rule.trust_ratio
        w_norm, d_norm = np.linalg.norm(w), np.linalg.norm(direction)
        if trust is None or w_norm == 0 or d_norm == 0:
            return LEARNING_RATE
        penalty = rule.weight_decay * w_norm if trust.paper else 0.0
        ratio = trust.eeta * w_norm / (d_norm + penalty + trust.epsilon)
        return LEARNING_RATE * min(ratio, trust.upper)

    d = g + rule.weight_decay * w
    if rule.classic_momentum:
        is_paper = rule.trust_ratio is not None and rule.trust_ratio.paper
        d = rate(g if is_paper else d) * d
        v = rule.momentum * v + d
        return w - (rule.momentum * v + d if rule.nesterov else v), v
    v = rule.momentum * v + d
    u = rule.momentum * v + d if rule.nesterov else v
    return w - rate(u) * u, v


# `fused_step`, and the `measure` whose norms it takes, or None: it takes its own.
STEPS = {
    **{
        name: (fused_step, None)
        for name, fused_step in implementations("fused_step").items()
    },
    **{
        f"{name}, measured": functions
        for name, functions in implementations("fused_step", "measure").items()
    },
}
each_way_of_steps = in_each_way("way", STEPS)


class LARSSteps:
    """Variables, each with its slot and its rule, and a way of `STEPS`."""

    def __init__(self, way, weights, momentums, rules_):
        self.fused_step, self.measure = way
        self.rules = rules_
        self.weights = [keras.Variable(w, dtype="float32") for w in weights]
        self.momentums = [keras.Variable(v, dtype="float32") for v in momentums]
        self.slots = [(v,) for v in self.momentums]
        self.state = self.weights + self.momentums

    def step(self, grads, finite=None, inv_scale=None):
        """Returns what `measure` says, if it is asked."""
        found = None if finite is None else Measurement(finite)
        if self.measure:
            found = self.measure(
                grads,
                inv_scale=1.0 if inv_scale is None else inv_scale,
                rules=self.rules,
                targets=Targets(self.weights, self.slots),
            )
        self.fused_step(
            self.rules,
            self.targets(),
            grads,
            found if finite is None else found._replace(finite=finite),
            inv_scale,
        )
        return True if found is None else found.finite

    def targets(self):
        columns = self.weights, self.slots
        return Targets(*(storage(self.fused_step, column) for column in columns))

    def values(self):
        return [np.array(v.numpy()) for v in self.state]

    def assert_stepped_like_numpy(self, before, grads):
        count = len(self.weights)
        for i, (rule, g) in enumerate(zip(self.rules, grads, strict=True)):
            w, v = (before[j].astype("float64") for j in (i, count + i))
            expected = lars_in_numpy(rule, g, w, v)
            actual = [self.values()[j] for j in (i, count + i)]
            for a, e, old in zip(actual, expected, (w, v), strict=True):
                # A dozen roundings of 6e-8 of the largest number that takes part.
                largest = max(np.abs(x).max(initial=0) for x in (w, v, e, old))
                np.testing.assert_allclose(a, e, rtol=0, atol=1e-6 * largest)


@pytest.mark.exhaustive
@each_way_of_steps
@hypothesis.settings(max_examples=40)
@hypothesis.given(
    # A few, for each of which some backends compile every operation once.
    shapes=st.lists(
        st.sampled_from([(), (3,), (2, 3), (2, 0), (3, 1, 2)]), min_size=1, max_size=4
    ),
    classic_momentum=st.booleans(),
    nesterov=st.booleans(),
    paper=st.booleans(),
    clip=st.booleans(),
    momentum=st.sampled_from([0.9, 0.0, 1.0]),
    weight_decay=st.sampled_from([0.1, 0.0]),
    epsilon=st.sampled_from([0.0, 0.1]),
    eeta=st.sampled_from([0.01, 10.0]),
    excluded=st.lists(st.booleans(), min_size=4, max_size=4),
    finite=st.sampled_from([None, True, False]),
    inv_scale=st.sampled_from([None, 2.0**-15, 1e-3, 8.0]),
    is_transposed=st.booleans(),
    is_zero=st.sampled_from([None, "gradients", "weights"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_lars_steps_equal_numpy_in_float64(
    way,
    shapes,
    classic_momentum,
    nesterov,
    paper,
    clip,
    momentum,
    weight_decay,
    epsilon,
    eeta,
    excluded,
    finite,
    inv_scale,
    is_transposed,
    is_zero,
    seed,
):
    random = np.random.default_rng(seed)
    forms = dict(
        momentum=momentum, nesterov=nesterov, classic_momentum=classic_momentum
    )
    upper = 1.0 if clip else np.inf
    is_paper = paper and classic_momentum
    ratio = TrustRatio(eeta, epsilon, upper=upper, paper=is_paper)
    # Variables that are treated alike share a rule.
    adapted = lars_rule(weight_decay=weight_decay, trust_ratio=ratio, **forms)
    left_out = lars_rule(weight_decay=0.0, trust_ratio=None, **forms)
    steps = LARSSteps(
        way,
        [random.normal(size=s) * (is_zero != "weights") for s in shapes],
        [random.normal(size=s) for s in shapes],
        [left_out if excluded[i] else adapted for i in range(len(shapes))],
    )
    scale = 1.0 if inv_scale is None else 1 / inv_scale
    grads = [
        np.asarray(random.normal(size=s) * scale * (is_zero != "gradients"), "float32")
        for s in shapes
    ]
    has_elements = any(g.size for g in grads)
    if finite is False:
        grads = [np.full_like(g, np.nan) for g in grads]
    given = [transposed(tensor(g.T)) if is_transposed else tensor(g) for g in grads]
    before = steps.values()
    found = steps.step(
        given,
        None if finite is None else ops.convert_to_tensor(finite),
        None if inv_scale is None else tensor(inv_scale),
    )
    if steps.measure:
        assert bool(found) is not (finite is False and has_elements)
    if finite is False:
        assert [a.tobytes() for a in steps.values()] == [b.tobytes() for b in before]
    else:
        factor = np.float32(1.0 if inv_scale is None else inv_scale)
        steps.assert_stepped_like_numpy(
            before, [g.astype("float64") * factor for g in grads]
        )
    for tensor_, g in zip(given, grads, strict=True):
        assert ops.convert_to_numpy(tensor_).tobytes() == g.tobytes()


LARS_FORMS = {
    f"{name}{', nesterov' if nesterov else ''}": dict(nesterov=nesterov, **settings)
    for name, settings in {
        "classic": dict(momentum=0.9, weight_decay=0.1, trust_ratio=MODEL_GARDEN),
        "not decayed": dict(momentum=0.9, weight_decay=0.0, trust_ratio=MODEL_GARDEN),
        "without momentum": dict(
            momentum=0.0, weight_decay=0.1, trust_ratio=MODEL_GARDEN
        ),
        "popular": dict(
            momentum=0.9,
            weight_decay=0.1,
            trust_ratio=MODEL_GARDEN,
            classic_momentum=False,
        ),
        "paper": dict(momentum=0.9, weight_decay=0.1, trust_ratio=PAPER),
        "excluded": dict(momentum=0.9, weight_decay=0.0, trust_ratio=None),
    }.items()
    for nesterov in (False, True)
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", LARS_FORMS.values(), ids=LARS_FORMS)
def test_lars_steps_equal_numpy_in_float64_when_compiled(compiled, snapshot, form):
    random = np.random.default_rng(0)
    shapes = [(3, 4), (), (5,), (2, 0)]
    weights, momentums = ([random.normal(size=s) for s in shapes] for _ in range(2))
    momentums[2] = np.full(5, -0.0)
    inv_scale = 2.0**-10
    rule = lars_rule(**form)
    way = backend.fused_step, backend.measure
    steps = LARSSteps(way, weights, momentums, [rule] * 4)
    call = compiled(steps.step, steps.state)
    for finite in [True, False, True]:
        grads = [random.normal(size=s).astype("float32") for s in shapes]
        given = [g / np.float32(inv_scale) for g in grads]
        if not finite:
            given[1] = np.float32(np.inf)
        before, bits = steps.values(), snapshot(steps.state)
        found = call(
            [tensor(g) for g in given],
            ops.convert_to_tensor(finite),
            tensor(inv_scale),
        )
        assert bool(found) is finite
        if finite:
            steps.assert_stepped_like_numpy(before, grads)
        else:
            assert snapshot(steps.state) == bits


@each_way_of_steps
def test_a_large_gradient_moves_a_layer_that_hardly_decays(way):
    # Divided by the decay, the gradient's norm would overflow.
    weights, gradient = np.array([3.0, 4.0]), np.array([6e12, -8e12])
    rule = lars_rule(momentum=0.9, weight_decay=1e-8, trust_ratio=MODEL_GARDEN)
    steps = LARSSteps(way, [weights], [np.zeros(2)], [rule])
    steps.step([tensor(gradient)])
    # By the ratio of 0.1 * 5 / 1e13.
    moved = LEARNING_RATE * 0.1 * 5 * np.array([0.6, -0.8])
    np.testing.assert_allclose(steps.values()[0], weights - moved, rtol=1e-6)


WITH_NORMS = implementations("fused_step", "measure")
if backend.UPDATES_IN_PLACE:
    # On such an accelerator the norms of scaled gradients may overflow, unseen.
    WITH_NORMS.pop("accelerator", None)


@in_each_way("way", WITH_NORMS)
def test_the_step_takes_the_norms_that_were_measured(way):
    # So that it reads the gradient no second time. To show it, they are of another.
    fused_step, measure = way
    weights, gradient = np.array([3.0, 4.0]), np.array([6.0, -8.0])
    rule = lars_rule(momentum=0.0, weight_decay=0.0, trust_ratio=MODEL_GARDEN)
    steps = LARSSteps((fused_step, None), [weights], [np.zeros(2)], [rule])
    found = measure(
        [tensor(4.0 * gradient)],
        rules=[rule],
        targets=Targets([tensor(weights)], [(tensor([0, 0]),)]),
    )
    fused_step([rule], steps.targets(), [tensor(gradient)], found)
    expected, _ = lars_in_numpy(rule, gradient, weights, np.zeros(2))
    moved = steps.values()[0] - weights
    np.testing.assert_allclose(moved, (expected - weights) / 4, rtol=1e-5)


@pytest.mark.exhaustive
@each_way_of_steps
@pytest.mark.parametrize("form", LARS_FORMS.values(), ids=LARS_FORMS)
def test_how_a_gradient_lies_in_memory_does_not_matter(way, snapshot, form):
    random = np.random.default_rng(0)
    weights, momentums = (random.normal(size=(3, 4)) for _ in range(2))
    gradient = np.outer([1.0, -2.0, 3.0], np.ones(4))
    layouts = [
        tensor(gradient),
        transposed(tensor(gradient.T)),
        ops.broadcast_to(tensor([[1.0], [-2.0], [3.0]]), (3, 4)),
        ops.flip(tensor(gradient[::-1]), axis=0),
    ]
    results = []
    for layout in layouts:
        steps = LARSSteps(way, [weights], [momentums], [lars_rule(**form)])
        steps.step([layout], inv_scale=tensor(0.5))
        results.append(snapshot(steps.state))
    assert results[1:] == results[:1] * 3


@pytest.mark.exhaustive
@each_way_of_steps
def test_each_variable_takes_its_own_rule_whatever_its_size(way):
    # On PyTorch they go to the kernels in chunks of 2**18 elements and of one rule.
    random = np.random.default_rng(0)
    sizes = [3, 2**18 + 1, 0, 2**17, 5, 2**17, 2**17, 2]
    forms = [LARS_FORMS[name] for name in ("classic", "popular, nesterov", "excluded")]
    rules_ = [lars_rule(**form) for form in forms]
    steps = LARSSteps(
        way,
        [random.normal(size=s) for s in sizes],
        [random.normal(size=s) for s in sizes],
        [rules_[i % 3] for i in range(len(sizes))],
    )
    before = steps.values()
    grads = [random.normal(size=s).astype("float32") for s in sizes]
    steps.step([tensor(g) for g in grads])
    steps.assert_stepped_like_numpy(before, grads)


@pytest.mark.exhaustive
@each_way_of_steps
@pytest.mark.parametrize("form", ["classic", "not decayed", "popular", "paper"])
def test_trust_ratios_of_many_elements_keep_their_digits(way, form):
    # As many as the last layer of a ResNet-50 has. What is lost of the one norm must
    # not be lost of the other as well, so the gradient is of another kind.
    weights = np.random.default_rng(0).standard_normal(2**21, dtype="float32")
    gradient = np.ones(2**21, "float32")
    rule = lars_rule(**LARS_FORMS[form])
    steps = LARSSteps(way, [weights], [np.zeros(2**21)], [rule])
    steps.step([tensor(gradient)])
    expected, _ = lars_in_numpy(
        rule, *(np.asarray(x, "float64") for x in (gradient, weights)), np.zeros(2**21)
    )
    moved = np.linalg.norm(weights - steps.values()[0].astype("float64"))
    np.testing.assert_allclose(moved, np.linalg.norm(weights - expected), rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("inv_scale", [None, 2.0**-15, 2.0])
@pytest.mark.parametrize("is_measured", [False, True])
def test_a_gradient_whose_norm_overflows_moves_nothing_and_is_no_overflow(
    compiled, is_measured, inv_scale
):
    # 1e25 is finite, its square is not: eeta * |w| / inf is 0.
    rule = lars_rule(momentum=0.5, weight_decay=0.0, trust_ratio=MODEL_GARDEN)
    way = backend.fused_step, backend.measure if is_measured else None
    steps = LARSSteps(way, [np.array([3.0, 4.0])], [np.ones(2)], [rule])

    def step(grads, finite):
        return steps.step(
            grads, finite, None if inv_scale is None else tensor(inv_scale)
        )

    call = compiled(step, steps.state)
    found = call([tensor([1e25, -1e30])], ops.convert_to_tensor(True))
    assert bool(found)
    weights, momentum = steps.values()
    assert momentum.tolist() == [0.5, 0.5]
    assert weights.tolist() == [2.5, 3.5]


def takes(variables, grads):
    return backend.fused_step_takes(LARSRule, storage_of(variables), grads)


def test_a_kernel_takes_float32_variables_and_dense_gradients_only():
    variables = [keras.Variable([1.0, 2.0]), keras.Variable(3.0)]
    grads = [tensor([1.0, 2.0]), tensor(3.0)]
    assert takes(variables, grads)
    for dtype in ("float16", "bfloat16"):
        narrow = keras.Variable([1.0, 2.0], dtype=dtype)
        narrow_grads = [tensor([1.0, 2.0], dtype), grads[1]]
        assert not takes([narrow, variables[1]], narrow_grads)


def test_no_kernel_takes_a_float64_gradient():
    variables = [keras.Variable([1.0, 2.0]), keras.Variable(3.0)]
    grads = [tensor([1.0, 2.0]), tensor(3.0, "float64")]
    assert not takes(variables, grads)


def test_no_kernel_takes_a_sparse_gradient(sparse_gradient):
    variables = [keras.Variable(np.ones((3, 1), "float32"))]
    grads = [sparse_gradient(np.ones((1, 1), "float32"), [2], (3, 1))]
    assert not takes(variables, grads)


# --- compute_gradients ------------------------------------------------------


def test_gradients_equal_derivatives_by_hand(compiled):
    a, b = keras.Variable([[1.0, -2.0]]), keras.Variable(3.0)
    unused = keras.Variable([5.0, 6.0])
    variables = [a, b, unused]

    def loss():
        return ops.sum(ops.square(a)) * b + 2.0 * b

    def compute():
        # A compiled function cannot return None where it returns tensors.
        value, gradients = backend.compute_gradients(loss, variables)
        assert len(gradients) == 3
        of_unused = gradients[2]
        if of_unused is None:
            of_unused = ops.zeros(2)
        return value, gradients[0], gradients[1], of_unused

    # (1 + 4) * 3 + 2 * 3; 2 * a * b; (1 + 4) + 2.
    expected = [21.0, [[6.0, -12.0]], 7.0, [0.0, 0.0]]
    for actual, by_hand in zip(compiled(compute, variables)(), expected, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(actual), by_hand)


def test_computing_gradients_changes_no_variable(snapshot):
    variables = [keras.Variable([1.0, -0.0]), keras.Variable(2.0)]
    before = snapshot(variables)
    backend.compute_gradients(lambda: ops.sum(variables[0] * variables[1]), variables)
    assert snapshot(variables) == before


def test_without_a_framework_an_error_says_what_to_do():
    with pytest.raises(NotImplementedError, match="Set KERAS_BACKEND to") as error:
        REFERENCE.compute_gradients(lambda: 1.0, [])
    for framework in ("tensorflow", "jax", "torch"):
        assert repr(framework) in str(error.value)


# --- map_values and what is asked of a backend ------------------------------


def test_a_function_is_mapped_over_a_dense_gradient():
    doubled = backend.map_values(lambda values: values * 2.0, tensor([1.0, -3.0]))
    np.testing.assert_array_equal(ops.convert_to_numpy(doubled), [2.0, -6.0])


def test_a_function_is_mapped_over_the_values_of_a_sparse_gradient(sparse_gradient):
    values = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "float32")
    gradient = sparse_gradient(values, [2, 0, 0], (3, 2))
    halved = backend.map_values(lambda values: values / 2.0, gradient)
    assert type(halved) is type(gradient)
    dense = ops.convert_to_numpy(REFERENCE.to_dense(halved))
    np.testing.assert_array_equal(dense, [[4.0, 5.0], [0.0, 0.0], [0.5, 1.0]])


# --- compute_gradients: weights, writes, and variables that come later -----------


@pytest.mark.parametrize("weights", [[1.0, -2.0], np.array([1.0, -2.0]), None])
def test_the_elements_of_a_loss_are_weighted(weights):
    a = keras.Variable([3.0, 4.0])
    loss, [gradient] = backend.compute_gradients(lambda: a * a, [a], weights)
    np.testing.assert_array_equal(ops.convert_to_numpy(loss), [9.0, 16.0])
    by_hand = [6.0, 8.0] if weights is None else [6.0, -16.0]
    np.testing.assert_array_equal(ops.convert_to_numpy(gradient), by_hand)


def test_one_weight_is_that_of_all_elements():
    a = keras.Variable(3.0)
    _, [gradient] = backend.compute_gradients(lambda: a + ops.zeros(4), [a], 2.0)
    assert number(gradient) == 8.0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_weights_take_the_dtype_of_the_loss(dtype):
    a = keras.Variable([3.0, 4.0], dtype=dtype)
    _, [gradient] = backend.compute_gradients(
        lambda: a * a, [a], tensor([1.0, 0.5], "float32")
    )
    assert keras.backend.standardize_dtype(gradient.dtype) == dtype
    np.testing.assert_array_equal(numpy(gradient), [6.0, 4.0])


def test_what_the_loss_does_not_depend_on_has_no_gradient():
    a, b = keras.Variable(2.0), keras.Variable(3.0)
    for variables in ([a, b], lambda: [a, b]):
        _, gradients = backend.compute_gradients(lambda: a * a, variables)
        assert gradients[1] is None
        assert number(gradients[0]) == 4.0
    loss, gradients = backend.compute_gradients(lambda: 5.0, [a, b])
    assert gradients == [None, None]
    assert number(loss) == 5.0


def test_of_no_variables_there_are_no_gradients():
    a = keras.Variable(2.0)
    loss, gradients = backend.compute_gradients(lambda: a * a, [])
    assert list(gradients) == []
    assert number(loss) == 4.0


def test_variables_that_are_not_trainable_have_gradients():
    frozen = keras.Variable(3.0, trainable=False)
    _, [gradient] = backend.compute_gradients(lambda: frozen * frozen, [frozen])
    assert number(gradient) == 6.0
    # It is not followed from then on.
    _, gradients = backend.compute_gradients(lambda: frozen * frozen, [frozen])
    assert number(gradients[0]) == 6.0
    assert not frozen.trainable


def test_what_the_loss_writes_stays_written(compiled):
    a, count = keras.Variable(2.0), keras.Variable(0.0, trainable=False)
    average = keras.Variable([0.0, 0.0], trainable=False)

    def loss(x):
        count.assign_add(1.0)
        new = 0.5 * average + 0.5 * a * x
        average.assign(new)
        count.assign_add(10.0)
        return ops.sum(new) * count

    run = compiled(
        lambda x: backend.compute_gradients(lambda: loss(x), [a])[1][0],
        [a, count, average],
    )
    # d/da of 11 * sum(a * x / 2).
    assert number(run(tensor([1.0, 3.0]))) == 22.0
    assert number(count.value) == 11.0
    np.testing.assert_array_equal(average.numpy(), [1.0, 3.0])
    # The average is a number by now: d/da of 22 * sum(old / 2 + a * x / 2).
    assert number(run(tensor([1.0, 3.0]))) == 44.0
    np.testing.assert_array_equal(average.numpy(), [1.5, 4.5])


def test_variables_may_come_when_the_loss_has_run():
    made = []

    def loss():
        if not made:
            made.append(keras.layers.Dense(1, kernel_initializer="ones"))
        return ops.sum(made[0](np.array([[1.0, 2.0]], "float32")))

    loss, gradients = backend.compute_gradients(
        loss, lambda: made[0].trainable_variables
    )
    assert number(loss) == 3.0
    np.testing.assert_array_equal(numpy(gradients[0]), [[1.0], [2.0]])
    np.testing.assert_array_equal(numpy(gradients[1]), [1.0])


# --- differentiate ---------------------------------------------------------------


def differentiated(a, power, **arguments):
    """The gradient of `sum(a ** 2) * 3`, from the tensor `a ** 2`."""
    variables = [a, keras.Variable(1.0)]
    transform = lambda loss: loss * 3.0  # noqa: E731
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = power()
        arguments["tape"] = tape
    else:
        loss = power()
    return backend.differentiate(loss, variables, transform, **arguments)


@pytest.mark.parametrize(
    "grad_loss, expected", [(None, [18, 24]), ([1, -1], [18, -24])]
)
def test_a_tensor_is_differentiated_where_its_history_is_known(grad_loss, expected):
    a = keras.Variable([3.0, 4.0])
    if keras.backend.backend() == "jax":
        with pytest.raises(ValueError, match="does not know how it was computed"):
            differentiated(a, lambda: a * a, grad_loss=grad_loss)
        return
    gradient, of_unused = differentiated(a, lambda: a * a, grad_loss=grad_loss)
    np.testing.assert_array_equal(numpy(gradient), expected)
    assert of_unused is None


def test_a_tape_is_refused_where_there_are_none():
    if keras.backend.backend() == "tensorflow":
        pytest.skip("There are tapes")
    with pytest.raises(ValueError, match="`tape` is TensorFlow's"):
        backend.differentiate(ops.ones(()), [], lambda loss: loss, tape=object())


def test_without_a_framework_no_tensor_is_differentiated():
    with pytest.raises(NotImplementedError, match="Set KERAS_BACKEND to"):
        REFERENCE.differentiate(1.0, [], lambda loss: loss)


# --- Variables and replicas -------------------------------------------------------


def test_variables_are_told_from_other_things():
    assert backend.is_variable(keras.Variable(1.0))
    assert backend.is_variable(keras.Variable(1, trainable=False, dtype="int32"))
    for other in (ops.ones(()), np.ones(()), 1.0, None, "w", keras.Variable):
        assert not backend.is_variable(other)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        assert backend.is_variable(tf.Variable(1.0))
        words = "`mine..` cannot be called in cross-replica context"
        scope = tf.distribute.MirroredStrategy(["CPU:0"]).scope()
        with scope, pytest.raises(RuntimeError, match=words):
            backend.check_replica_context("mine")
    backend.check_replica_context("mine")
