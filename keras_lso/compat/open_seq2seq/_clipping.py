"""Clipping by the global norm, computed in float32 as in OpenSeq2Seq."""

from collections.abc import Iterable, Sequence

import keras
from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.tensors import Tensor, times
from keras_lso._core.checks import check_positive, refusal
from keras_lso._core.gradients import split_pairs


def _clip_by_global_norm(
    t_list: Sequence[Tensor | None],
    clip_norm: float | Tensor,
    use_norm: float | Tensor | None,
    name: str | None = None,
) -> tuple[list[Tensor | None], Tensor]:
    """Multiplies all tensors by `clip_norm / max(global_norm, clip_norm)`.

    The norm is accumulated in float32, since the squares of float16 gradients overflow.
    If it is not finite, all values become NaN, so that no infinite gradient is applied.

    Args:
        t_list: Tensors, dense or sparse, or None.
        clip_norm: The global norm to clip to, above 0.
        use_norm: Scalar (tensor). The L2 norm of all elements, or None to compute it.
        name: Defaults to `None`. Keras 3 does not name operations.

    Returns:
        The list of clipped tensors in their dtypes, or None, and the norm in float32.

    Raises:
        TypeError: If `t_list` is not a sequence.
        ValueError: If `clip_norm` is not above 0.

    Example:

    >>> from keras import ops
    >>> from keras_lso.compat.open_seq2seq.optimizers import _clip_by_global_norm
    >>> tensors = [ops.array([3.0, 0.0]), None, ops.array([4.0])]
    >>> [first, none, last], norm = _clip_by_global_norm(tensors, 2.5, None)
    >>> print(ops.convert_to_numpy(first), none, ops.convert_to_numpy(last))
    [1.5 0. ] None [2.]
    >>> float(norm)
    5.0
    """
    if not isinstance(t_list, list | tuple):
        raise refusal("t_list", t_list, "be a list or a tuple of tensors", TypeError)
    if not ops.is_tensor(clip_norm) and not backend.is_variable(clip_norm):
        check_positive("clip_norm", clip_norm)
    tensors = backend.as_gradients(t_list)
    norm = global_norm(tensors) if use_norm is None else use_norm
    norm = ops.convert_to_tensor(norm, dtype="float32")
    clip_norm = ops.convert_to_tensor(clip_norm, dtype="float32")
    factor = clip_norm / ops.maximum(norm, clip_norm)
    # `maximum` does not propagate NaN in every framework. inf - inf is NaN.
    factor = ops.where(ops.isfinite(norm), factor, norm - norm)

    def clip(values):
        return ops.cast(times(values, factor), values.dtype)

    return [t if t is None else backend.map_values(clip, t) for t in tensors], norm


def global_norm(tensors: Iterable[Tensor | None]) -> Tensor:
    """Returns the norm of all tensors together as a float32 scalar tensor."""
    tensors = [t for t in tensors if t is not None]
    if not tensors:
        return ops.zeros((), dtype="float32")
    norms = [ops.cast(norm, "float32") for norm in backend.l2_norms(tensors)]
    return norm_of(ops.stack(norms))


def norm_of(tensor: Tensor) -> Tensor:
    """Returns the L2 norm of a tensor, dense or sparse, in float32 or wider."""
    [norm] = backend.l2_norms([tensor])
    return norm


def _clip_gradients_by_norm(
    grads_and_vars: Iterable[tuple[Tensor | None, keras.Variable]],
    clip_gradients: float,
) -> list[tuple[Tensor | None, keras.Variable]]:
    """Returns `(gradient, variable)` pairs with clipped gradients.

    Args:
        grads_and_vars: The `(gradient, variable)` pairs. A gradient may be None.
        clip_gradients: The global norm to clip to, above 0.
    """
    grads, variables = split_pairs(grads_and_vars)
    clipped, _ = _clip_by_global_norm(grads, clip_gradients, None)
    return list(zip(clipped, variables, strict=True))
