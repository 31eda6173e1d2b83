"""Trial runs of a model for the reports: batches, a dtype policy, a restored state."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras import ops, tree

from keras_lso._backend import backend
from keras_lso._backend.tensors import NARROW
from keras_lso._keras_internals.layers import (
    autocast_to,
    dtype_policies_set,
    preserve_global_seed,
)
from keras_lso._keras_internals.models import unlisted_state_of
from keras_lso._keras_internals.variables import layers_of


def batches_of(
    model: keras.Model, x: Any, y: Any, sample_weight: Any, count: int = 1
) -> list[tuple[Any, Any, Any]]:
    """Returns the first batches of data that `fit` takes, and builds the model."""
    batches = tree.map_structure(
        lambda value: None if value is None else ops.convert_to_tensor(value),
        _batches(x, y, sample_weight, count),
    )
    for batch in batches:
        for value in tree.flatten(batch[0]):
            # An optional input may be None.
            shape = () if value is None else ops.shape(value)
            if shape[:1] == (0,):
                raise ValueError(
                    f"`x` must hold at least one example. Received: x of shape {shape}"
                )
    if not all(layer.built for layer in layers_of(model)):
        model(batches[0][0])
    return batches


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
            f"`y` and `sample_weight` must not be given if `x` is a {kind}: it yields "
            "them with the inputs."
        )
    if isinstance(x, keras.utils.PyDataset):
        # Unlike other data, it may be read beyond its end.
        end = itertools.count() if x.num_batches is None else range(x.num_batches)
        x = map(x.__getitem__, end)
    batches = list(itertools.islice(x, count))
    if not batches:
        raise ValueError(f"`x` must yield a batch, and this {kind} yields none.")
    return [keras.utils.unpack_x_y_sample_weight(batch) for batch in batches]


@contextlib.contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Makes the layers compute in float32."""
    layers = [v for v in layers_of(model) if v.compute_dtype in NARROW]
    # Variables may be in float16.
    scope = autocast_to("float32") if layers else contextlib.nullcontext()
    with dtype_policies_set([(layer, "float32") for layer in layers]), scope:
        yield


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Restores the state that a pass changes: statistics, seeds, metrics, masks."""
    # In a scope of other dtype policies, Keras 3.12 would restore no float16 weights.
    kept = unlisted_state_of(layers_of(model))
    # Weights too, since a call of `SpectralNormalization` assigns its kernel.
    variables = [*model.variables, *model.metrics_variables, *kept]
    before = [ops.copy(v.value) for v in variables]
    with preserve_global_seed(), backend.host.preserve_random_state():
        try:
            yield
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            known = set(map(id, variables))
            for metric in model.metrics:
                # `compute_loss` created it, one for each loss.
                if not all(id(v) in known for v in metric.variables):
                    metric.reset_state()
            for layer in layers_of(model):
                # Cells keep their masks after an error.
                if hasattr(layer, "reset_dropout_mask"):
                    layer.reset_dropout_mask()
                    layer.reset_recurrent_dropout_mask()
