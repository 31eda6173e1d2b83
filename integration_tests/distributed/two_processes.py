"""The training op and the batches of the workers of `test_processes.py`."""

from keras import ops

from keras_lso.compat.open_seq2seq import optimize_loss

# For each call of the training op a batch for each process. Two calls are an update;
# in the second pair one batch overflows, on one process.
INF = float("inf")
BATCHES = [
    [[1.0, 0.0], [3.0, 2.0]],
    [[2.0, 4.0], [2.0, 2.0]],
    [[1.0, 1.0], [INF, 1.0]],
    [[1.0, 1.0], [1.0, 1.0]],
    [[4.0, 0.0], [0.0, 4.0]],
    [[0.0, 0.0], [0.0, 4.0]],
]


def make_train_op(weight, **arguments):
    return optimize_loss(
        lambda x: ops.sum(weight * x),
        "SGD",
        {},
        lambda step: 0.5,
        dtype="mixed",
        loss_scaling="Backoff",
        on_horovod=True,
        iter_size=2,
        **arguments,
    )


def bits(mean):
    """Returns the dtype, the shape and the bytes."""
    if mean is None:
        return None
    array = ops.convert_to_numpy(mean)
    return [array.dtype.name, array.shape, array.tobytes().hex()]
