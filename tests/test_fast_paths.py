"""Every fast path against the reference: whole steps of `LossScaleOptimizer`.

A script of `testing/step_scripts.py` is run with the kernels and without them, as
`KERAS_LSO_KERNELS=generic` has it, and after each step all must be the same.
"""

import math

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from keras import ops

from keras_lso import LossScaleOptimizer
from keras_lso._backend import backend
from keras_lso._backend.framework import Framework
from testing import kernels
from testing.harness import BACKEND, bits
from testing.optimizers import OPTIMIZERS, OURS, WITH_NORMS
from testing.step_scripts import Gradient, Script, Scripted, compare, tensor

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")

NOT_FINITE = [np.inf, -np.inf, np.nan]

WITH_KERNEL = WITH_NORMS if BACKEND == "jax" else list(OPTIMIZERS)


# On TensorFlow `keras.ops.add` takes a (0, 3) for the bias of another, and fails.
EMPTY = (0, 1) if BACKEND == "tensorflow" else (0, 3)
SHAPES = st.sampled_from([(3, 5), (61, 83), (), (61, 83), (0,), EMPTY, (1,), (7,)])
if BACKEND != "jax":
    # It compiles each of its operations for each new shape.
    SHAPES |= st_numpy.array_shapes(min_dims=0, max_dims=3, max_side=9)


def mostly(value, *others):
    return st.sampled_from([value] * max(1, 2 * len(others)) + list(others))


@st.composite
def options_of(draw, optimizer, is_plain):
    """Options with which an optimizer may have a fast path."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.25, 2, 0.5)
    options = {"learning_rate": draw(st.sampled_from([schedule, 0.125]))}
    # Ours have a decay of their own.
    of_its_own = ["weight_decay_rate"] if optimizer in OURS else []
    decay = draw(st.sampled_from([None, *of_its_own, "weight_decay"]))
    return (
        options
        | ({decay: 0.25} if decay else {})
        | draw(mostly({}, *CLIPS))
        | draw(mostly({}, *(() if IS_JAX and is_plain else AVERAGES)))
        | draw(mostly({}, {"gradient_accumulation_steps": 2}))
    )


IS_JAX = BACKEND == "jax"
# Keras takes one of the three.
CLIPS = {"global_clipnorm": 1.0}, {"clipnorm": 0.5}, {"clipvalue": 0.125}
AVERAGES = {"use_ema": True}, {"use_ema": True, "ema_overwrite_frequency": 2}


def forms_of(shape):
    """The forms that a gradient of this shape has on the fast path, None among them."""
    if BACKEND != "torch" or not shape:
        return ["dense", None]
    forms = ["dense", "strided", None]
    forms += ["transposed"] if len(shape) == 2 else []
    return forms + (["expanded"] if shape[0] else [])


def forms_of_the_generic_path(shape, options):
    """Those, and what Keras itself can do with this shape and these options."""
    has_sparse = BACKEND == "tensorflow" or (
        BACKEND == "jax"
        and not any("clip" in name or "accumulation" in name for name in options)
    )
    is_table = len(shape) == 2 and math.prod(shape) > 0
    return forms_of(shape) + (["sparse"] if has_sparse and is_table else [])


@st.composite
def gradients(draw, random, shape, size, dtype, form):
    if form is None:
        return None
    factor = draw(mostly(size, 0.0, -0.0))
    values = (random.normal(size=shape) if factor else np.ones(shape)) * factor
    if dtype == "float16":
        values = np.clip(values, -6e4, 6e4)
    return Gradient(np.asarray(values, dtype), form)


@st.composite
def overflows(draw, steps):
    """Maybe puts one into a gradient; returns the numbers of the steps that have it."""
    number = draw(st.integers(0, len(steps) - 1))
    candidates = [g for g in steps[number] if g and g.values.size]
    if not candidates or draw(st.sampled_from([False, True])):
        return ()
    gradient, bad = draw(st.sampled_from(candidates)), draw(st.sampled_from(NOT_FINITE))
    gradient.poison(draw(st.integers(0, gradient.values.size - 1)), bad)
    return (number,)


@st.composite
def scripts(draw, optimizer, is_plain=True, is_compiled=False):
    """Scripts of four steps."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    options = draw(options_of(optimizer, is_plain))
    # Never the first variable, nor does that go without a gradient: on PyTorch Keras
    # cannot decay nothing.
    excluded = draw(st.sampled_from([None, ["bias"]]))
    options["excluded"] = excluded if len(shapes) > 1 else None
    forms = [
        forms_of(s) if is_plain else forms_of_the_generic_path(s, options)
        for s in shapes
    ]
    forms[0] = ["dense"]
    assigned = draw(st.dictionaries(st.integers(1, 3), st.integers(0, len(shapes) - 1)))
    # The master of what is assigned is re-initialised once it has a gradient, and at
    # the end of a window; by Keras's own step at once.
    for position in assigned.values():
        forms[position] = [form for form in forms[position] if form]
    if assigned:
        options.pop("gradient_accumulation_steps", None)
    if is_compiled:
        forms = [[draw(st.sampled_from(f))] for f in forms]

    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtypes = [draw(mostly("float32", "float16")) for _ in shapes]
    start = [
        np.asarray(random.normal(size=s), dtype)
        for s, dtype in zip(shapes, dtypes, strict=True)
    ]
    if draw(mostly(False, True)):
        start = [np.zeros_like(w) for w in start]
    scale = draw(st.sampled_from([2.0**15, 1.0, 2.0**-3, 1000.0]))
    size = scale * draw(st.sampled_from([1.0, 1e-3, 30.0]))
    of_gradients = [draw(mostly("float32", "float16")) for _ in shapes]
    steps = [
        [
            draw(gradients(random, s, size, dtype, draw(st.sampled_from(f))))
            for s, dtype, f in zip(shapes, of_gradients, forms, strict=True)
        ]
        for _ in range(4)
    ]
    return Script(
        optimizer, options, start, scale, steps, draw(overflows(steps)), assigned
    )


@pytest.fixture
def make_sparse(request):
    """The fixture `sparse_gradient`, or None where there are none."""
    return None if BACKEND == "torch" else request.getfixturevalue("sparse_gradient")


def examples(torch, tensorflow, jax):
    """As many as take a few seconds."""
    return hypothesis.settings(
        max_examples={"torch": torch, "tensorflow": tensorflow, "jax": jax}[BACKEND],
        # The fixtures are functions, which keep nothing from one example to the next.
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )


def compiled_by(*names):
    return pytest.mark.parametrize("compiled", names, indirect=True)


all_optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS)


@pytest.mark.parametrize("optimizer", WITH_KERNEL)
@examples(torch=8, tensorflow=2, jax=1)
@hypothesis.given(data=st.data())
def test_kernels_match_generic_path(optimizer, data):
    compare(data.draw(scripts(optimizer)))


ONE_OF_EACH_RULE = ["nesterov", "adamw", "lars", "lamb", "novograd"]


# Every example is compiled.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "optimizer", [name for name in ONE_OF_EACH_RULE if name in WITH_KERNEL]
)
@compiled_by(*{"tensorflow": ["graph", "xla"], "jax": ["jit"], "torch": []}[BACKEND])
@examples(torch=1, tensorflow=2, jax=2)
@hypothesis.given(data=st.data())
def test_compiled_kernels_match_generic_path(optimizer, data, compiled):
    compare(data.draw(scripts(optimizer, is_compiled=True)), compiled=compiled)


@pytest.mark.slow
# These steps are full of `cond`s, each of which eager JAX would compile each time.
@compiled_by("jit" if BACKEND == "jax" else "eager")
@examples(torch=100, tensorflow=15, jax=5)
@hypothesis.given(data=st.data(), optimizer=st.sampled_from(list(OPTIMIZERS)))
def test_arbitrary_steps_are_same_with_kernels_on_and_off(
    optimizer, data, compiled, make_sparse
):
    script = scripts(optimizer, is_plain=False, is_compiled=BACKEND == "jax")
    compare(data.draw(script), make_sparse, compiled)


@pytest.mark.exhaustive
@all_optimizers
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("missing", [False, True])
def test_optimizer_steps_by_rule_only_with_kernels_on(missing, dtype, optimizer):
    calls = []

    def counted(name):
        function = getattr(backend, name)
        return lambda *args, **kwargs: calls.append(name) or function(*args, **kwargs)

    def step():
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("run_if", "update"):
                patch.setattr(backend, name, counted(name))
            run = Scripted(Script(optimizer, {}, [np.ones(3, dtype)] * 2, 8.0, []))
            gradient = tensor(np.ones(3, "float32"))
            run.step([gradient, None if missing else gradient])
        return list(calls)

    assert step() == ["update" if optimizer in WITH_KERNEL else "run_if"]
    with kernels.off():
        assert step() == ["run_if"]
        # It is no kernel: on PyTorch it is a branch on the host, and stays one.
        assert backend.run_if.__func__ is not Framework.run_if


def random_arrays(shapes, seed=0, size=1.0):
    random = np.random.default_rng(seed)
    return [np.asarray(size * random.normal(size=s), "float32") for s in shapes]


@pytest.mark.parametrize(
    "optimizer, scale",
    [
        ("sgd", 2.0**15),
        ("adamw", 2.0**15),
        ("lars", 2.0**15),
        ("novograd", 2.0**15),
        # Unscaling makes these larger, so that they are checked another way.
        ("momentum", 2.0**-3),
        ("lars", 2.0**-3),
    ],
)
def test_overflow_in_each_position_skips_step(optimizer, scale):
    # More than one register of a processor holds, and no whole number of them.
    shapes = [(3,), (1_000_003,), (), (2, 2)]
    run = Scripted(Script(optimizer, {}, random_arrays(shapes), scale, []))
    good = random_arrays(shapes, seed=1, size=scale)
    run.step([tensor(g) for g in good])
    positions = [
        (i, position)
        for i, g in enumerate(good)
        for position in {0, g.size // 2, g.size - 1}
    ]
    for number, (i, position) in enumerate(positions):
        grads = [tensor(g) for g in good]
        bad = good[i].copy()
        bad.flat[position] = NOT_FINITE[number % 3]
        grads[i] = tensor(bad)
        run.step(grads, is_skipped=True)
    run.step([tensor(g) for g in good])


@pytest.mark.parametrize("optimizer", ["adam", "lars"])
def test_kernels_match_generic_path_with_many_variables(optimizer):
    # Elsewhere they are put together as well, and each takes its time to trace.
    count = 300 if BACKEND == "torch" else 90
    shapes = [((), (3,), (2, 2))[i % 3] for i in range(count)]
    steps = [
        [Gradient(g) for g in random_arrays(shapes, seed=seed, size=2.0**15)]
        for seed in (1, 2)
    ]
    steps[0][count - 2].poison(0, np.nan)
    compare(Script(optimizer, {}, random_arrays(shapes), 2.0**15, steps, (0,)))


def after(script, *steps):
    """The bits of all that is trained, after some steps."""
    run = Scripted(script)
    for make in steps:
        run.apply(make(run.weights))
    return bits(run.state)


@all_optimizers
def test_shared_gradient_tensor_gives_same_step_as_copies(optimizer):
    shapes = [(3, 5), (3, 5)]
    script = Script(optimizer, {}, random_arrays(shapes), 2.0**10, [])
    [values] = random_arrays([(3, 5)], seed=1, size=2.0**10)
    gradient = tensor(values)
    copies = after(script, *[lambda _: [tensor(values), tensor(values)]] * 2)
    assert after(script, *[lambda _: [gradient, gradient]] * 2) == copies
    assert bits([gradient]) == bits([tensor(values)])


@pytest.mark.skipif(BACKEND != "torch", reason="Only PyTorch has views of variables")
@pytest.mark.parametrize("decay", [None, 0.25])
@all_optimizers
def test_gradient_view_of_variable_gives_same_step_as_copy(optimizer, decay):
    options = {"weight_decay": decay} if decay else {}
    script = Script(optimizer, options, random_arrays([(4, 4)] * 4), 4.0, [])

    # The gradient of w**2 / 2 is w, that of v * w is v for w and w for v.
    def views(variables):
        first, second, third, fourth = (v.value.detach() for v in variables)
        return [first, second.T, fourth, third]

    def copies(variables):
        return [v.clone() for v in views(variables)]

    assert after(script, views, views) == after(script, copies, copies)


@all_optimizers
def test_transposed_gradient_gives_same_step_as_contiguous_gradient(optimizer):
    start, gradient = random_arrays([(3, 5)] * 2)
    results = []
    # A copy of `gradient.T` alone would keep the order of `gradient` in memory.
    columns = tensor(np.ascontiguousarray(gradient.T))
    for layout in (tensor(gradient), ops.transpose(columns)):
        variable = keras.Variable(start)
        inner = OPTIMIZERS[optimizer](0.5)
        LossScaleOptimizer(inner, initial_scale=4.0).apply([layout], [variable])
        results.append(ops.convert_to_numpy(variable))
    # Norms are added up in another order.
    np.testing.assert_allclose(*results, rtol=1e-5)
