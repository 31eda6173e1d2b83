"""`underflow_report`: the underflow of a model's gradients in float16, at any scale."""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np
from keras import ops, tree
from numpy.typing import ArrayLike, NDArray

from keras_lso._backend import backend
from keras_lso._backend.host import RecordingScope
from keras_lso._backend.tensors import FLOAT16_MAX
from keras_lso._core.checks import check_list, check_scale, refusal
from keras_lso._keras_internals.optimizers import attributes_set
from keras_lso._keras_internals.variables import (
    copy_of,
    is_overwritten,
    layer_in_float16,
    layers_of,
    own_variables_of,
)
from keras_lso.diagnostics import reports
from keras_lso.loss_scales import LossScale

# Scaling by powers of two is exact.
_DEFAULT_SCALES = tuple(2.0**i for i in range(0, 25, 2))
# Half of the smallest subnormal number: values up to it are rounded to zero.
FLUSHED_UP_TO = 2.0**-25
# Half a spacing below the smallest normal number: values from it on are rounded to
# that number, or are normal themselves.
_SUBNORMAL_BELOW = 2.0**-14 - 2.0**-25
# Half a spacing above the largest number: values from it on are rounded to inf.
OVERFLOWS_FROM = 65520.0
# The share of a layer's values that may be flushed to zero at a safe scale.
TOLERATED = 0.01
NOT_FINITE = (
    "The gradients contain inf or NaN in float32 already. First look for the source."
)


def underflow_report(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    scales: Sequence[float] | None = None,
) -> "UnderflowReport":
    """Counts the underflow and overflow of each layer's gradients in float16.

    The function computes the float32 gradients of one batch: those of each layer's
    weights, and those of its outputs, on which all previous layers depend. Frozen
    layers before the first trained layer are left out, and in a model that uses
    float16, layers that compute in another dtype. In float16, some of the nonzero
    values would become zero, subnormal (with fewer digits), or inf. The model runs in
    training mode, and its state is restored. Use the batch size of your training: a
    mean over more examples makes the gradients of each example smaller.

    Args:
        model: A compiled `keras.Model`, with any dtype policy.
        x: Inputs of one batch, or any other data that `fit` takes, such as a dataset.
            Only the first batch is used.
        y: Targets of one batch. Defaults to `None`: `x` yields them, or the model's
            loss needs none.
        sample_weight: Weights of the examples. Defaults to `None`.
        scales: The loss scales to report on. Defaults to `None`: every second power of
            two from 1 to `2**24`.

    Raises:
        ValueError: If the model is not compiled, if its loss needs targets and there
            are none, or if the value of an argument is not valid.

    Example:

    >>> import keras, keras_lso
    >>> layer = keras.layers.Dense(1, kernel_initializer="ones", name="d")
    >>> model = keras.Sequential([keras.Input((1,)), layer])
    >>> model.compile("sgd", loss="mse")
    >>> x = keras.ops.array([[2.0**-10]])
    >>> report = keras_lso.underflow_report(model, x, 0 * x, scales=[1, 1024])
    >>> report.layers["d"].subnormal  # 2**-19 of 2**-9, 2**-9
    [0.3333333333333333, 0.0]
    """
    if not isinstance(model, keras.Model) or not model.compiled:
        raise refusal("model", model, "be a keras.Model, compiled with a loss")
    scales = _DEFAULT_SCALES if scales is None else check_list("scales", scales, 1)
    scales = sorted({check_scale("scales", scale) for scale in scales})
    [batch] = reports.batches_of(model, x, y, sample_weight)
    needs_targets = model.loss is not None and not reports.computes_loss(model)
    if batch[1] is None and needs_targets:
        raise ValueError(
            "`y` must be the targets of the batch, which the loss of the model needs. "
            f"Received: y=None, and a model with loss={model.loss!r}"
        )
    paths = reports.LayerPaths(model)
    grads = gradients_of(paths, *batch)
    if layer_in_float16(model) is not None:
        layers = paths.layers
        grads = {p: g for p, g in grads.items() if layers[p].compute_dtype == "float16"}
    counts = {path: counts_of(arrays, scales) for path, arrays in grads.items()}
    return UnderflowReport(scales, counts)


def gradients_of(
    paths: reports.LayerPaths, x: Any, y: Any, sample_weight: Any
) -> dict[str, list[NDArray[Any]]]:
    """Returns the float32 gradients of each layer; the model stays unchanged."""
    model, layers = paths.model, layers_of(paths.model)
    weights = [(v, layer) for layer in layers for v in _own_weights(layer)]
    # The gradient of a float16 variable would be float16 itself.
    masters = [(v, copy_of(v, "float32")) for v, _ in weights if v.dtype == "float16"]
    master_of = {id(v): master for v, master in masters}
    variables = [master_of.get(id(v), v) for v, _ in weights]
    with reports.unchanged(model), reports.in_float32(model):
        called, grads = _gradients(model, variables, masters, x, y, sample_weight)
    trained = [layer for _, layer in weights]
    frozen = _called_before_any_is_trained(called, trained)
    owners = [*trained, *([None] * frozen), *called[frozen:]]
    arrays: dict = {layer: [] for layer in layers}
    for layer, grad in zip(owners, grads, strict=True):
        if layer is not None and grad is not None:
            arrays[layer].append(ops.convert_to_numpy(backend.to_dense(grad)))
    return {str(paths.path_of(v)): grads for v, grads in arrays.items() if grads}


def _own_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the weights of a layer, without its sublayers, that gradients step."""
    if not layer.trainable:
        return []
    own = own_variables_of(layer)
    return [v for v in own if v.trainable and not is_overwritten(v)]


def _gradients(
    model: keras.Model, variables: list, masters: list, x: Any, y: Any, weights: Any
) -> tuple[list[keras.Layer], list]:
    """Returns the calls of layers, and the gradients of variables and of the calls."""
    # An older `compute_loss` does not take `training`, and Keras leaves it out.
    takes_training = "training" in inspect.signature(model.compute_loss).parameters
    arguments: dict = {"training": True} if takes_training else {}
    called: list = []
    probes: list = []

    def probed(layer: keras.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
        def add_probe(value: Any) -> Any:
            if not reports.is_float_tensor(value):
                return value
            called.append((layer, value.shape))
            # A zero added to an output has the gradient of the output.
            zero = probes[len(called) - 1] if probes else 0.0
            return value + ops.cast(zero, value.dtype)

        return lambda *a, **kw: tree.map_structure(add_probe, call(*a, **kw))

    def loss() -> Any:
        called.clear()
        with _replaced(masters):
            arguments["y_pred"] = model(x, training=True)
            return model.compute_loss(x=x, y=y, sample_weight=weights, **arguments)

    leaves = [layer for layer in layers_of(model)[1:] if len(layers_of(layer)) == 1]
    with attributes_set((v, "call", probed(v, v.call)) for v in leaves):
        model(x, training=True)
        probes += [keras.Variable(np.zeros(shape, "float32")) for _, shape in called]
        _, grads = backend.host.compute_gradients(loss, [*variables, *probes])
    return [layer for layer, _ in called], grads


def _replaced(masters: list) -> contextlib.AbstractContextManager[Any]:
    """Returns a scope in which layers read float32 copies of float16 variables."""
    if not masters:
        return contextlib.nullcontext()
    scope = RecordingScope()
    for variable, master in masters:
        scope.add_update((variable, ops.add(master, 0.0)))
    return scope


def _called_before_any_is_trained(
    called: list[keras.Layer], trained: list[keras.Layer]
) -> int:
    """Returns the number of first calls whose outputs get no gradient in training."""
    if not all(layer in called for layer in trained):
        return 0  # A layer that contains others: the order of its calls is unknown.
    first = (i for i, layer in enumerate(called) if layer in trained)
    return next(first, len(called))


@dataclass
class GradientCounts:
    """The effect of float16 on the gradients of a layer, at each scale.

    Attributes:
        values: Int. The number of values that are not zero in float32.
        smallest: Float, the smallest magnitude. None without values, like the next two.
        median: Float, the median magnitude.
        largest: Float, the largest magnitude. Inf or NaN if a value is not finite.
        flushed: List of floats, the share that would be zero at each scale.
        subnormal: List of floats, the share that would be subnormal at each scale.
        overflowing: List of floats, the share that would be inf at each scale, or is
            not finite.
        lowest_safe_scale: Float. The lowest scale at which at most 1% are flushed.
        highest_safe_scale: Float. The highest scale at which no value overflows; 0 if
            a value is not finite.
    """

    values: int
    smallest: float | None
    median: float | None
    largest: float | None
    flushed: list[float]
    subnormal: list[float]
    overflowing: list[float]
    lowest_safe_scale: float
    highest_safe_scale: float


def all_finite(counts: Iterable[GradientCounts]) -> bool:
    """Whether all gradients are finite in float32."""
    return all(count.highest_safe_scale > 0 for count in counts)


def counts_of(arrays: Iterable[ArrayLike], scales: Sequence[float]) -> GradientCounts:
    """Returns the `GradientCounts` of a list of float32 arrays at a list of scales."""
    magnitudes = np.abs(np.concatenate([np.ravel(a) for a in arrays]), dtype="float64")
    # NumPy sorts NaN to the end, behind inf.
    values = np.sort(magnitudes[magnitudes != 0])
    count = len(values)
    if not count:
        zeros = [0.0] * len(scales)
        return GradientCounts(0, None, None, None, zeros, zeros, zeros, 0.0, np.inf)
    factors = np.asarray(scales, "float64")
    flushed = np.searchsorted(values, FLUSHED_UP_TO / factors, side="right")
    small = np.searchsorted(values, _SUBNORMAL_BELOW / factors, side="left")
    fitting = np.searchsorted(values, OVERFLOWS_FROM / factors, side="left")
    largest = float(values[-1])
    # The first value that must not be flushed.
    first = float(values[int(TOLERATED * count)])
    return GradientCounts(
        values=count,
        smallest=float(values[0]),
        median=float(values[count // 2]),
        largest=largest,
        flushed=(flushed / count).tolist(),
        subnormal=((small - flushed) / count).tolist(),
        overflowing=((count - fitting) / count).tolist(),
        lowest_safe_scale=FLUSHED_UP_TO / first if np.isfinite(first) else np.inf,
        highest_safe_scale=FLOAT16_MAX / largest if np.isfinite(largest) else 0.0,
    )


class UnderflowReport:
    """The result of `underflow_report`, to `print`.

    Attributes:
        scales: List of floats, ascending.
        layers: Dict of the layers' paths to `GradientCounts`.
        safe_scales: Tuple of the lowest and the highest scale at which no value
            overflows, and at most 1% of each layer's are flushed to zero. None if there
            is no such scale.
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
        bounds = low, high
        self.safe_scales: tuple[float, float] | None = bounds if low <= high else None
        exponent = math.floor(math.log2(high / 2)) if 0 < high < math.inf else 15
        scale = max(2.0**exponent, LossScale.min_scale)
        self.initial_scale: float = min(scale, LossScale.max_scale)

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as a dict, ready for JSON except for inf."""
        layers = {path: asdict(counts) for path, counts in self.layers.items()}
        return {**vars(self), "layers": layers}

    def __str__(self) -> str:
        at_one, at_best = self._index(1.0), self._index(self.initial_scale)
        best = f"at {reports.scale_text(self.scales[at_best])}"
        headings = [f"flushed\nat {reports.scale_text(self.scales[at_one])}"]
        headings += [f"{s}\n{best}" for s in ("flushed", "subnormal", "overflow")]
        rows = []
        for path, counts in self.layers.items():
            shares = counts.flushed, counts.subnormal, counts.overflowing
            cells = (
                "" if counts.median is None else f"{counts.median:.0e}",
                reports.share_text(counts.flushed[at_one]),
                *(reports.share_text(share[at_best]) for share in shares),
                _powers_between(counts.lowest_safe_scale, counts.highest_safe_scale),
            )
            rows.append((path, *cells))
        table = reports.table_of(("median", *headings, "safe scales"), rows)
        if not all_finite(self.layers.values()):
            return reports.text_of(table, NOT_FINITE)
        safe = "No scale is safe."
        if self.safe_scales:
            safe = f"Safe for all layers: {_powers_between(*self.safe_scales)}."
        best = f"Recommended initial_scale: {reports.scale_text(self.initial_scale)}."
        return reports.text_of(table, f"{safe} {best}")

    def _index(self, scale: float) -> int:
        """Returns the index of the nearest scale of the report, by their ratio."""
        factors = [max(other / scale, scale / other) for other in self.scales]
        return factors.index(min(factors))


def _powers_between(low: float, high: float) -> str:
    """Returns the range of the powers of two between two scales, as text."""
    if low == 0 and high == math.inf:
        return "any"
    if not 0 < low <= high < math.inf:
        return "none"
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    return f"2**{first} to 2**{last}" if first <= last else "none"
