"""Clipping by global norm, against NumPy in float64."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso._backend import backend
from keras_lso.compat.open_seq2seq import _clip_by_global_norm, _clip_gradients_by_norm

VALUES = [np.float32([[3.0, -4.0]]), None, np.float32([12.0])]
TENSOR = ops.convert_to_tensor(99.0)


def tensors(values=VALUES):
    return [v if v is None else ops.convert_to_tensor(v) for v in values]


def arrays(clipped):
    return [t if t is None else ops.convert_to_numpy(t) for t in clipped]


@pytest.mark.parametrize("clip_norm, factor", [(6.5, 0.5), (13.0, 1.0), (TENSOR, 1.0)])
@pytest.mark.parametrize("kind", [list, tuple])
def test_clipping_scales_values_by_ratio_of_norms(clip_norm, factor, kind):
    clipped, norm = _clip_by_global_norm(kind(tensors()), clip_norm, None, name="clip")
    assert isinstance(clipped, list)
    assert float(norm) == 13.0
    for value, before in zip(arrays(clipped), VALUES, strict=True):
        if before is None:
            assert value is None
        else:
            np.testing.assert_allclose(value, before * factor, rtol=1e-6)


@pytest.mark.parametrize(
    "values, expected",
    [
        ([np.float16([30000.0, 40000.0])], [3.0, 4.0]),
        ([np.float32([np.inf, 1.0]), np.float32([2.0])], [np.nan] * 3),
        ([np.float32([np.nan, 1.0]), np.float32([2.0])], [np.nan] * 3),
        ([None], []),
    ],
)
def test_clipping_computes_norm_in_float32_and_leaves_no_finite_value(values, expected):
    clipped, norm = _clip_by_global_norm(tensors(values), 5.0, None)
    flat = np.concatenate([[], *(v for v in arrays(clipped) if v is not None)])
    if np.isfinite(float(norm)):
        np.testing.assert_allclose(flat, expected, rtol=1e-3)
    else:
        assert not np.isfinite(flat).any() and len(flat) == len(expected)


def test_clipped_sparse_values_stay_sparse(sparse_gradient):
    # Row 1 twice: 3 and 1 add up to 4.
    gradient = sparse_gradient(np.float32([[3.0], [3.0], [1.0]]), [1, 0, 1], (3, 1))
    clipped, norm = _clip_by_global_norm([gradient], 2.5, None)
    assert float(norm) == 5.0
    assert type(clipped[0]) is type(gradient)
    dense = ops.convert_to_numpy(backend.to_dense(clipped[0]))
    np.testing.assert_allclose(dense, [[1.5], [2.0], [0.0]], rtol=1e-6)


@pytest.mark.parametrize("t_list", [{"a": 1.0}, 3.0, "tensors", None])
def test_t_list_that_is_not_sequence_raises_type_error(t_list):
    with pytest.raises(TypeError, match="`t_list` must be a list or a tuple"):
        _clip_by_global_norm(t_list, 1.0, None)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, np.nan])
def test_clip_norm_not_above_zero_is_rejected(clip_norm):
    with pytest.raises(ValueError, match="clip_norm="):
        _clip_by_global_norm(tensors(), clip_norm, None)


def test_clipping_keeps_gradient_variable_pairs():
    variables = [keras.Variable(0.0) for _ in VALUES]
    clipped = _clip_gradients_by_norm(zip(tensors(), variables, strict=True), 6.5)
    assert [v for _, v in clipped] == variables
    np.testing.assert_allclose(arrays([clipped[2][0]])[0], [6.0], rtol=1e-6)
