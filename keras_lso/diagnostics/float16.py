"""`float16_report`: finds the layers of a model that do not fit into float16.

`layer_watch.py` observes a pass, `float16_ranges.py` draws the conclusions, and
`float16_table.py` writes the table.
"""

import os
from typing import TYPE_CHECKING, Any, Literal

import keras

from keras_lso._backend.types import ModelT
from keras_lso._core.checks import check_bool, check_positive_int, check_scale
from keras_lso._keras_internals.layers import dtype_policies_set
from keras_lso._keras_internals.variables import layers_of
from keras_lso.diagnostics.float16_ranges import (
    LayerRange,
    explain,
    explain_gradients,
    layers_to_keep,
    ranges_of,
)
from keras_lso.diagnostics.float32_layers import check_not_quantized, keep_in_float32
from keras_lso.diagnostics.layer_paths import LayerPaths
from keras_lso.diagnostics.layer_watch import readings_of
from keras_lso.diagnostics.trial_runs import batches_of, build, in_float32, unchanged
from keras_lso.diagnostics.underflow import UnderflowReport, gradients_of
from keras_lso.diagnostics.underflow_counts import counts_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

    The function calls the model on a batch twice, with the same weights and seeds: in
    float32, and in float16. For each layer it compares the largest magnitudes of the
    inputs, the weights, the outputs, and the intermediate results of `keras.ops`
    functions with 65504, the largest float16 number. It also counts the values that
    would be flushed to zero, and the values that are inf or NaN. If targets are given,
    it does the same for the gradients at the loss scale. The report explains which
    layers should stay in float32, or in bfloat16, which has the range of float32.

    ```python
    report = keras_lso.float16_report(model, x_batch, y_batch)
    print(report)
    model = report.apply(model)
    ```

    In a model that uses float16, layers that compute in float32 stay in float32. A
    model in float32 or bfloat16, without any float16, is examined as it would be under
    `"mixed_float16"`. The model may have nested layers, layers that are called twice,
    and several inputs and outputs. The model, its seeds and its statistics are left
    unchanged. Intermediate results of a fused kernel, such as the logits in
    `keras.ops.dot_product_attention`, or of a layer that computes without `keras.ops`,
    cannot be observed; only their inputs and outputs can.

    Args:
        model: A `keras.Model`. If it is compiled, gradients are reported as well.
        x: Inputs of one batch, or any other data that `fit` takes: a `tf.data.Dataset`,
            a `keras.utils.PyDataset`, a `torch.utils.data.DataLoader`, or a generator
            of batches.
        y: Targets of one batch. Defaults to `None`: `x` yields the targets, or the
            model's loss needs none, or only the forward pass is examined.
        loss_scale: The loss scale at which to examine the gradients. Defaults to
            `None`: the scale that `underflow_report` would recommend for the layers
            that are left in float16.
        sample_weight: Weights of the examples. Defaults to `None`: 1, or the weights
            that `x` yields.
        batches: The number of batches to examine, if `x` yields several. Defaults to 1.
        training: Whether to call the model in training mode, in which dropout makes
            values larger and `BatchNormalization` uses the statistics of the batch.
            Gradients are always computed in training mode. Defaults to `True`.

    Returns:
        A `Float16Report`.

    Raises:
        ValueError: If a layer is quantized, if `loss_scale` is given for a model that
            has no gradients, or if the value of an argument is not valid.
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
    """
    _check_model(model)
    count, training = (
        check_positive_int("batches", batches),
        check_bool("training", training),
    )
    if loss_scale is not None:
        loss_scale = check_scale("loss_scale", loss_scale)
    data = batches_of(x, y, sample_weight, count)
    build(model, data[0][0])
    paths = LayerPaths(model)
    narrow = _in_float16(model)
    with dtype_policies_set(narrow):
        compute_dtypes = {id(v): v.compute_dtype for v in paths.layers.values()}
    readings = [_readings(model, narrow, paths, batch[0], training) for batch in data]
    ranges = ranges_of(paths, readings, compute_dtypes)
    explain(paths, ranges)
    scales = None, None
    # After the passes, in which layers may call `add_loss`.
    if _has_gradients(model, data[0][1], loss_scale):
        scales = _add_gradients(model, paths, ranges, data, loss_scale)
    keep = layers_to_keep(paths, ranges)
    return Float16Report(ranges, keep, *scales, becomes_mixed=bool(narrow))


def _check_model(model):
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a keras.Model. "
            f"Received: model={model!r} of type {type(model).__name__}"
        )
    check_not_quantized(model)


def _has_gradients(model, y, loss_scale):
    """Whether a loss can be computed: from targets, or by the model itself."""
    if model.compiled and model.loss is not None:
        has_loss = y is not None
    else:
        computes = type(model).compute_loss is not keras.Model.compute_loss
        has_loss = model.compiled and (computes or bool(model.losses))
    if loss_scale is not None and not has_loss:
        raise ValueError(
            "`loss_scale` is for the gradients, but there are none. Compile the model "
            "with a loss, and pass the targets as `y`, or leave `loss_scale` out. "
            f"Received: loss_scale={loss_scale}, compiled={model.compiled}"
        )
    return has_loss


# --- Two passes ---------------------------------------------------------------------


def _in_float16(model):
    """Returns pairs of a layer and its new dtype policy; none if float16 is in use."""
    dtypes = {layer.compute_dtype for layer in layers_of(model)}
    if "float16" in dtypes:
        return []
    return [
        (layer, "mixed_float16")
        for layer in layers_of(model)
        if layer.compute_dtype in ("float32", "bfloat16")
    ]


def _readings(model, narrow, paths, x, training):
    """Returns the readings of a batch in float32 and in float16."""
    layers = list(paths.layers.values())
    found = []
    for policies in (in_float32(model), dtype_policies_set(narrow)):
        # `unchanged` is outside, since inside the scope Keras 3.12 restores no float16
        # weights.
        with unchanged(model), policies:
            found.append(readings_of(layers, lambda: model(x, training=training)))
    return tuple(found)


def _add_gradients(model, paths, ranges, data, loss_scale):
    """Adds the gradients to the layers; returns the used and the recommended scale.

    Layers that stay in float32, or should stay in it, can bear any scale.
    """
    kept = {p for path in layers_to_keep(paths, ranges) for p in paths.inside(path)}
    arrays: dict = {}
    for batch in data:
        for layer, grads in gradients_of(model, *batch):
            path = paths.path_of(layer)
            is_narrow = path in ranges and ranges[path].compute_dtype == "float16"
            if grads and is_narrow and path not in kept:
                arrays.setdefault(path, []).extend(grads)
    at_any = {path: counts_of(grads, [1.0]) for path, grads in arrays.items()}
    recommended = UnderflowReport([1.0], at_any).initial_scale
    scale = recommended if loss_scale is None else loss_scale
    for path, grads in arrays.items():
        ranges[path].gradients = counts_of(grads, [scale])
        explain_gradients(ranges[path], scale, recommended)
    return scale, recommended


# --- The report ---------------------------------------------------------------------


class Float16Report:
    """The result of `float16_report`. `print` it, `plot` it, or `apply` it to a model.

    A path consists of the names of the enclosing layers and the layer's own name,
    separated by slashes, such as `"encoder/dense"`.

    Attributes:
        layers: Dict of the layers' paths to `LayerRange`.
        layers_to_keep: List of the paths of layers to keep in float32. The layers
            inside them stay in float32 as well.
        loss_scale: Float. The loss scale at which the gradients are counted. None
            without gradients.
        recommended_scale: Float. The `initial_scale` that `underflow_report` would
            recommend for the layers that are left in float16. None without gradients.
    """

    def __init__(
        self,
        layers: dict[str, LayerRange],
        layers_to_keep: list[str],
        loss_scale: float | None,
        recommended_scale: float | None,
        becomes_mixed: bool,
    ) -> None:
        self.layers = layers
        self.layers_to_keep = layers_to_keep
        self.loss_scale = loss_scale
        self.recommended_scale = recommended_scale
        self._becomes_mixed = becomes_mixed

    def apply(self, model: ModelT) -> ModelT:
        """Returns a model that keeps the `layers_to_keep` in float32.

        The other layers of a model in float32 or bfloat16 get `"mixed_float16"`.

        Args:
            model: A `keras.Model` with the layers of the model in the report.

        Returns:
            A new model with the same weights: see `keras_lso.keep_in_float32`.

        Raises:
            ValueError: If the model lacks a layer of the report, or for the reasons
                listed in `keras_lso.keep_in_float32`.
        """
        others: Literal["mixed_float16"] | None = (
            "mixed_float16" if self._becomes_mixed else None
        )
        return keep_in_float32(model, self.layers_to_keep, others=others)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as numbers and words, ready for JSON.

        Returns:
            Dict of `layers` (the path of each to the attributes of its `LayerRange`),
            `layers_to_keep`, `loss_scale` and `recommended_scale`.
        """
        return {
            "layers": {path: found.to_dict() for path, found in self.layers.items()},
            "layers_to_keep": self.layers_to_keep,
            "loss_scale": self.loss_scale,
            "recommended_scale": self.recommended_scale,
        }

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draws the largest magnitudes of each layer against the range of float16.

        Args:
            path: The file to save the picture to. Defaults to `None`: the figure is
                only returned.

        Returns:
            A `matplotlib` figure.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from keras_lso import plotting

        figure = plotting.plot_float16(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def __str__(self) -> str:
        from keras_lso.diagnostics.float16_table import table_of

        return table_of(self)
