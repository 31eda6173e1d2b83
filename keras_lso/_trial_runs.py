"""What the reports need to run a model: batches, a dtype policy, its state restored."""

import contextlib
import itertools
from collections.abc import Iterable

import keras
from keras import ops, tree

from keras_lso._keras_internals.layers import autocast_to, dtype_policies_set
from keras_lso._keras_internals.variables import layers_of


def batches_of(x, y, sample_weight, count=1):
    """Returns the first batches of what `fit` takes: arrays are one.

    Args:
        x: Inputs of one batch, or a dataset.
        y: Targets of one batch, or None.
        sample_weight: Weights of the examples of one batch, or None.
        count: Int. How many batches of a dataset to return, if it has as many.

    Returns:
        List of tuples of inputs, targets and weights, tensors or None.
    """
    return [
        tree.map_structure(
            lambda value: None if value is None else ops.convert_to_tensor(value),
            batch,
        )
        for batch in _batches(x, y, sample_weight, count)
    ]


def _batches(x, y, sample_weight, count):
    is_data = isinstance(x, keras.utils.PyDataset) or (
        isinstance(x, Iterable)
        and not isinstance(x, list | tuple | dict)
        and not ops.is_tensor(x)
        and not hasattr(x, "__array__")
    )
    if not is_data:
        return [(x, y, sample_weight)]
    kind = type(x).__name__
    if y is not None or sample_weight is not None:
        raise ValueError(
            f"When `x` is a {kind}, `y` and `sample_weight` must not be given: it "
            "yields them with the inputs. Received: "
            f"y={y!r}, sample_weight={sample_weight!r}"
        )
    # Unlike others a `PyDataset` has no end.
    items = (
        (x[i] for i in range(len(x)))
        if isinstance(x, keras.utils.PyDataset)
        else iter(x)
    )
    batches = list(itertools.islice(items, count))
    if not batches:
        raise ValueError(f"`x` must yield a batch, and this {kind} yields none.")
    return [keras.utils.unpack_x_y_sample_weight(batch) for batch in batches]


def build(model, x):
    """Builds what `fit` would build."""
    if not all(layer.built for layer in layers_of(model)):
        model(x)


@contextlib.contextmanager
def in_float32(model):
    """Makes the layers compute in float32."""
    narrow = ("float16", "bfloat16")
    layers = [v for v in layers_of(model) if v.compute_dtype in narrow]
    # Variables may be in float16.
    scope = autocast_to("float32") if layers else contextlib.nullcontext()
    with dtype_policies_set([(layer, "float32") for layer in layers]), scope:
        yield


@contextlib.contextmanager
def unchanged(model):
    """Restores what a forward pass assigns: statistics, seeds, metrics."""
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    before = [ops.copy(v) for v in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
