"""Gradients that the caller has added up over the replicas of a `tf.distribute`."""

import contextlib
import threading

from keras_lso._keras_internals.optimizers import stepping

_this_replica = threading.local()


@contextlib.contextmanager
def reduced_gradients(optimizer, are_reduced=True):
    """Keeps an optimizer from adding up the gradients of all replicas.

    Args:
        optimizer: The optimizer that is to apply them, in this replica's thread.
        are_reduced: Bool. Whether the caller has added them up. Defaults to `True`.
    """
    if not are_reduced:
        yield
        return
    for reducing in stepping(optimizer):
        # Only Keras's TensorFlow optimizers add them up.
        reduce = getattr(reducing, "_all_reduce_sum_gradients", None)
        if reduce is not None and not isinstance(reduce, _ReduceUnlessReduced):
            reducing._all_reduce_sum_gradients = _ReduceUnlessReduced(reduce)
    before = has_reduced_gradients()
    _this_replica.has_reduced = True
    try:
        yield
    finally:
        _this_replica.has_reduced = before


def has_reduced_gradients():
    """Whether this replica's gradients are the sum over all replicas already."""
    return getattr(_this_replica, "has_reduced", False)


class _ReduceUnlessReduced:
    """Adds up the replicas' gradients, unless the caller has done so."""

    def __init__(self, reduce):
        self.reduce = reduce

    def __call__(self, grads_and_vars):
        if has_reduced_gradients():
            return grads_and_vars
        return self.reduce(grads_and_vars)
