"""The primitives of the backend seam, each held against something independent.

`measure` against NumPy in float64, `run_if` bit for bit, `fused_step` against the
Keras optimizer's own step, `compute_gradients` against derivatives by hand; and
the reference in `generic` as well as the framework's own.
"""

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from keras import ops

from keras_lso import adapters, backend
from keras_lso.backend import generic

# JAX has float64 only where x64 is on; `tensor` skips where it is not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
]

DTYPES = ["float16", "bfloat16", "float32", "float64"]
NOT_FINITE = [np.inf, -np.inf, np.nan]


@pytest.fixture(params=["generic", "framework"])
def kernels(request):
    return {"generic": generic, "framework": backend}[request.param]


def tensor(values, dtype="float32"):
    result = ops.convert_to_tensor(np.asarray(values, "float64"), dtype=dtype)
    if keras.backend.standardize_dtype(result.dtype) != dtype:
        pytest.skip(f"This backend has no {dtype} here (JAX: x64 is off)")
    return result


def numpy(values):
    if keras.backend.standardize_dtype(values.dtype) == "bfloat16":
        values = ops.cast(values, "float32")
    return ops.convert_to_numpy(values).astype("float64")


def number(value):
    return float(ops.convert_to_numpy(ops.cast(value, "float32")))


# --- measure ----------------------------------------------------------------


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_anywhere_is_found(kernels, dtype, bad):
    shapes = [(2, 3), (), (4,)]
    good = [np.full(shape, 0.5) for shape in shapes]
    for which, shape in enumerate(shapes):
        for position in np.ndindex(shape):
            grads = [values.copy() for values in good]
            grads[which][position] = bad
            found = kernels.measure([tensor(g, dtype) for g in grads])
            assert not bool(found.finite), (which, position)
    assert bool(kernels.measure([tensor(g, dtype) for g in good]).finite)


@pytest.mark.parametrize("norms", [False, True])
def test_infinities_that_cancel_are_found(kernels, norms):
    found = kernels.measure([tensor([np.inf, -np.inf, 1.0])], norms=norms)
    assert not bool(found.finite)


LARGEST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1e300}


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_gradients_are_finite(kernels, dtype, norms):
    huge = LARGEST[dtype]
    for grads in (
        [[huge] * 5],  # the sum overflows
        [[huge, huge, -huge, -huge]],  # so may part of it
        [[huge], [huge], [-huge]],
        [[min(huge, 1e20)]],  # the sum does not, but its square does
    ):
        found = kernels.measure([tensor(g, dtype) for g in grads], norms=norms)
        assert bool(found.finite), grads


def test_one_bad_element_among_huge_ones_is_found(kernels):
    found = kernels.measure([tensor([3e38, 3e38]), tensor([1e20, np.nan])])
    assert not bool(found.finite)


def test_empty_gradients_are_finite(kernels):
    found = kernels.measure(
        [tensor(np.zeros(0)), tensor(np.zeros((3, 0)))], norms=True, amax=True
    )
    assert bool(found.finite)
    assert [number(n) for n in found.norms] == [0.0, 0.0]
    assert number(found.amax) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_largest_magnitude_equal_numpy_in_float64(kernels, dtype):
    random = np.random.default_rng(0)
    shapes = [(3, 4, 5), (), (0,), (7,), (2, 0)]
    grads = [tensor(random.normal(size=shape), dtype) for shape in shapes]
    found = kernels.measure(grads, norms=True, amax=True)
    exact = [numpy(g) for g in grads]

    assert bool(found.finite)
    # At most 60 squares are added up in float32: 60 roundings of 6e-8 each, of
    # which the square root halves the effect.
    np.testing.assert_allclose(
        [number(n) for n in found.norms],
        [np.sqrt(np.sum(e**2)) for e in exact],
        rtol=2e-6,
    )
    top = max(np.abs(e).max() for e in exact if e.size)
    assert number(found.amax) == np.float32(top)


def test_dtypes_may_be_mixed(kernels):
    grads = [tensor([3.0, 4.0], "float16"), tensor([-12.0], "bfloat16"), tensor(5.0)]
    found = kernels.measure(grads, norms=True, amax=True)
    assert bool(found.finite)
    assert [number(n) for n in found.norms] == [5.0, 12.0, 5.0]
    assert number(found.amax) == 12.0


def test_float16_norms_are_accumulated_in_float32(kernels):
    # 300 squared is 90000, which float16 does not hold.
    found = kernels.measure([tensor([300.0, 400.0], "float16")], norms=True, amax=True)
    assert bool(found.finite)
    assert number(found.norms[0]) == 500.0
    assert number(found.amax) == 400.0


def test_the_results_are_float32_and_boolean_scalars(kernels):
    found = kernels.measure([tensor([1.0], "float16")], norms=True, amax=True)
    dtypes = [
        keras.backend.standardize_dtype(t.dtype)
        for t in (found.finite, found.norms[0], found.amax)
    ]
    assert dtypes == ["bool", "float32", "float32"]
    assert [tuple(t.shape) for t in (found.finite, *found.norms, found.amax)] == [
        ()
    ] * 3


def test_norms_and_largest_magnitude_come_only_when_asked_for(kernels):
    found = kernels.measure([tensor([1.0])])
    assert found.norms is None
    assert found.amax is None


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    "grads, finite",
    [
        ([[1.0, -2.0], [3.0]], True),
        ([[3e38, 3e38], [3.0]], True),
        ([[1.0, np.nan], [3.0]], False),
        ([[1.0, -2.0], [-np.inf]], False),
        ([[3e38, 3e38], [np.inf]], False),
    ],
)
def test_measuring_is_the_same_when_compiled(kernels, compiled, grads, finite, norms):
    def measure(grads):
        return tuple(kernels.measure(grads, norms=norms, amax=True))

    found = compiled(measure, [])([tensor(g) for g in grads])
    assert bool(found[0]) is finite
    if finite:
        assert number(found[2]) == np.float32(max(map(np.max, map(np.abs, grads))))


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_a_bad_element_in_a_sparse_gradient_is_found(kernels, sparse_gradient, bad):
    for row in range(3):
        values = np.ones((3, 2), "float32")
        values[row, 1] = bad
        grads = [tensor([1.0]), sparse_gradient(values, [4, 1, 4], (5, 2))]
        assert not bool(kernels.measure(grads).finite), row


def test_norms_of_a_sparse_gradient_add_up_rows_that_come_twice(
    kernels, sparse_gradient, compiled
):
    values = np.array([[3.0, -1.0], [1.0, 2.0], [1.0, 5.0], [-4.0, 2.0]], "float32")
    rows = [4, 1, 4, 4]
    dense = np.zeros((6, 2))
    np.add.at(dense, rows, values.astype("float64"))
    assert np.abs(dense).max() == 6.0  # and 5.0 in `values`

    def measure(grads):
        return tuple(kernels.measure(grads, norms=True, amax=True))

    gradient = sparse_gradient(values, rows, (6, 2))
    finite, norms, amax = compiled(measure, [])([gradient])
    assert bool(finite)
    np.testing.assert_allclose(number(norms[0]), np.linalg.norm(dense), rtol=1e-6)
    assert number(amax) == 6.0


def test_rows_that_overflow_only_when_added_up_are_found(kernels, sparse_gradient):
    # Float16 rows add up in float16, and that is what the optimizer would apply.
    values = np.array([[60000.0], [60000.0]], "float16")
    assert not bool(kernels.measure([sparse_gradient(values, [2, 2], (3, 1))]).finite)
    assert bool(kernels.measure([sparse_gradient(values, [2, 1], (3, 1))]).finite)


# --- run_if -----------------------------------------------------------------


@pytest.fixture(params=["generic", "framework"])
def run_if(request):
    return {"generic": generic.run_if, "framework": backend.run_if}[request.param]


@pytest.fixture
def state():
    return [
        keras.Variable(np.array([1.0, -0.0, np.inf], "float32")),
        keras.Variable(np.array(-0.0, "float32")),
        keras.Variable(7, dtype="int32", trainable=False),
    ]


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

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-5),
    "adam by default": lambda: keras.optimizers.Adam(),
    "adam with a schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
}


class FusedOptimizer:
    """A Keras optimizer whose steps are taken by `fused_step`."""

    def __init__(self, make, weights, fused_step):
        self.fused_step = fused_step
        self.weights = [keras.Variable(w) for w in weights]
        self.optimizer = make()
        self.optimizer.build(self.weights)
        self.state = self.weights + self.optimizer.variables
        self.largest = np.zeros(len(self.state))

    def step(self, grads, finite, inv_scale):
        rule, slots = adapters.make_rule(self.optimizer, self.weights)
        self.fused_step(rule, self.weights, slots, grads, finite, inv_scale)
        iteration = adapters.iteration_variable(self.optimizer)
        iteration.assign_add(ops.cast(finite, iteration.dtype))

    def assert_close_to(self, weights, optimizer):
        """Equal to a share of the largest magnitude that each tensor has had."""
        actual = [ops.convert_to_numpy(v) for v in self.state]
        magnitudes = [np.abs(a).max(initial=0) for a in actual]
        self.largest = np.maximum(self.largest, magnitudes)
        # Weights: some eight roundings of 1.2e-7 each. Slots: 1 - beta_2 is 0.001 to
        # Keras and 1 - float32(0.999) to a kernel in float32. These are 1.3e-5 apart,
        # and the velocities are proportional to it.
        shares = [1e-6] * len(weights) + [2e-5] * len(optimizer.variables)
        expected = [*weights, *optimizer.variables]
        for a, e, tolerance in zip(
            actual, expected, shares * self.largest, strict=True
        ):
            e = ops.convert_to_numpy(e)
            np.testing.assert_allclose(a, e, rtol=0, atol=tolerance)


FUSED_STEPS = {"generic": generic.fused_step, "framework": backend.fused_step}


@pytest.mark.parametrize("fused_step", FUSED_STEPS.values(), ids=FUSED_STEPS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@hypothesis.settings(max_examples=10)
@hypothesis.given(
    shapes=st.lists(
        st_numpy.array_shapes(min_dims=0, max_dims=2, max_side=3),
        min_size=1,
        max_size=2,
    ),
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
    plain, plain_weights = make(), [keras.Variable(w) for w in weights]
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


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_fused_steps_are_the_same_when_compiled(make, compiled, snapshot):
    random = np.random.default_rng(0)
    weights = [random.normal(size=s).astype("float32") for s in [(3, 4), (), (5,)]]
    scale = 2.0**10
    fast = FusedOptimizer(make, weights, backend.fused_step)
    reference = FusedOptimizer(make, weights, generic.fused_step)
    plain, plain_weights = make(), [keras.Variable(w) for w in weights]
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
        reference.step(*arguments)
        assert (snapshot(fast.state) == before) is not finite
        if finite:
            plain.apply([tensor(g) for g in grads], plain_weights)
        fast.assert_close_to(reference.weights, reference.optimizer)
        fast.assert_close_to(plain_weights, plain)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("kernels", FUSED_STEPS)
def test_fifty_fused_steps_from_zero_equal_those_of_the_keras_optimizer(make, kernels):
    # A weight that starts at zero is nothing but its steps: their relative errors
    # are its own. All gradients have the same sign, so that none of them cancel.
    random = np.random.default_rng(0)
    weights = [np.zeros((3, 4), "float32"), np.zeros(4, "float32")]
    fused = FusedOptimizer(make, weights, FUSED_STEPS[kernels])
    plain, plain_weights = make(), [keras.Variable(w) for w in weights]
    for _ in range(50):
        grads = [random.uniform(0.5, 1.5, size=w.shape) for w in weights]
        grads = [tensor(g) for g in grads]
        fused.step(grads, ops.convert_to_tensor(True), tensor(1.0))
        plain.apply(grads, plain_weights)
    fused.assert_close_to(plain_weights, plain)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_skipped_fused_step_keeps_negative_zeros(make, compiled, snapshot):
    fused = FusedOptimizer(make, [np.full(3, -0.0, "float32")], backend.fused_step)
    for variable in fused.state:
        if variable.shape == (3,):
            variable.assign(np.full(3, -0.0, "float32"))
    before = snapshot(fused.state)
    step = compiled(fused.step, fused.state)
    step([tensor([np.inf, 0.0, 1.0])], ops.convert_to_tensor(False), tensor(1.0))
    assert snapshot(fused.state) == before


def test_the_reference_never_claims_to_be_the_faster_way():
    assert generic.fused_step_takes(None, [], []) is False


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
        generic.compute_gradients(lambda: 1.0, [])
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
    dense = ops.convert_to_numpy(generic.to_dense(halved))
    np.testing.assert_array_equal(dense, [[4.0, 5.0], [0.0, 0.0], [0.5, 1.0]])
