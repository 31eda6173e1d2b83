"""`float16_report`: finds the layers of a model that do not fit into float16."""

import inspect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree
from numpy.typing import ArrayLike

from keras_lso._backend import backend
from keras_lso._backend.tensors import ModelT
from keras_lso._core.checks import check_bool, check_positive_int, check_scale
from keras_lso._keras_internals.layers import (
    BACKEND_OP_MODULES,
    FOREIGN,
    OP_MODULES,
    children_of,
    dtype_policies_set,
    is_cast,
    layers_before,
    operations_of,
)
from keras_lso._keras_internals.optimizers import attributes_set
from keras_lso._keras_internals.variables import layers_of, own_variables_of
from keras_lso.diagnostics import reports, underflow
from keras_lso.diagnostics.float32_layers import keep_in_float32
from keras_lso.diagnostics.reports import LayerPaths
from keras_lso.diagnostics.underflow import TOLERATED, GradientCounts

# Headroom, in powers of two, that training may well use up.
_CLOSE = 2.0
# Functions whose results have no values that their arguments do not have.
_MOVES = frozenset(
    """
    array broadcast_to cast cond concatenate convert_to_numpy convert_to_tensor copy
    diagonal expand_dims flip get_item moveaxis pad ravel repeat reshape scan shape
    slice slice_update split squeeze stack stop_gradient swapaxes switch take
    take_along_axis tile transpose unstack while_loop zeros zeros_like
    """.split()  # noqa: SIM905
)


def float16_report(
    model: keras.Model,
    x: Any,
    y: Any = None,
    loss_scale: float | None = None,
    *,
    sample_weight: Any = None,
    batches: int = 1,
    training: bool = True,
) -> "Float16Report":
    """Finds the layers of a model whose values do not fit into float16.

    The function calls the model on a batch in float32 and in float16. It compares the
    largest magnitudes in each layer with 65504, the largest float16 number, and counts
    the values that are flushed to zero, inf or NaN. If targets are given, it does so
    for the gradients too. The report explains which layers should stay in float32, or
    in bfloat16, which has the range of float32.

    In a model that uses float16, layers that compute in float32 stay in float32. A
    model without any float16 is examined as it would be under `"mixed_float16"`, except
    for a `TorchModuleWrapper` or `TFSMLayer`, whose weights no dtype policy casts. The
    model, its seeds and its statistics are left unchanged.

    Args:
        model: A `keras.Model`. If it is compiled, gradients are reported as well.
        x: Inputs of one batch, or any other data that `fit` takes, such as a dataset.
        y: Targets of one batch. Defaults to `None`: `x` yields them, or the model's
            loss needs none, or only the forward pass is examined.
        loss_scale: The loss scale at which to examine the gradients. Defaults to
            `None`: the scale that `underflow_report` would recommend for the layers
            that are left in float16.
        sample_weight: Weights of the examples. Defaults to `None`.
        batches: The number of batches to examine, if `x` yields several. Defaults to 1.
        training: Whether to call the model in training mode, with dropout and the
            statistics of the batch, as always for gradients. Defaults to `True`.

    Raises:
        ValueError: If a layer is quantized, if a layer that is in float16 does not
            compute in it, if `loss_scale` is given for a model without gradients, or if
            the value of an argument is not valid.
        TypeError: If `model` is not a `keras.Model`, or an argument has the wrong type.

    Example:

    >>> import keras, keras_lso
    >>> layers = [keras.layers.Dense(1, kernel_initializer="ones", name="sum")]
    >>> layers += [keras.layers.Dense(1, name="last")]
    >>> model = keras.Sequential([keras.Input((2,)), *layers])
    >>> report = keras_lso.float16_report(model, keras.ops.full((1, 2), 40000.0))
    >>> report.layers["sum"].ops["matmul"].largest
    80000.0
    >>> report.layers_to_keep  # 80000 is inf in float16, and the input of "last".
    ['sum', 'last']
    >>> model = report.apply(model)
    """
    reports.check_model(model)
    count = check_positive_int("batches", batches)
    training = check_bool("training", training)
    if loss_scale is not None:
        loss_scale = check_scale("loss_scale", loss_scale)
    data = reports.batches_of(model, x, y, sample_weight, count)
    paths = LayerPaths(model)
    policies = _in_float16(model)
    with dtype_policies_set(policies):
        dtypes = {path: layer.compute_dtype for path, layer in paths.layers.items()}
    wide = _watch(model, data, training, lambda: reports.in_float32(model))
    narrow = _watch(model, data, training, lambda: dtype_policies_set(policies))
    ranges = _ranges_of(paths, dtypes, wide, narrow)
    _explain(paths, ranges, wide)
    for path in ranges.keys() & paths.foreign() if policies else ():
        ranges[path].reasons = [reports.HAS_OWN_DTYPES]
    scales: tuple[float | None, float | None] = None, None
    # After the passes, in which layers may call `add_loss`.
    if _has_gradients(model, data[0][1], loss_scale):
        scales = _add_gradients(paths, ranges, data, loss_scale)
    keep = _layers_to_keep(paths, ranges)
    return Float16Report(ranges, keep, *scales, becomes_mixed=bool(policies))


def _has_gradients(model: keras.Model, y: Any, loss_scale: float | None) -> bool:
    """Whether a loss can be computed: from targets, or by the model itself."""
    has_loss = model.compiled and (
        reports.computes_loss(model)
        or (bool(model.losses) if model.loss is None else y is not None)
    )
    if loss_scale is not None and not has_loss:
        raise ValueError(
            "`loss_scale` is for the gradients, but there are none. Compile the model "
            f"with a loss, and pass the targets as `y`. Received: {loss_scale=}"
        )
    return has_loss


# --- Two passes ---------------------------------------------------------------------


def _in_float16(model: keras.Model) -> list[tuple[keras.Layer, str]]:
    """Returns the layers and their new dtype policies; none if float16 is in use."""
    layers = layers_of(model)
    if any(layer.compute_dtype == "float16" for layer in layers):
        return []
    wide = ("float32", "bfloat16")
    casts = [v for v in layers if not isinstance(v, FOREIGN)]
    return [(v, "mixed_float16") for v in casts if v.compute_dtype in wide]


def _add_gradients(
    paths: LayerPaths, ranges: "_Ranges", data: list, loss_scale: float | None
) -> tuple[float, float]:
    """Adds the gradients to the layers; returns the used and the recommended scale."""
    # Layers that stay in float32, or should stay in it, can bear any scale.
    wide = {p for path in _layers_to_keep(paths, ranges) for p in paths.inside(path)}
    wide |= {path for path, v in ranges.items() if v.compute_dtype != "float16"}
    arrays: dict = defaultdict(list)
    for batch in data:
        for path, grads in underflow.gradients_of(paths, *batch).items():
            if path in ranges and path not in wide:
                arrays[path] += grads
    at_any = {path: underflow.counts_of(grads, [1.0]) for path, grads in arrays.items()}
    recommended = underflow.UnderflowReport([1.0], at_any).initial_scale
    scale = recommended if loss_scale is None else loss_scale
    for path, grads in arrays.items():
        ranges[path].gradients = counts = underflow.counts_of(grads, [scale])
        ranges[path].reasons += _reasons_of_gradients(counts, scale, recommended)
    return scale, recommended


class _Reading(NamedTuple):
    """A computed tensor: its dtype, its largest magnitude, and sums over its values."""

    dtype: str
    largest: float
    not_finite: int
    # The finite values other than 0, and the flushed values: their number, and the sum
    # of their magnitudes.
    values: int
    flushed: int
    total: float
    lost: float


def _reading_of(array: ArrayLike, dtype: str) -> _Reading:
    """Returns the reading of an array that was computed in a dtype."""
    magnitudes = np.abs(np.ravel(array).astype("float64"))
    finite = magnitudes[np.isfinite(magnitudes)]
    values = finite[finite != 0]
    flushed = values[values <= underflow.FLUSHED_UP_TO]
    return _Reading(
        dtype=dtype,
        largest=float(values.max(initial=0.0)),
        not_finite=magnitudes.size - finite.size,
        values=values.size,
        flushed=flushed.size,
        total=float(values.sum()),
        lost=float(flushed.sum()),
    )


def _watch(
    model: keras.Model, data: list, training: bool, policies: Callable[[], Any]
) -> "_Watcher":
    """Returns the watcher of a pass over the batches in a scope of dtype policies."""
    watcher = _Watcher()
    with attributes_set(watcher.replacements(layers_of(model))):
        for x, *_ in data:
            with reports.unchanged(model), policies():
                model(x, training=training)
    return watcher


class _Watcher:
    """The readings of an eager pass, and the stack of the layers being called."""

    def __init__(self) -> None:
        # By the layer's id and the name of the values.
        self.readings: dict[tuple[int, str], list[_Reading]] = defaultdict(list)
        self.calls: Counter[int] = Counter()
        self._stack: list[int] = []
        # Whether an error has the name of the layer already, the innermost.
        self._has_failed = False
        # The number of ops on the stack.
        self._depth = 0

    def replacements(self, layers: Iterable[Any]) -> Iterator[tuple[Any, str, Any]]:
        """Yields the owner and the name of what to replace for a while, and by what."""
        for layer in layers:
            yield layer, "call", self._layer(layer, layer.call)
            for operation in operations_of(layer):
                yield operation, "call", self._op(_name_of(operation), operation.call)
            if isinstance(layer, keras.layers.RNN):
                # Step by step, where values can be read: a loop of JAX has none, and a
                # fused kernel calls no cell. On PyTorch, Keras does not unroll a loop
                # that goes backwards over a mask, and need not.
                yield layer, "unroll", backend.host.COMPILES_LOOPS or layer.unroll
                yield layer, "use_cudnn", False
        for module in (*OP_MODULES, *BACKEND_OP_MODULES):
            for name, op in vars(module).items():
                if inspect.isfunction(op) and name not in _MOVES:
                    # Other functions of ops call those of the backend.
                    is_inner = module in BACKEND_OP_MODULES
                    yield module, name, self._op(name, op, is_inner)

    def _read(self, name: str, values: Any) -> None:
        """Reads all floating-point tensors among some values."""
        stack = self._stack
        if stack:
            # No ops that the lines below call themselves.
            self._stack = []
            for value in tree.flatten(values):
                # A tracer of JAX has no values.
                if reports.is_float_tensor(value) and backend.host.has_values(value):
                    dtype = keras.backend.standardize_dtype(value.dtype)
                    reading = _reading_of(ops.convert_to_numpy(value), dtype)
                    self.readings[stack[-1], name].append(reading)
            self._stack = stack

    def _layer(self, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the layer's `call`, with its inputs, weights and outputs read."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.calls[id(layer)] += 1
            self._stack.append(id(layer))
            try:
                if self.calls[id(layer)] == 1:
                    # Inside the call, a variable is read in the layer's dtype.
                    weights = [v.value for v in own_variables_of(layer) if is_cast(v)]
                    self._read("weights", weights)
                self._read("inputs", (args, kwargs))
                outputs = call(*args, **kwargs)
                self._read("outputs", outputs)
            except Exception as error:
                if self._has_failed or layer.compute_dtype != "float16":
                    raise
                self._has_failed = True
                raise ValueError(
                    f"The layer {layer.name!r} does not compute in float16. Keep it in "
                    f"float32, by `dtype='float32'`. Its own error was: {error}"
                ) from error
            finally:
                self._stack.pop()
            return outputs

        return watched

    def _op(
        self, name: str, op: Callable[..., Any], is_inner: bool = False
    ) -> Callable[..., Any]:
        """Returns an op whose results are read, unless another op calls it as inner."""

        @wraps(op)
        def watched(*args: Any, **kwargs: Any) -> Any:
            is_read = not (is_inner and self._depth)
            self._depth += 1
            try:
                outputs = op(*args, **kwargs)
            finally:
                self._depth -= 1
            if is_read:
                self._read(name, outputs)
            return outputs

        return watched


def _name_of(operation: Any) -> str:
    """Returns the name of the `keras.ops` function that an op calls."""
    return type(operation).__name__.lower()


# --- The values of a layer ----------------------------------------------------------


@dataclass(frozen=True)
class Magnitudes:
    """Values of one kind: inputs, weights or outputs of a layer, or results of an op.

    Attributes:
        is_float16: Bool. Whether the values are in float16 when the model computes in
            float16.
        largest: Float. The largest magnitude in float32.
        largest_in_float16: Float. The same in float16; inf if a value is inf or NaN.
        not_finite: Int. The number of values that are inf or NaN in float32 already.
        not_finite_in_float16: Int. The number of values that are inf or NaN in float16.
        flushed: Float. The share of the nonzero values that float16 flushes to zero.
        lost: Float. The share of the sum of magnitudes that is flushed to zero. It is
            small if the values that matter are kept.
        headroom: Float. Powers of two between the largest value and the largest float16
            number. Below 0 the values overflow; inf if all are zero.
    """

    is_float16: bool = False
    largest: float = 0.0
    largest_in_float16: float = 0.0
    not_finite: int = 0
    not_finite_in_float16: int = 0
    flushed: float = 0.0
    lost: float = 0.0
    headroom: float = math.inf

    @property
    def overflows(self) -> bool:
        """Whether the largest value is inf in float16."""
        return self.largest >= underflow.OVERFLOWS_FROM


@dataclass
class LayerRange:
    """The values of a layer, in float32 and in float16.

    Attributes:
        compute_dtype: String, the dtype in which the model in float16 calls the layer.
        calls: Int. The number of calls of the layer, for all batches.
        inputs: `Magnitudes` of the inputs, as the layer casts them.
        weights: `Magnitudes` of the weights. None without weights.
        ops: Dict of the names of `keras.ops` functions to the `Magnitudes` of their
            results in the layer's `call`. Only functions that compute in float16.
        outputs: `Magnitudes` of the outputs.
        gradients: `GradientCounts` at the scale of the report. None without gradients,
            and for a layer that is in float32 or should be.
        reasons: List of strings, the reasons to keep the layer in float32.
        notes: List of strings, further remarks.
    """

    compute_dtype: str
    calls: int = 0
    inputs: Magnitudes | None = None
    weights: Magnitudes | None = None
    ops: dict[str, Magnitudes] = field(default_factory=dict)
    outputs: Magnitudes | None = None
    gradients: GradientCounts | None = None
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def parts(self) -> list[tuple[str, Magnitudes]]:
        """Returns a list of the names and `Magnitudes` of the values in float16."""
        named = {"inputs": self.inputs, "weights": self.weights, **self.ops}
        named["outputs"] = self.outputs
        return [(name, m) for name, m in named.items() if m and m.is_float16]

    @property
    def tightest(self) -> tuple[str, Magnitudes] | None:
        """Tuple of the name and `Magnitudes` of the part with the least headroom."""
        return min(self.parts(), key=lambda part: part[1].headroom, default=None)

    @property
    def headroom(self) -> float:
        """Float. The least headroom of the layer, in powers of two."""
        return self.tightest[1].headroom if self.tightest else math.inf


_Ranges = dict[str, LayerRange]


def _magnitudes(pairs: list[tuple[_Reading, _Reading]]) -> Magnitudes:
    """Returns the magnitudes of tensors that were read in float32 and in float16."""
    in_float16 = [pair for pair in pairs if pair[1].dtype == "float16"]
    # A float32 value of a layer in float16 can have any magnitude.
    wide, narrow = zip(*(in_float16 or pairs), strict=True)
    sums = np.sum([reading[2:] for reading in wide], axis=0).tolist()
    not_finite, values, flushed, total, lost = sums
    not_finite_in_float16 = sum(reading.not_finite for reading in narrow)
    largest = max(reading.largest for reading in wide)
    largest_in_float16 = max(reading.largest for reading in narrow)
    return Magnitudes(
        is_float16=bool(in_float16),
        largest=largest,
        largest_in_float16=math.inf if not_finite_in_float16 else largest_in_float16,
        not_finite=int(not_finite),
        not_finite_in_float16=not_finite_in_float16,
        flushed=flushed / values if values else 0.0,
        lost=lost / total if total else 0.0,
        headroom=math.log2(underflow.FLOAT16_MAX / largest) if largest else math.inf,
    )


def _ranges_of(
    paths: LayerPaths, dtypes: dict[str, str], wide: _Watcher, narrow: _Watcher
) -> _Ranges:
    """Returns the `LayerRange`s of the layers that were called, by path."""
    magnitudes: dict = defaultdict(dict)
    for (layer, name), readings in wide.readings.items():
        pairs = list(zip(readings, narrow.readings[layer, name], strict=False))
        if pairs:
            magnitudes[layer][name] = _magnitudes(pairs)
    ranges = {}
    for path, layer in paths.layers.items():
        values = magnitudes[id(layer)]
        named = {k: values.get(k) for k in ("inputs", "weights", "outputs")}
        of_ops = {k: m for k, m in values.items() if k not in named and m.is_float16}
        layer_range = LayerRange(
            dtypes[path], wide.calls[id(layer)], ops=of_ops, **named
        )
        if values and not _only_passes_on(layer, layer_range, wide.readings):
            ranges[path] = layer_range
    return ranges


def _only_passes_on(layer: Any, layer_range: LayerRange, readings: dict) -> bool:
    """Whether a layer consists of other layers, and has no values of its own."""
    inside, inputs = children_of(layer), layer_range.inputs
    if not inside or layer_range.ops or own_variables_of(layer):
        return False
    if inputs and inputs.is_float16 and inputs.overflows:
        return False
    outputs, *others = (set(readings[id(v), "outputs"]) for v in (layer, *inside))
    return outputs <= set().union(*others)


# --- In words -----------------------------------------------------------------------


def _explain(paths: LayerPaths, ranges: _Ranges, wide: _Watcher) -> None:
    """Writes the reasons and notes of each layer that follow from the forward pass."""
    given = wide.readings[id(paths.model), "inputs"]
    peak = max((reading.largest for reading in given), default=0.0)
    for layer_range in ranges.values():
        layer_range.reasons = list(_reasons(layer_range, peak))
        layer_range.notes = _notes(layer_range)
    # The innermost layers that turn numbers in range into inf or NaN.
    for path, layer_range in reversed(ranges.items()):
        before = layer_range.inputs or Magnitudes()
        after = layer_range.outputs or Magnitudes()
        is_broken = after.not_finite_in_float16 and not after.not_finite
        inside = [ranges[p].reasons for p in paths.inside(path) if p in ranges]
        if is_broken and not before.not_finite_in_float16 and not any(inside):
            reason = "finite inputs, but outputs that are inf or NaN: digits are lost"
            layer_range.reasons = [reason]


def _reasons(layer_range: LayerRange, peak_of_data: float) -> Iterator[str]:
    """Yields the reasons to keep a layer in float32, but for a loss of digits."""
    parts = layer_range.parts()
    large = [f"{name} {m.largest:.2g}" for name, m in parts if m.overflows]
    # Layers may use other constants in float16, as Keras's attention does for its
    # masks: everything then stays finite.
    if large and any(m.not_finite_in_float16 for _, m in parts):
        given = dict(parts).get("inputs")
        if given and given.overflows and given.largest == peak_of_data:
            yield (
                f"the model's own inputs hold {peak_of_data:.2g}, above 65504. First "
                "look at the data, or scale them"
            )
        yield f"overflow, above 65504: {', '.join(large)}"
    small = [(n, m) for n, m in parts if m.lost > TOLERATED and n != "inputs"]
    if small:
        shares = ", ".join(f"{m.lost:.0%} of its {name}" for name, m in small)
        yield f"flushed to zero, by magnitude: {shares}"


def _notes(layer_range: LayerRange) -> list[str]:
    """Returns remarks on a layer that need not stay in float32."""
    parts = layer_range.inputs, layer_range.outputs
    if any(m.not_finite for m in parts if m):
        return ["inf or NaN in float32 as well: float16 is not to blame"]
    tightest = layer_range.tightest
    if layer_range.reasons or tightest is None or tightest[1].headroom >= _CLOSE:
        return []
    name, magnitudes = tightest
    if magnitudes.overflows:
        there = f"{magnitudes.largest_in_float16:.2g} in float16"
        return [f"{name} {magnitudes.largest:.2g} in float32, but {there}"]
    return [f"{name} {magnitudes.largest:.2g}: close to 65504"]


def _reasons_of_gradients(
    counts: GradientCounts, scale: float, recommended: float
) -> Iterator[str]:
    """Yields the reason to keep a layer in float32 for its gradients, if any."""
    at = f"at the loss scale {scale:g}"
    if counts.overflowing[0] and math.isfinite(counts.largest or 0):
        yield f"{counts.overflowing[0]:.1%} of its gradients overflow {at}"
    elif counts.flushed[0] > TOLERATED and counts.lowest_safe_scale > recommended:
        yield f"{counts.flushed[0]:.1%} of its gradients are flushed to zero {at}"


# --- Layers to keep -----------------------------------------------------------------


def _layers_to_keep(paths: LayerPaths, ranges: _Ranges) -> list[str]:
    """Returns the paths of the layers to keep in float32, none inside another."""
    to_keep: set[str] = set()
    for path, layer_range in ranges.items():
        if layer_range.reasons:
            to_keep.update(_to_keep(paths, path, layer_range))
    return paths.outermost(to_keep)


def _to_keep(paths: LayerPaths, path: str, layer_range: LayerRange) -> list[str]:
    """Returns the paths of the layers to keep, so that a layer's values fit."""
    layers = [paths.layers[path]]
    if operations := operations_of(layers[0]):
        # Ops between layers compute in the widest dtype of their inputs.
        too_large = {name for name, m in layer_range.parts() if m.overflows}
        culprits = [o for o in operations if _name_of(o) in too_large]
        layers = [layer for o in culprits for layer in layers_before(o)]
    # Neither an `InputLayer`, which computes nothing, nor the model itself: inputs that
    # do not fit have to be scaled.
    computing = [v for v in layers if not isinstance(v, keras.layers.InputLayer)]
    inside = [p for p in map(paths.path_of, computing) if p in paths.parents]
    return [_made_by_keras(paths, p) for p in inside]


def _made_by_keras(paths: LayerPaths, path: str) -> str:
    """Returns the path of the Keras layer that made this one, which has its dtype."""
    parent = paths.parents[path]
    layer = paths.layers[parent]
    is_keras = type(layer).__module__.startswith("keras.")
    if is_keras and not isinstance(layer, keras.Model):
        return _made_by_keras(paths, parent)
    return path


# --- The report ---------------------------------------------------------------------


@dataclass
class Float16Report:
    """The result of `float16_report`. `print` it, or `apply` it to a model.

    In the table that it prints, `peak` is the largest magnitude of what is closest to
    65504 in the layer (`where`), and `headroom` the factor by which it could grow.

    Attributes:
        layers: Dict of the layers' paths to `LayerRange`. For paths see
            `keras_lso.keep_in_float32`.
        layers_to_keep: List of the paths of layers to keep in float32. The layers
            inside them stay in float32 as well.
        loss_scale: Float. The loss scale at which the gradients are counted. None
            without gradients.
        recommended_scale: Float. The `initial_scale` that `underflow_report` would
            recommend for the layers that are left in float16. None without gradients.
        becomes_mixed: Bool. Whether `apply` gives `"mixed_float16"` to the other
            layers: the model has no layer in float16.
    """

    layers: dict[str, LayerRange]
    layers_to_keep: list[str]
    loss_scale: float | None
    recommended_scale: float | None
    becomes_mixed: bool

    def apply(self, model: ModelT) -> ModelT:
        """Returns a new model by `keras_lso.keep_in_float32`, with `layers_to_keep`.

        Args:
            model: A `keras.Model` with the layers of the model in the report.
        """
        return keep_in_float32(
            model, self.layers_to_keep, "mixed_float16" if self.becomes_mixed else None
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as a dict, ready for JSON except for inf."""
        return asdict(self)

    def __str__(self) -> str:
        headings = ["peak", "where", "headroom", "flushed\nto 0", "inf,\nNaN"]
        if self.loss_scale is not None:
            at = f"at {reports.scale_text(self.loss_scale)}"
            headings += [f"gradients\nflushed\n{at}", f"\noverflow\n{at}"]
        rows = []
        for path, layer_range in self.layers.items():
            counts = layer_range.gradients
            shares = (counts.flushed[0], counts.overflowing[0]) if counts else (0, 0)
            texts = map(reports.share_text, shares if self.loss_scale else ())
            rows.append((path, *_cells(layer_range), *texts))
        return reports.text_of(reports.table_of(headings, rows), *words_of(self))


def _cells(layer_range: LayerRange) -> tuple[str, ...]:
    """Returns the row of a layer: its part with the least headroom."""
    if layer_range.tightest is None:
        largest = layer_range.outputs.largest if layer_range.outputs else 0.0
        return f"{largest:.2g}", layer_range.compute_dtype, "", "", ""
    name, tightest = layer_range.tightest
    parts = [magnitudes for _, magnitudes in layer_range.parts()]
    not_finite = sum(m.not_finite_in_float16 for m in parts)
    return (
        f"{tightest.largest:.2g}",
        name,
        # Up to the largest float16 number, as a factor.
        "" if tightest.headroom == math.inf else f"{2**tightest.headroom:.2g}x",
        reports.share_text(max(m.flushed for m in parts)),
        f"{not_finite:,}" if not_finite else "",
    )


def words_of(report: Float16Report) -> Iterator[str]:
    """Yields the conclusions of a report as sentences."""
    for path, layer_range in report.layers.items():
        for line in (*layer_range.reasons, *layer_range.notes):
            yield f"{path}: {line}."
    ranges = report.layers.values()
    if report.layers_to_keep:
        is_fixed = any(reports.HAS_OWN_DTYPES in r.reasons for r in ranges)
        dtypes = "float32" if is_fixed else "float32, or in bfloat16"
        yield f"Keep in {dtypes}: {', '.join(report.layers_to_keep)}."
    elif any(r.reasons for r in ranges):
        yield (
            "No layer can be kept in float32 instead. Scale the inputs of the model, "
            "and move computations from outside its layers into a layer."
        )
    elif any(m.not_finite for r in ranges for _, m in r.parts()):
        yield "Nothing fails only in float16. First look for the source of inf or NaN."
    else:
        yield "Every layer fits into float16."
    if not underflow.all_finite(r.gradients for r in ranges if r.gradients):
        yield underflow.NOT_FINITE
    elif report.recommended_scale is not None:
        scale = reports.scale_text(report.recommended_scale)
        yield f"Recommended initial_scale: {scale}."
