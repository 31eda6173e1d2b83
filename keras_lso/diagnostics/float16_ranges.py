"""The effects of float16 on each layer of a model, and advice in words.

This module sees only the readings; `float16.py` runs the model.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_lso._keras_internals.layers import (
    children_of,
    layers_before,
    operations_of,
    own_variables_of,
)
from keras_lso.diagnostics.layer_paths import LayerPaths
from keras_lso.diagnostics.magnitudes import Magnitudes
from keras_lso.diagnostics.underflow_counts import (
    OVERFLOWS_FROM,
    TOLERATED,
    GradientCounts,
)

# Headroom, in powers of two, that training may well use up.
CLOSE = 2.0


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
        named = [("inputs", self.inputs), ("weights", self.weights), *self.ops.items()]
        named.append(("outputs", self.outputs))
        return [(name, m) for name, m in named if m is not None and m.is_float16]

    @property
    def tightest(self) -> tuple[str, Magnitudes] | None:
        """Tuple of the name and `Magnitudes` of the part with the least headroom."""
        return min(self.parts(), key=lambda part: part[1].headroom, default=None)

    @property
    def headroom(self) -> float:
        """Float. The least headroom of the layer, in powers of two."""
        return self.tightest[1].headroom if self.tightest else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as a dict."""
        numbers = {
            name: getattr(self, name) and getattr(self, name).to_dict()
            for name in ("inputs", "weights", "outputs", "gradients")
        }
        ops = {name: magnitudes.to_dict() for name, magnitudes in self.ops.items()}
        kept = ("compute_dtype", "calls", "reasons", "notes")
        return {**{name: getattr(self, name) for name in kept}, **numbers, "ops": ops}


# --- From readings ------------------------------------------------------------------


def ranges_of(
    paths: LayerPaths, batches: Any, compute_dtypes: dict[int, str]
) -> dict[str, LayerRange]:
    """Returns the `LayerRange`s of the layers that were called, by path.

    Args:
        paths: `LayerPaths` of the model.
        batches: List of tuples of the results of `layer_watch.readings_of`, in float32
            and in float16.
        compute_dtypes: Dict of ids of layers to the dtype in which the model in float16
            calls them.
    """
    found: dict = defaultdict(dict)
    calls: Counter = Counter()
    outputs = defaultdict(set)
    for number, ((wide, called), (narrow, _)) in enumerate(batches):
        calls.update(called)
        for key, reading in wide.items():
            layer, kind, name, _ = key
            if kind == "outputs":
                outputs[layer].add(reading)
            # Weights are the same for each batch.
            if key in narrow and not (kind == "weights" and number):
                part = found[layer].setdefault((kind, name), Magnitudes())
                part.add(reading, narrow[key])
    ranges = {}
    for path, layer in paths.layers.items():
        if found[id(layer)]:
            parts = found[id(layer)]
            ranges[path] = LayerRange(
                compute_dtype=compute_dtypes[id(layer)],
                calls=calls[id(layer)],
                inputs=parts.get(("inputs", "")),
                weights=parts.get(("weights", "")),
                ops={
                    name: magnitudes
                    for (kind, name), magnitudes in parts.items()
                    if kind == "ops" and magnitudes.is_float16
                },
                outputs=parts.get(("outputs", "")),
            )
            if _only_passes_on(layer, ranges[path], outputs):
                del ranges[path]
    return ranges


def _only_passes_on(layer, found, outputs):
    """Whether a layer consists of other layers, and has no values of its own."""
    inside = children_of(layer)
    if not inside or found.ops or own_variables_of(layer):
        return False
    if found.inputs and found.inputs.is_float16 and _overflows(found.inputs):
        return False
    return outputs[id(layer)] <= set().union(*(outputs[id(i)] for i in inside))


# --- In words -----------------------------------------------------------------------


def explain(paths: LayerPaths, ranges: dict[str, LayerRange]) -> None:
    """Writes the reasons and notes of each layer that follow from the forward pass.

    Args:
        paths: `LayerPaths` of the model.
        ranges: Dict of paths to `LayerRange`.
    """
    for found in ranges.values():
        found.reasons = [*_overflow(found), *_flush(found)]
        found.notes = _notes(found)
    # The innermost layers that turn numbers in range into inf or NaN.
    for path, found in reversed(ranges.items()):
        inside = [p for p in paths.inside(path) if p != path and p in ranges]
        if not any(ranges[p].reasons for p in inside):
            found.reasons += [] if found.reasons else _breakdown(found)


def explain_gradients(found: LayerRange, scale: float, recommended: float) -> None:
    """Writes the reasons that follow from the gradients of a layer.

    Args:
        found: `LayerRange`.
        scale: The loss scale of the gradients' counts.
        recommended: The best loss scale for the layers.
    """
    counts: Any = found.gradients  # They have just been counted.
    at = f"at the loss scale {scale:g}"
    if counts.overflowing[0] and math.isfinite(counts.largest):
        share, what = counts.overflowing[0], "overflow"
    elif counts.flushed[0] > TOLERATED and counts.lowest_safe_scale > recommended:
        share, what = counts.flushed[0], "are flushed to zero"
    else:
        return
    found.reasons.append(f"{share:.1%} of its gradients {what} {at}")


def _overflows(magnitudes):
    return magnitudes.largest >= OVERFLOWS_FROM


def _overflow(found):
    if _bears_it(found):
        return []
    too_large = [
        f"{name} {magnitudes.largest:.2g}"
        for name, magnitudes in found.parts()
        if _overflows(magnitudes)
    ]
    if not too_large:
        return []
    return [f"overflow, above 65504: {', '.join(too_large)}"]


def _bears_it(found):
    """Whether numbers that only float32 can hold stay finite in float16.

    Layers may use other constants in float16, as Keras's attention does for its masks.
    """
    return not any(m.not_finite_in_float16 for _, m in found.parts())


def _flush(found):
    lost = [
        f"{magnitudes.lost:.0%} of its {name}"
        for name, magnitudes in found.parts()
        if magnitudes.lost > TOLERATED and name != "inputs"
    ]
    return [f"flushed to zero, by magnitude: {', '.join(lost)}"] if lost else []


def _notes(found):
    if any(m.not_finite for m in (found.inputs, found.outputs) if m):
        return ["inf or NaN in float32 as well: float16 is not to blame"]
    if found.reasons or found.headroom >= CLOSE:
        return []
    name, magnitudes = found.tightest
    if _overflows(magnitudes):
        there = f"{magnitudes.largest_in_float16:.2g} in float16"
        return [f"{name} {magnitudes.largest:.2g} in float32, but {there}"]
    return [f"{name} {magnitudes.largest:.2g}: close to 65504"]


def _breakdown(found):
    before, after = found.inputs, found.outputs
    if after is None or after.not_finite or not after.not_finite_in_float16:
        return []
    if before is not None and before.not_finite_in_float16:
        return []
    return ["finite inputs, but outputs that are inf or NaN: digits are lost"]


# --- Layers to keep -----------------------------------------------------------------


def layers_to_keep(paths: LayerPaths, ranges: dict[str, LayerRange]) -> list[str]:
    """Returns the paths of the layers to keep in float32, none inside another.

    The model itself is never one of them: inputs that do not fit have to be scaled.
    """
    wanted = []
    for path, found in ranges.items():
        if found.reasons:
            wanted += _to_keep(paths, path, found)
    # In the model's order, however they were found.
    wanted = [path for path in paths.layers if path in set(wanted)]
    inside = {p for path in wanted for p in paths.inside(path) if p != path}
    return [path for path in wanted if path not in inside]


def _to_keep(paths, path, found):
    layer = paths.layers[path]
    between = operations_of(layer)
    if between:
        # Ops between layers compute in the widest dtype of their inputs.
        too_large = {name for name, m in found.parts() if _overflows(m)}
        culprits = [o for o in between if type(o).__name__.lower() in too_large]
        before = [b for o in culprits for b in layers_before(o)]
        # An `InputLayer` computes nothing.
        computing = [b for b in before if not isinstance(b, keras.layers.InputLayer)]
        return [_outermost(paths, paths.path_of(b)) for b in computing]
    return [] if path not in paths.parents else [_outermost(paths, path)]


def _outermost(paths, path):
    """Returns the path of the Keras layer that created this layer, if there is one.

    That layer has a single dtype policy in its config, and casts the inputs of this
    layer.
    """
    while (parent := paths.parents[path]) in paths.parents:
        layer = paths.layers[parent]
        is_keras = type(layer).__module__.startswith("keras.")
        if isinstance(layer, keras.Model) or not is_keras:
            break
        path = parent
    return path
