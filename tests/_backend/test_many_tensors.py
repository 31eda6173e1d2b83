"""Gradients of very many variables: the check must not make the first step slow.

What takes the time is compiled, or started, once for each operation. So operations are
counted here, which seconds on a busy machine would not be told apart from noise.
"""

import functools
import inspect
import pathlib
import re
import sys

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso._backend import backend
from keras_lso._backend.framework import Framework, MeasureOptions
from keras_lso._backend.tensors import pack
from keras_lso._core import step as core_step

BACKEND = keras.backend.backend()
KERNELS = {"reference": Framework(), "framework": backend}
# Several packs, and the sizes around that from which a tensor is left alone.
SIZES = [5, 2**14, 2**14 + 1, 0, 2**14 - 1, *[1000] * 100, 2**15, 3]


@pytest.fixture(params=KERNELS.values(), ids=KERNELS)
def kernels(request):
    return request.param


def gradients(sizes=SIZES):
    random = np.random.default_rng(0)
    return [random.normal(size=size).astype("float32") for size in sizes]


def tensors(values):
    return [ops.convert_to_tensor(v) for v in values]


@pytest.mark.parametrize("size", [1, 2**12 + 1, 2**13 - 1, 2**14 + 1])
def test_norms_include_every_element_of_long_tensors(kernels, size):
    # On PyTorch long tensors are cut into rows of 1024.
    values = np.zeros((4, size), "float32")
    for row, i in zip(values, (0, size // 2, max(size - 2, 0), size - 1), strict=True):
        row[i] = 3.0
    norms = kernels.l2_norms(tensors(values))
    assert [float(norm) for norm in norms] == [3.0] * 4


def test_packs_hold_every_element_exactly_once():
    # Whole numbers, which float16 has all of.
    values = [
        ops.reshape(ops.cast(v, dtype), shape)
        for v, dtype, shape in (
            (np.arange(6), "float32", (2, 3)),
            (np.arange(6, 10), "float16", (4,)),
            (np.arange(10, 11), "float32", ()),
            (np.arange(11, 11), "float32", (0, 2)),
            (np.arange(11, 15), "float16", (2, 2)),
            (np.full(2**14 + 1, 15), "float32", (2**14 + 1,)),
        )
    ]
    packs = pack(values)
    assert len(packs) == 3
    dtypes = [keras.backend.standardize_dtype(p.dtype) for p in packs]
    assert sorted(dtypes) == ["float16", "float32", "float32"]
    found = np.concatenate([np.ravel(ops.convert_to_numpy(p)) for p in packs])
    assert sorted(found) == [*range(15), *[15] * (2**14 + 1)]


def test_packs_stay_below_size_limit():
    packs = pack(tensors(gradients([1000] * 500)))
    sizes = [int(np.prod(p.shape)) for p in packs]
    assert sum(sizes) == 500_000
    # What is copied at once fits into a cache: 256 KiB and one small tensor more.
    assert max(sizes) <= 2**16 + 1000
    assert len(packs) == 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_measure_finds_one_nonfinite_element_in_any_pack(kernels, bad):
    good = gradients()
    assert bool(kernels.measure(tensors(good)).finite)
    for which in [0, 1, 2, 4, 5, 50, 104, 105, 106]:
        for position in (0, -1):
            values = [v.copy() for v in good]
            values[which][position] = bad
            assert not bool(kernels.measure(tensors(values)).finite), (which, position)


def test_measure_finds_largest_magnitude_in_any_pack(kernels):
    largest = MeasureOptions(amax=True)
    for which in [0, 2, 50, 106]:
        values = gradients()
        values[which][-1] = -100.0
        assert float(kernels.measure(tensors(values), largest).amax) == 100.0


@pytest.mark.skipif(BACKEND != "jax", reason="It reads what JAX compiles")
def test_xla_compiles_few_operations_for_many_gradients():
    jax = pytest.importorskip("jax")

    def finite(grads, inv_scale):
        return backend.measure(grads, MeasureOptions(inv_scale)).finite

    grads = tensors(gradients([64] * 300))
    hlo = jax.jit(finite).lower(grads, np.float32(0.5)).compile().as_text()
    operations = re.findall(r" (fusion|reduce|reduce-window|concatenate)\(", hlo)
    # One for each gradient would be 300.
    assert 0 < len(operations) < 50


@pytest.mark.skipif(BACKEND != "tensorflow", reason="It reads TensorFlow's graph")
@pytest.mark.parametrize("sizes", [[64] * 300], ids=["300"])
def test_tensorflow_graph_has_few_operations_for_many_gradients(sizes):
    tf = pytest.importorskip("tensorflow")

    @tf.function
    def finite(grads):
        return backend.measure(grads, MeasureOptions(tf.constant(0.5))).finite

    graph = finite.get_concrete_function(tensors(gradients(sizes))).graph
    definition = graph.as_graph_def()
    nodes = [n.op for n in definition.node]
    for function in definition.library.function:
        nodes += [n.op for n in function.node_def]
    # One for each gradient would be 300 and more.
    assert 0 < len([n for n in nodes if n != "Placeholder"]) < 60


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Only TensorFlow has AutoGraph")
def test_autograph_does_not_convert_optimizer_step(monkeypatch):
    tf = pytest.importorskip("tensorflow")
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    variables = [keras.Variable([3.0])]
    optimizer.build(variables)
    seen = set()

    def spied_on(function):
        def call(*args, **kwargs):
            seen.add(tf.__internal__.autograph.control_status_ctx().status.name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(core_step, "times", spied_on(core_step.times))
    monkeypatch.setattr(backend, "measure", spied_on(backend.measure))
    monkeypatch.setattr(
        optimizer.loss_scale_policy, "step", spied_on(optimizer.loss_scale_policy.step)
    )

    @tf.function
    def step():
        scale = optimizer.get_scaled_loss(tf.constant(1.0))
        optimizer.apply([tf.reshape(scale, [1])], variables)

    step()
    assert seen == {"DISABLED"}
    assert variables[0].numpy() == [2.0]


AdamW = functools.partial(keras.optimizers.AdamW, 0.1)
RECIPES = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "AdamW": AdamW,
    "clipped": lambda: AdamW(global_clipnorm=1.0),
    "accumulated": lambda: AdamW(global_clipnorm=1.0, gradient_accumulation_steps=4),
}


@pytest.mark.skipif(BACKEND != "torch", reason="TensorFlow and JAX compile their steps")
@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_step_makes_few_python_calls_for_any_number_of_tensors(recipe):
    calls, more_calls = (calls_in_a_step(RECIPES[recipe](), n) for n in (3, 300))
    assert calls == more_calls
    # In Python 3.11 a comprehension is a call.
    assert len(calls) <= 150


def calls_in_a_step(optimizer, count):
    """The files and names of our functions that a step on small tensors calls."""
    folder = str(pathlib.Path(keras_lso.__file__).parent)
    variables = [keras.Variable(np.ones(4, "float32")) for _ in range(count)]
    grads = tensors([np.ones(4, "float32")] * count)
    optimizer = keras_lso.LossScaleOptimizer(optimizer)
    calls = []

    def look(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            calls.append((code.co_filename, code.co_name))

    optimizer.scale_loss(1.0)
    for _ in range(5):
        optimizer.apply(grads, variables)
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        optimizer.apply(grads, variables)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Only TensorFlow has AutoGraph")
def test_autograph_converts_all_backend_functions_to_code():
    tf = pytest.importorskip("tensorflow")
    functions = {}
    for part in (backend, backend.host, backend.replicas):
        functions |= inspect.getmembers(type(part), inspect.isfunction)
    assert {"sharded_alike", "check_replica_context", "shown"} < set(functions)
    # Of one that it cannot read it warns, in a user's `tf.function`. It cannot read one
    # that has a docstring and no line.
    for function in functions.values():
        tf.autograph.to_code(function)
