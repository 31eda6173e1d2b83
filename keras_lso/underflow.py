"""`underflow_report`: what float16 would make of a model's gradients, at any scale."""

import contextlib
import math
from collections.abc import Iterable

import keras
import numpy as np
from keras import ops, tree

from keras_lso._backend import backend
from keras_lso._checks import check_scale
from keras_lso._keras_internals.variables import layers_of
from keras_lso._option_checks import check_list
from keras_lso._underflow_counts import GradientCounts, counts_of
from keras_lso.loss_scales import DEFAULT_MAX_SCALE, DEFAULT_MIN_SCALE

# Powers of two, at which scaling by itself changes no digit.
DEFAULT_SCALES = tuple(2.0**i for i in range(0, 25, 2))


def underflow_report(model, x, y=None, sample_weight=None, scales=None):
    """Says what float16 would make of the gradients of each layer, at each scale.

    The gradients of one batch are computed in float32: those of the layer's weights,
    and those that reach its outputs, on which all layers before it depend. Of the
    values that are not zero, some would be zero in float16, some subnormal (with fewer
    digits), some inf. A loss scale moves all of them up.

    ```python
    report = keras_lso.underflow_report(model, x_batch, y_batch)
    print(report)
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(), initial_scale=report.initial_scale
    )
    ```

    Take a batch as large as those that you train on: a mean over more examples makes
    the gradients of each smaller. The model is run as in training (dropout, say), and
    is as it was afterwards.

    Args:
        model: A compiled `keras.Model`, under `"float32"` or a `"mixed_..."` policy.
        x: Inputs of one batch. Or what else `fit` takes, of which the first batch is
            looked at: a `tf.data.Dataset`, a `keras.utils.PyDataset`, a
            `torch.utils.data.DataLoader`, or a generator of batches, which is then one
            batch further.
        y: Targets of one batch. Defaults to `None`: `x` yields them, or the model's
            loss needs none.
        sample_weight: Weights of the examples. Defaults to `None`: 1, or what `x`
            yields.
        scales: List of floats, the loss scales to look at. Defaults to `None`: every
            second power of two from 1 to `2**24`.

    Returns:
        An `UnderflowReport`.

    Raises:
        ValueError: If the model is not compiled, if its weights are in float16, if `x`
            yields no batch, or targets beside `y`, or if an argument is none of the
            above.

    Example:

    >>> import keras, keras_lso
    >>> layer = keras.layers.Dense(1, kernel_initializer="ones", name="d")
    >>> model = keras.Sequential([keras.Input((1,)), layer])
    >>> model.compile("sgd", loss="mse")
    >>> x = keras.ops.array([[2.0**-10]])
    >>> report = keras_lso.underflow_report(model, x, 0 * x, scales=[1, 1024])
    >>> print(report.to_dict()["layers"]["d"]["subnormal"])  # 2**-19 of 2**-9, 2**-9
    [0.3333333333333333, 0.0]
    """
    _check_is_compiled(model)
    scales = DEFAULT_SCALES if scales is None else check_list("scales", scales, 1)
    scales = sorted({check_scale("scales", scale) for scale in scales})
    x, y, sample_weight = tree.map_structure(
        lambda value: None if value is None else ops.convert_to_tensor(value),
        _first_batch(x, y, sample_weight),
    )
    if not all(layer.built for layer in layers_of(model)):
        model(x)  # As `fit` would.
    _check_dtypes(model)
    layers = [layer for layer in layers_of(model)[1:] if not _has_parts(layer)]
    with _in_float32(layers_of(model)), _unchanged(model):
        found = _gradients(model, layers, x, y, sample_weight)
    return UnderflowReport(
        scales,
        {name: counts_of(values, scales) for name, values in found.items() if values},
    )


def _check_is_compiled(model):
    if not isinstance(model, keras.Model) or not model.compiled:
        raise ValueError(
            "`model` must be a keras.Model that was compiled with a loss: call "
            f"`model.compile(optimizer, loss)`. Received: model={model!r}"
        )


def _first_batch(x, y, sample_weight):
    """Returns inputs, targets and weights of a batch, of which `x` may have many."""
    is_data = isinstance(x, keras.utils.PyDataset) or (
        isinstance(x, Iterable)
        and not isinstance(x, list | tuple | dict)
        and not ops.is_tensor(x)
        and not hasattr(x, "__array__")
    )
    if not is_data:
        return x, y, sample_weight
    kind = type(x).__name__
    if y is not None or sample_weight is not None:
        raise ValueError(
            f"When `x` is a {kind}, `y` and `sample_weight` must not be given: it "
            "yields them with the inputs. Received: "
            f"y={y!r}, sample_weight={sample_weight!r}"
        )
    is_indexed = isinstance(x, keras.utils.PyDataset)
    batch = x[0] if is_indexed else next(iter(x), None)
    if batch is None:
        raise ValueError(f"`x` must yield a batch, and this {kind} yields none.")
    return keras.utils.unpack_x_y_sample_weight(batch)


def _check_dtypes(model):
    narrow = [v.path for v in model.trainable_variables if v.dtype == "float16"]
    if narrow:
        raise ValueError(
            "The gradients of float16 weights are float16 themselves, and have lost "
            "what this is to count. Build the model under the 'mixed_float16' policy, "
            "`set_weights` of this one, and pass that. Received a model with float16 "
            f"weights: {narrow[:3]}"
        )


def _has_parts(layer):
    return len(layers_of(layer)) > 1


@contextlib.contextmanager
def _in_float32(layers):
    """Lets the layers compute in float32."""
    policies = [(layer, layer.dtype_policy) for layer in layers]
    try:
        for layer, policy in policies:
            if policy.compute_dtype in ("float16", "bfloat16"):
                layer.dtype_policy = "float32"
        yield
    finally:
        for layer, policy in policies:
            layer.dtype_policy = policy


@contextlib.contextmanager
def _unchanged(model):
    """Puts back what the forward pass assigns: statistics, seeds, metrics."""
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    before = [ops.copy(v) for v in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


# --- Gradients ----------------------------------------------------------------------


def _gradients(model, layers, x, y, sample_weight):
    """Returns the float32 gradients of each layer, a list of arrays by its path."""

    def loss():
        owners.clear()
        predicted = model(x, training=True)
        return model.compute_loss(
            x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=True
        )

    owners: list = []
    shapes: list = []
    with _after_each_call(layers, lambda layer, value: shapes.append(value.shape)):
        model(x, training=True)
    # What is added to an output has the gradient of the output.
    probes = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]

    def add_probe(layer, value):
        owners.append(layer)
        return value + ops.convert_to_tensor(probes[len(owners) - 1])

    variables = [v for layer in layers for v in layer.trainable_variables]
    with _after_each_call(layers, add_probe):
        _, grads = backend.compute_gradients(loss, [*variables, *probes])
    holders = [layer for layer in layers for _ in layer.trainable_variables]
    # Layers may share a path: nothing keeps those of a subclassed model apart.
    found: dict = {_name(model, layer): [] for layer in layers}
    for owner, grad in zip([*holders, *owners], grads, strict=True):
        if grad is not None:
            grad = ops.convert_to_numpy(backend.to_dense(grad))
            found[_name(model, owner)].append(grad)
    return found


def _name(model, layer):
    """Returns the path within the model; before `build` a layer has its name only."""
    path = layer.path or layer.name
    return path.removeprefix(f"{model.name}/")


@contextlib.contextmanager
def _after_each_call(layers, function):
    """Hands each floating-point output of each layer's `call` to a function.

    What that returns takes the output's place, unless it is None.
    """

    def wrap(layer, call):
        def wrapped(*args, **kwargs):
            return tree.map_structure(
                lambda value: _replaced(layer, value, function), call(*args, **kwargs)
            )

        return wrapped

    for layer in layers:
        vars(layer)["call"] = wrap(layer, layer.call)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["call"]


def _replaced(layer, value, function):
    is_float = ops.is_tensor(value) and keras.backend.is_float_dtype(value.dtype)
    new = function(layer, value) if is_float else None
    return value if new is None else new


# --- The report ---------------------------------------------------------------------


class UnderflowReport:
    """What `underflow_report` found. `print` it, or `plot` it.

    Attributes:
        scales: List of floats, ascending.
        layers: Dict of the layers' paths to `GradientCounts`.
        safe_scales: Tuple of the lowest and the highest scale at which every layer is
            safe: none of its values overflows, and at most 1% are flushed to zero.
            None if there is no such scale.
        initial_scale: Float. The highest power of two at which no value overflows, with
            a bit to spare: where a `LossScaleOptimizer` may start.
    """

    def __init__(self, scales, layers):
        self.scales = scales
        self.layers = layers
        low = max((c.lowest_safe_scale for c in layers.values()), default=0.0)
        high = min((c.highest_safe_scale for c in layers.values()), default=math.inf)
        self.safe_scales = (low, high) if low <= high else None
        exponent = math.floor(math.log2(high / 2)) if 0 < high < math.inf else 15
        self.initial_scale = min(
            max(2.0**exponent, DEFAULT_MIN_SCALE), DEFAULT_MAX_SCALE
        )

    def to_dict(self):
        """Returns all of it as numbers, ready for JSON.

        Returns:
            Dict of `scales`, `layers` (the path of each to its number of `values` that
            are not zero, their `smallest`, `median` and `largest` magnitude, and the
            shares `flushed`, `subnormal` and `overflowing`, lists with an item for
            each scale), `safe_scales` and `initial_scale`.
        """
        return {
            "scales": self.scales,
            "layers": {path: counts.to_dict() for path, counts in self.layers.items()},
            "safe_scales": self.safe_scales and list(self.safe_scales),
            "initial_scale": self.initial_scale,
        }

    def plot(self, path=None):
        """Draws the shares of each layer against the scale.

        Args:
            path: String or path of a file to save the picture to. Defaults to `None`:
                it is only returned.

        Returns:
            A `matplotlib` figure.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from keras_lso import plotting

        figure = plotting.plot_underflow(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def __str__(self):
        from keras_lso._underflow_table import table_of

        return table_of(self)


__all__ = ["GradientCounts", "UnderflowReport", "underflow_report"]
