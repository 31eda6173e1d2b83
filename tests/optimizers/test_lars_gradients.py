"""`LARS` with every dtype, and with gradients of every kind."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LARS
from testing.lars import PATHS, InNumPy, assert_close, forms, values_of, variable
from testing.optimizer_steps import SCALE, apply
from testing.tensors import tensor

# JAX has float64 only where x64 is on; `tensor` skips where it is not.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norms_of_16_bit_tensors_are_accumulated_in_float32(wrap, dtype):
    # The square of 48 * 1024 overflows float16, and so does the norm, twice as much.
    w = variable("w", np.full(4, 49152.0), dtype)
    optimizer = LARS(1.0, momentum=0.0, eeta=0.25)
    outer = wrap(optimizer)
    gradient = ops.full((4,), 49152.0, dtype=dtype)
    options = {"scaled": False} if outer is not optimizer else {}
    outer.apply([gradient], [w], **options)
    # The ratio is a quarter.
    assert w.dtype == dtype
    assert values_of([w])[0].tolist() == [36864.0] * 4


@forms
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float16_and_bfloat16_variables_step_in_float32(form, dtype):
    w = variable("w", [3.0, 4.0], dtype)
    optimizer = LARS(0.5, momentum=0.5, weight_decay_rate=0.25, eeta=0.1, **form)
    optimizer.build([w])
    reference = InNumPy(
        [[3.0, 4.0]], momentum=0.5, weight_decay_rate=0.25, eeta=0.1, **form
    )
    for gradient in ([1.0, 2.0], [-4.0, 0.5]):
        optimizer.apply([tensor(gradient, dtype)], [w])
        reference.step([gradient], 0.5)
        # What is left is the rounding of the weights and the momentum themselves.
        epsilon = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        assert_close(values_of([w]), reference.weights, 3 * epsilon)
    assert optimizer.momentums[0].dtype == dtype


@forms
def test_float64_variables_step_in_float64(form, start, gradients):
    tensor(0.0, "float64")  # skips where there is none
    settings = dict(momentum=0.9, weight_decay_rate=0.1, eeta=0.1, **form)
    variables = [variable(p, w, "float64") for p, w in zip(PATHS, start, strict=True)]
    optimizer = LARS(0.5, **settings)
    reference = InNumPy(start, **settings)
    for grads in gradients:
        optimizer.apply([tensor(g, "float64") for g in grads], variables)
        reference.step(grads, 0.5)
    assert_close(values_of(variables), reference.weights, 1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_float32_variables_accept_gradients_of_other_dtypes(wrap, dtype):
    variables = [variable("a", [3.0, 4.0]), variable("b", 2.0)]
    reference = InNumPy([[3.0, 4.0], 2.0], eeta=0.1)
    optimizer = LARS(0.5, eeta=0.1)
    outer = wrap(optimizer)
    options = {"scaled": False} if outer is not optimizer else {}
    for grads in ([[1.0, -2.0], 3.0], [[0.5, 0.25], -1.0]):
        outer.apply([tensor(g, dtype) for g in grads], variables, **options)
        reference.step(grads, 0.5)
    assert_close(values_of(variables), reference.weights)


def test_gradient_with_overflowing_norm_leaves_weights_unchanged(wrap):
    # As in the Model Garden: the ratio is eeta * |w| / inf.
    w = variable("w", [3.0, 4.0])
    inner = LARS(0.5, momentum=0.5)
    outer = wrap(inner)
    options = {"scaled": False} if outer is not inner else {}
    outer.apply([tensor([1e25, -1e25])], [w], **options)
    assert values_of([w])[0].tolist() == [3.0, 4.0]
    assert int(inner.iterations) == 1


@pytest.mark.exhaustive
@forms
def test_sparse_gradients_step_like_dense_gradients(
    wrap, form, sparse_gradient, compiled
):
    values = np.array([[8.0, 1.0], [16.0, 2.0], [24.0, 3.0]], "float32")
    rows = [2, 0, 0]
    dense = np.zeros((4, 2), "float32")
    np.add.at(dense, rows, values)
    start = np.arange(1.0, 9.0, dtype="float32").reshape(4, 2)
    settings = dict(weight_decay_rate=0.1, eeta=0.1, **form)

    def two_steps(gradient):
        table = variable("table", start)
        optimizer = wrap(LARS(0.5, **settings))
        optimizer.build([table])

        def step(gradient):
            optimizer.apply([gradient], [table])

        call = compiled(step, [table, *optimizer.variables])
        call(gradient)
        call(gradient)
        return values_of([table])

    results = two_steps(sparse_gradient(values, rows, (4, 2)))
    assert_close(results, two_steps(tensor(dense)))
    # Rows without a gradient decay too: the penalty is of the whole table.
    assert (np.abs(results[0] - start) > 0).all()


def test_numpy_arrays_are_accepted_as_gradients(wrap):
    w = variable("w", [3.0, 4.0])
    optimizer = wrap(LARS(1.0, eeta=0.5))
    optimizer.apply([np.array([0.0, 16.0], "float32")], [w])
    assert_close(values_of([w]), [[3.0, 1.5]])


# What PyTorch warns of would be an error in the tests only.
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("shape", [(3,), (2, 2, 2)])
def test_gradient_of_wrong_shape_is_rejected(wrap, shape):
    w = variable("w", [3.0, 4.0])
    optimizer = wrap(LARS(1.0, momentum=0.5))
    # Each framework says it in its own way.
    with pytest.raises(Exception, match=r"(?i)shape|size|broadcast|dimension"):
        optimizer.apply([ops.ones(shape)], [w])
    assert values_of([w])[0].tolist() == [3.0, 4.0]


def test_variable_overwritten_by_gradient_takes_no_step(wrap):
    w, scale = variable("w", [3.0, 4.0]), variable("scale", [1.0, 1.0])
    scale.overwrite_with_gradient = True
    inner = LARS(1.0, eeta=0.5)
    optimizer = wrap(inner)
    factor = 1.0 if optimizer is inner else SCALE
    grads = [tensor([0.0, 16.0 * factor]), tensor([7.0, 8.0])]
    optimizer.apply(grads, [w, scale])
    assert_close(values_of([w, scale]), [[3.0, 1.5], [7.0, 8.0]])


def test_tensorflow_variable_is_excluded_by_name(wrap):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras's optimizers take bare variables on TensorFlow only")
    import tensorflow as tf

    names = ["bn/gamma", "kernel"]
    variables = [tf.Variable([3.0, 4.0], name=name) for name in names]
    optimizer = wrap(LARS(1.0, eeta=0.5, exclude_from_weight_decay=["gamma"]))
    apply(optimizer, [[0.0, 16.0]] * 2, variables)
    assert [v.numpy().tolist() for v in variables] == [[3.0, -12.0], [3.0, 1.5]]


def test_lists_are_accepted_as_gradients():
    w = variable("w", [3.0, 4.0])
    LARS(10.0, momentum=0.0).apply([[0.0, 100.0]], [w])
    np.testing.assert_allclose(values_of([w])[0], [3.0, 3.95], rtol=1e-6)
