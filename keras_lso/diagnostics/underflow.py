"""`underflow_report`: the underflow of a model's gradients in float16, at any scale.

`underflow_counts.py` counts values, `underflow_table.py` writes the table, and
`trial_runs.py` runs the model without changing it.
"""

import contextlib
import inspect
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops, tree
from numpy.typing import NDArray

from keras_lso._backend import backend
from keras_lso._core.checks import check_list, check_scale
from keras_lso._keras_internals.layers import own_variables_of
from keras_lso._keras_internals.variables import copy_of, is_overwritten, layers_of
from keras_lso.diagnostics.trial_runs import (
    attribute_set,
    batches_of,
    build,
    in_float32,
    unchanged,
)
from keras_lso.diagnostics.underflow_counts import GradientCounts, counts_of
from keras_lso.loss_scales import DEFAULT_MAX_SCALE, DEFAULT_MIN_SCALE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Scaling by powers of two is exact.
DEFAULT_SCALES = tuple(2.0**i for i in range(0, 25, 2))


def underflow_report(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    scales: Sequence[float] | None = None,
) -> "UnderflowReport":
    """Counts the underflow and overflow of each layer's gradients in float16.

    The function computes the gradients of one batch in float32: the gradients of each
    layer's weights, and the gradients of its outputs, on which all previous layers
    depend. Frozen layers before the first trained layer are left out. In float16, some
    of the nonzero values would become zero, subnormal (with fewer digits), or inf. A
    loss scale multiplies all values.

    ```python
    report = keras_lso.underflow_report(model, x_batch, y_batch)
    print(report)
    optimizer = keras_lso.LossScaleOptimizer(
        keras.optimizers.Adam(), initial_scale=report.initial_scale
    )
    ```

    Use the batch size of your training: a mean over more examples makes the gradients
    of each example smaller. The model runs in training mode, and its state is restored
    afterwards.

    Args:
        model: A compiled `keras.Model`, with any dtype policy.
        x: Inputs of one batch, or any other data that `fit` takes: a `tf.data.Dataset`,
            a `keras.utils.PyDataset`, a `torch.utils.data.DataLoader`, or a generator
            of batches. Only the first batch is used; a generator is advanced by one
            batch.
        y: Targets of one batch. Defaults to `None`: `x` yields the targets, or the
            model's loss needs none.
        sample_weight: Weights of the examples. Defaults to `None`: 1, or the weights
            that `x` yields.
        scales: The loss scales to report on. Defaults to `None`: every second power of
            two from 1 to `2**24`.

    Returns:
        An `UnderflowReport`.

    Raises:
        ValueError: If the model is not compiled, if its loss needs targets and there
            are none, if `x` yields no batch or no example, if both `x` and `y` give
            targets, or if an argument is not valid.

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
    [batch] = batches_of(x, y, sample_weight)
    _check_has_targets(model, batch[1])
    build(model, batch[0])
    found: dict = {}  # Layers of a subclassed model may share a path.
    for layer, grads in gradients_of(model, *batch):
        found.setdefault(_name(model, layer), []).extend(grads)
    counts = {name: counts_of(grads, scales) for name, grads in found.items() if grads}
    return UnderflowReport(scales, counts)


def _check_is_compiled(model):
    if not isinstance(model, keras.Model) or not model.compiled:
        raise ValueError(
            "`model` must be a keras.Model that was compiled with a loss. Call "
            f"`model.compile(optimizer, loss)` first. Received: model={model!r}"
        )


def _check_has_targets(model, y):
    computes = type(model).compute_loss is not keras.Model.compute_loss
    if y is None and model.loss is not None and not computes:
        raise ValueError(
            "`y` must be the targets of the batch, which the loss of the model needs. "
            f"Received: y=None, and a model with loss={model.loss!r}"
        )


# --- Gradients ----------------------------------------------------------------------


def gradients_of(
    model: keras.Model, x: Any, y: Any, sample_weight: Any
) -> list[tuple[keras.layers.Layer, list[NDArray[Any]]]]:
    """Returns the float32 gradients of a batch for each layer.

    The model is left unchanged.

    Returns:
        List of tuples of a layer and the list of its gradients, NumPy arrays: the
        gradients of its own weights, and, if it contains no layers, of the output of
        each call.
    """
    weights = [(v, layer) for layer in layers_of(model) for v in _own_weights(layer)]
    # The gradient of a float16 variable would be float16 itself.
    masters = [(v, copy_of(v, "float32")) for v, _ in weights if v.dtype == "float16"]
    # `unchanged` is outside, since inside the scope Keras 3.12 restores no float16
    # weights.
    with unchanged(model), in_float32(model):
        return _gradients(model, weights, masters, x, y, sample_weight)


def _own_weights(layer):
    own = {id(v) for v in own_variables_of(layer) if not is_overwritten(v)}
    return [v for v in layer.trainable_variables if id(v) in own]


def _gradients(model, weights, masters, x, y, sample_weight):
    # An older `compute_loss` does not take `training`, and Keras leaves it out.
    takes_training = "training" in inspect.signature(model.compute_loss).parameters
    arguments = {"training": True} if takes_training else {}

    def loss():
        owners.clear()
        with _replaced(masters, probes):
            predicted = model(x, training=True)
            return model.compute_loss(
                x=x, y=y, y_pred=predicted, sample_weight=sample_weight, **arguments
            )

    owners: list = []
    shapes: list = []
    layers = [layer for layer in layers_of(model)[1:] if len(layers_of(layer)) == 1]
    with after_each_call(layers, lambda layer, value: shapes.append(value.shape)):
        model(x, training=True)
    # A zero added to an output has the gradient of the output.
    probes = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]

    def add_probe(layer, value):
        owners.append(layer)
        return value + ops.cast(probes[len(owners) - 1], value.dtype)

    in_place = {id(v): master for v, master in masters}
    variables = [in_place.get(id(v), v) for v, _ in weights]
    with after_each_call(layers, add_probe):
        _, grads = backend.compute_gradients(loss, [*variables, *probes])
    holders = [layer for _, layer in weights]
    found: dict = {id(layer): (layer, []) for layer in layers_of(model)}
    frozen = _called_before_any_is_trained(owners, holders)
    reach = [*(True for _ in holders), *(i >= frozen for i in range(len(owners)))]
    for owner, grad, used in zip([*holders, *owners], grads, reach, strict=True):
        if used and grad is not None:
            grad = ops.convert_to_numpy(backend.to_dense(grad))
            found[id(owner)][1].append(grad)
    return list(found.values())


def _called_before_any_is_trained(called, trained):
    """Returns the number of first calls whose outputs get no gradient in training."""
    if not all(layer in called for layer in trained):
        return 0  # A layer that contains others: the order of its calls is unknown.
    first = (i for i, layer in enumerate(called) if layer in trained)
    return next(first, len(called))


@contextlib.contextmanager
def _replaced(masters, probes):
    """Lets layers read the float32 copies of their float16 variables."""
    if not masters:
        yield
        return
    # On JAX this scope hides the caller's scope, which holds the probes.
    pairs = [*masters, *((probe, probe) for probe in probes)]
    scope = keras.StatelessScope()
    for variable, source in pairs:
        scope.add_update((variable, ops.add(source, 0.0)))
    with scope:
        yield


def _name(model, layer):
    # Before `build` a layer has no path.
    return (layer.path or layer.name).removeprefix(f"{model.name}/")


@contextlib.contextmanager
def after_each_call(layers, function):
    """Calls `function(layer, output)` with each floating-point output of each layer.

    The result replaces the output, unless it is None.
    """

    def replaced(layer, value):
        is_float = ops.is_tensor(value) and keras.backend.is_float_dtype(value.dtype)
        new = function(layer, value) if is_float else None
        return value if new is None else new

    def wrap(layer, call):
        return lambda *args, **kwargs: tree.map_structure(
            lambda value: replaced(layer, value), call(*args, **kwargs)
        )

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(attribute_set(layer, "call", wrap(layer, layer.call)))
        yield


# --- The report ---------------------------------------------------------------------


class UnderflowReport:
    """The result of `underflow_report`. `print` it, or `plot` it.

    Attributes:
        scales: List of floats, ascending.
        layers: Dict of the layers' paths to `GradientCounts`.
        safe_scales: Tuple of the lowest and the highest scale at which every layer is
            safe: none of its values overflows, and at most 1% are flushed to zero.
            None if there is no such scale.
        initial_scale: Float. The `initial_scale` for a `LossScaleOptimizer`: half of
            the highest power of two at which no value overflows, within the default
            bounds of the scale. `2**15`, the default, if all values are 0 or a value is
            not finite.
    """

    def __init__(self, scales: list[float], layers: dict[str, GradientCounts]) -> None:
        self.scales = scales
        self.layers = layers
        low = max((c.lowest_safe_scale for c in layers.values()), default=0.0)
        high = min((c.highest_safe_scale for c in layers.values()), default=math.inf)
        self.safe_scales: tuple[float, float] | None = (
            (low, high) if low <= high else None
        )
        exponent = math.floor(math.log2(high / 2)) if 0 < high < math.inf else 15
        self.initial_scale: float = min(
            max(2.0**exponent, DEFAULT_MIN_SCALE), DEFAULT_MAX_SCALE
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as numbers, ready for JSON.

        Returns:
            Dict of `scales`, `layers` (the path of each to the attributes of its
            `GradientCounts`), `safe_scales` and `initial_scale`.
        """
        return {
            "scales": self.scales,
            "layers": {path: counts.to_dict() for path, counts in self.layers.items()},
            "safe_scales": self.safe_scales and list(self.safe_scales),
            "initial_scale": self.initial_scale,
        }

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws the shares of each layer against the scale.

        Args:
            path: The file to save the picture to. Defaults to `None`: the figure is
                only returned.

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

    def __str__(self) -> str:
        from keras_lso.diagnostics.underflow_table import table_of

        return table_of(self)
