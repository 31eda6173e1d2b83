"""Trial runs of a model for the reports: batches, a dtype policy, a restored state."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras import ops, tree

from keras_lso._backend import backend
from keras_lso._keras_internals.layers import autocast_to, dtype_policies_set
from keras_lso._keras_internals.models import kept_outside_of_lists
from keras_lso._keras_internals.seeds import global_seed_kept
from keras_lso._keras_internals.variables import layers_of


def batches_of(
    x: Any, y: Any, sample_weight: Any, count: int = 1
) -> list[tuple[Any, Any, Any]]:
    """Returns the first batches of data that `fit` takes; arrays are one batch.

    Args:
        x: Inputs of one batch, or a dataset.
        y: Targets of one batch, or None.
        sample_weight: Weights of the examples of one batch, or None.
        count: The number of batches of a dataset to return, if it has that many.

    Returns:
        List of tuples of inputs, targets and weights, tensors or None.

    Raises:
        ValueError: If there is no batch, or no example in a batch.
    """
    batches = [
        tree.map_structure(
            lambda value: None if value is None else ops.convert_to_tensor(value),
            batch,
        )
        for batch in _batches(x, y, sample_weight, count)
    ]
    for batch in batches:
        _check_has_examples(batch[0])
    return batches


def _check_has_examples(x):
    for value in tree.flatten(x):
        # An optional input may be None.
        shape = () if value is None else ops.shape(value)
        if shape[:1] == (0,):
            raise ValueError(
                "`x` must hold at least one example. Pass a batch that is not empty. "
                f"Received: x of shape {shape}"
            )


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
    # Unlike other data, a `PyDataset` may be read beyond its end.
    is_indexed = isinstance(x, keras.utils.PyDataset)
    items = map(x.__getitem__, itertools.count()) if is_indexed else iter(x)
    end = x.num_batches if is_indexed else None  # None if there is none.
    batches = list(itertools.islice(items, count if end is None else min(count, end)))
    if not batches:
        raise ValueError(f"`x` must yield a batch, and this {kind} yields none.")
    return [keras.utils.unpack_x_y_sample_weight(batch) for batch in batches]


def build(model: keras.Model, x: Any) -> None:
    """Builds the layers that `fit` would build."""
    if not all(layer.built for layer in layers_of(model)):
        model(x)


@contextlib.contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Makes the layers compute in float32."""
    narrow = ("float16", "bfloat16")
    layers = [v for v in layers_of(model) if v.compute_dtype in narrow]
    # Variables may be in float16.
    scope = autocast_to("float32") if layers else contextlib.nullcontext()
    with dtype_policies_set([(layer, "float32") for layer in layers]), scope:
        yield


@contextlib.contextmanager
def attribute_set(owner: object, name: str, value: Any) -> Iterator[None]:
    """Hides a method of a layer behind an attribute, which may hide it already."""
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    vars(owner)[name] = value
    try:
        yield
    finally:
        del vars(owner)[name]
        vars(owner).update(before)


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Restores the state that a pass changes.

    This state is statistics, seeds, metrics, dropout masks and the states of recurrent
    layers. It includes weights, since a call of `SpectralNormalization` assigns its
    kernel.
    """
    kept = kept_outside_of_lists(layers_of(model))
    variables = [*model.variables, *model.metrics_variables, *kept]
    before = [ops.copy(v.value) for v in variables]
    with global_seed_kept(), backend.random_state_kept():
        try:
            yield
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            _reset_metrics_since(model, variables)
            _reset_masks(model)


def _reset_metrics_since(model, variables):
    """Resets the metrics that `compute_loss` created, one for each loss."""
    known = {id(v) for v in variables}
    for metric in model.metrics:
        if not all(id(v) in known for v in metric.variables):
            metric.reset_state()


def _reset_masks(model):
    """Resets the dropout masks that cells keep after an error."""
    for layer in layers_of(model):
        if hasattr(layer, "reset_dropout_mask"):
            layer.reset_dropout_mask()
            layer.reset_recurrent_dropout_mask()
