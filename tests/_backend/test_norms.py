"""`l2_norms` against NumPy in float64."""

import keras
import numpy as np
import pytest
from keras import ops

from testing.primitives import DTYPES, NOT_FINITE, implementations, in_each_way
from testing.tensors import number, numpy, tensor, transposed

# JAX has float64 only where x64 is on; `tensor` skips where it is not.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")

each_l2_norms = in_each_way("l2_norms", implementations("l2_norms"))


@each_l2_norms
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_match_numpy_in_float64(l2_norms, dtype):
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
def test_norms_of_16_bit_tensors_are_accumulated_and_returned_in_float32(
    l2_norms, dtype
):
    # 256 squared is 65536, which float16 does not hold; nor does it the second norm.
    norms = l2_norms([tensor([192.0, -256.0], dtype), tensor([49152.0] * 4, dtype)])
    assert [keras.backend.standardize_dtype(n.dtype) for n in norms] == ["float32"] * 2
    assert [number(n) for n in norms] == [320.0, 98304.0]


@each_l2_norms
def test_norm_of_float64_tensor_among_float32_keeps_its_range(l2_norms):
    values = [tensor([3.0, 4.0]), tensor([3e30, 4e30], "float64")]
    norms = [float(ops.convert_to_numpy(n)) for n in l2_norms(values)]
    np.testing.assert_allclose(norms, [5.0, 5e30], rtol=1e-14)


@each_l2_norms
def test_norms_of_large_tensors_keep_float32_precision(l2_norms, compiled):
    # As large as the last layer of a VGG. One by one in float32 the squares would
    # add up with an error of 1e-4; in blocks or by halves it is some 1e-7.
    values = np.random.default_rng(0).standard_normal(2**22, dtype="float32")
    exact = np.linalg.norm(values.astype("float64"))

    def norms(values):
        return l2_norms([values])

    [norm] = compiled(norms, [])(ops.convert_to_tensor(values))
    np.testing.assert_allclose(number(norm), exact, rtol=1e-6)


@each_l2_norms
def test_norm_of_expanded_tensor_keeps_float32_precision(l2_norms):
    # The gradient of a sum. PyTorch adds up what is not contiguous one by one, and
    # equal squares are all rounded to the same side: in rows of 1,024 by 7e-6.
    first, count = 1.97917, 2**14 + 3
    [norm] = l2_norms([ops.broadcast_to(tensor([first]), (count,))])
    np.testing.assert_allclose(number(norm), first * count**0.5, rtol=2e-6)


@each_l2_norms
def test_norm_of_transposed_tensor_matches_numpy(l2_norms):
    values = np.arange(6.0).reshape(2, 3)
    [norm] = l2_norms([transposed(tensor(values))])
    np.testing.assert_allclose(number(norm), np.linalg.norm(values), rtol=2e-7)


@each_l2_norms
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_norm_of_nonfinite_tensor_is_not_finite(l2_norms, bad):
    [norm] = l2_norms([tensor([1.0, bad])])
    assert not np.isfinite(number(norm))


@each_l2_norms
def test_norm_of_sparse_gradient_sums_duplicate_rows(
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
