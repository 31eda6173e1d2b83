"""`recommend`: the dtype policy, layers in float32 and loss scale for some hardware.

`hardware.py` has the dtype policy for each kind of hardware. `training_bytes.py` counts
the bytes, `recommended_optimizers.py` wraps the optimizer, and `recommendation_file.py`
reads and checks the file of a recommendation.
"""

import difflib
import json
import os
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import keras

from keras_lso._keras_internals.layers import dtype_policies_set
from keras_lso._keras_internals.variables import copy_of
from keras_lso.diagnostics import recommendation_file, recommendation_reasons
from keras_lso.diagnostics.float16 import Float16Report, float16_report
from keras_lso.diagnostics.float32_layers import (
    check_copied,
    check_not_quantized,
    copied,
)
from keras_lso.diagnostics.hardware import check_hardware, hardware_of, policy_for
from keras_lso.diagnostics.layer_paths import LayerPaths
from keras_lso.diagnostics.model_copies import made_again
from keras_lso.diagnostics.recommended_optimizers import wrapped_like
from keras_lso.diagnostics.recommended_policies import (
    WIDE_WEIGHTS,
    in_float32_already,
    masters_of,
    outermost,
    policies_of,
    weights_of_16_bits,
)
from keras_lso.diagnostics.training_bytes import (
    TrainingBytes,
    owners_of,
    weight_dtype,
)
from keras_lso.diagnostics.trial_runs import batches_of, build
from keras_lso.loss_scales import DEFAULT_INITIAL_SCALE


def recommend(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    hardware: str = "auto",
) -> "Recommendation":
    """Recommends a dtype policy for a model and the hardware that is to train it.

    | hardware | dtype policy | optimizer |
    | --- | --- | --- |
    | CPU, older GPU | `"float32"` | unchanged |
    | GPU of compute capability 7.0 or 7.5 | `"mixed_float16"` | `LossScaleOptimizer` |
    | GPU from 8.0 on, TPU | `"mixed_bfloat16"` | `GuardedOptimizer` |

    For float16, the function examines the model as `float16_report` does, to find the
    layers that have to stay in float32 and a loss scale at which no gradient overflows.
    A model whose own weights are in bfloat16 or float16 keeps these weights, and its
    optimizer keeps master weights.

    ```python
    found = keras_lso.recommend(model, x_batch, y_batch, hardware="gpu:7.5")
    print(found)
    model = found.apply(model)
    ```

    The function runs the model on the batch, and leaves the model unchanged. It builds
    the recommended optimizer once to count its variables, which takes their memory for
    a moment.

    Args:
        model: A `keras.Model`. If it is compiled, the function examines its gradients,
            and counts the variables of its optimizer.
        x: Inputs of one batch, or any other data that `fit` takes. Only the first batch
            is used.
        y: Targets of one batch. Defaults to `None`: `x` yields the targets, or the
            model's loss needs none, or only the forward pass is examined.
        sample_weight: Weights of the examples. Defaults to `None`: 1, or the weights
            that `x` yields.
        hardware: String, the hardware that is to train the model: `"cpu"`, `"tpu"`, or
            `"gpu:7.5"` with the compute capability of the GPU. Defaults to `"auto"`:
            the hardware that the model is on. If bfloat16 has too few digits for your
            model, write `"gpu:7.5"` for a newer GPU too: it recommends float16.

    Returns:
        A `keras_lso.diagnostics.Recommendation`.

    Raises:
        TypeError: If `model` is not a `keras.Model`.
        ValueError: If `hardware` is not valid, if it is `"auto"` and the fast dtypes of
            the model's hardware are unknown, if a layer is quantized, or if another
            argument is not valid.

    Example:

    >>> import keras, keras_lso
    >>> layers = [keras.layers.Dense(4, name="hidden"), keras.layers.Dense(1)]
    >>> model = keras.Sequential([keras.Input((2,)), *layers])
    >>> model.compile("sgd", loss="mse")
    >>> x = keras.ops.ones((8, 2))
    >>> found = keras_lso.recommend(model, x, x[:, :1], hardware="gpu:8.0")
    >>> found.dtype_policy, found.optimizer, found.layers_in_float32
    ('mixed_bfloat16', 'GuardedOptimizer', [])
    >>> found.bytes_now["outputs"], found.bytes["outputs"]
    (160, 80)
    """
    _check_model(model)
    hardware = check_hardware(hardware)
    [batch] = batches_of(x, y, sample_weight)
    build(model, batch[0])
    if hardware == "auto":
        hardware = hardware_of(model, batch[0])
    return recommendation_of(model, batch, hardware)


def _check_model(model):
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a keras.Model. "
            f"Received: model={model!r} of type {type(model).__name__}"
        )
    check_not_quantized(model)


def report_of(model: keras.Model, batch: tuple[Any, Any, Any]) -> Float16Report:
    """Returns the `float16_report` of a model as it would be in float16.

    In a bfloat16 model, layers that compute in float32 stay in float32.

    Args:
        model: A `keras.Model` that is built.
        batch: Tuple of inputs, targets and weights of the examples, tensors or None.
    """
    paths = LayerPaths(model)
    dtypes = {layer.compute_dtype for layer in paths.layers.values()}
    named: list = []
    if "bfloat16" in dtypes and "float16" not in dtypes:
        policies = policies_of(paths, "mixed_float16", in_float32_already(paths))
        named = [(v, policies[id(v)]) for v in paths.layers.values() if policies[id(v)]]
    x, y, sample_weight = batch
    with dtype_policies_set(named):
        return float16_report(model, x, y, sample_weight=sample_weight)


def recommendation_of(
    model: keras.Model,
    batch: tuple[Any, Any, Any],
    hardware: str,
    report: Float16Report | None = None,
) -> "Recommendation":
    """Returns the `Recommendation` for a model that is built.

    Args:
        model: A `keras.Model` that is built.
        batch: Tuple of inputs, targets and weights of the examples, tensors or None.
        hardware: String, the hardware, not `"auto"`.
        report: The return value of `report_of` for the model. Defaults to `None`:
            `report_of` is called if it is needed.
    """
    paths = LayerPaths(model)
    own = weights_of_16_bits(model)
    policy, reason = policy_for(hardware)
    if own:
        policy, reason = own, recommendation_reasons.of_weights(own, hardware)
    reasons = [reason]
    kept = [] if policy == "float32" else in_float32_already(paths)
    reasons += [f"{p} already computes in float32, and stays in float32." for p in kept]
    scale = None
    if policy in ("mixed_float16", "float16"):
        report = report_of(model, batch) if report is None else report
        kept = outermost(paths, {*kept, *report.layers_to_keep})
        reasons += recommendation_reasons.of_report(report)
        reasons.append(recommendation_reasons.of_scale(report))
        scale = report.recommended_scale or DEFAULT_INITIAL_SCALE
    guard = None if policy == "float32" else "GuardedOptimizer"
    policies = policies_of(paths, policy, kept)
    found = Recommendation(
        hardware=hardware,
        dtype_policy=policy,
        layers_in_float32=kept,
        initial_scale=scale,
        master_weights=masters_of(model, policies),
        optimizer="LossScaleOptimizer" if scale is not None else guard,
        bytes={},
        bytes_now={},
        reasons=reasons,
    )
    _count(found, model, policies, batch[0])
    return found


# --- The bytes ----------------------------------------------------------------------


def _count(found, model, policies, x):
    """Counts the bytes, and writes them into a recommendation."""
    counted = TrainingBytes(model, x)
    own = dict.fromkeys(policies)
    # On PyTorch, a model that is not compiled has no such attribute.
    optimizer = getattr(model, "optimizer", None)
    # One after the other: either may take much of the memory.
    now = _built(optimizer, model, own, _built_or_again)
    found.bytes_now.update(counted.count(own, now))
    is_counted = now is not None
    del now
    wrapped = _built(optimizer, model, policies, found._wrap)
    found.bytes.update(counted.count(policies, wrapped))
    if optimizer is None:
        found.reasons.append("The model is not compiled: no optimizer is counted.")
    elif not is_counted or wrapped is None:
        found.reasons.append(
            "The optimizer cannot be remade from its config, and is not counted."
        )


def _built_or_again(optimizer):
    return optimizer if optimizer.built else made_again(optimizer)


def _built(optimizer, model, policies, make):
    """Returns the optimizer that `make` returns, built for these dtype policies.

    Returns None if there is no optimizer, or if `make` fails.
    """
    if optimizer is None:
        return None
    try:
        optimizer = make(optimizer)
    except (NotImplementedError, TypeError, ValueError):
        return None
    with warnings.catch_warnings():
        # Training itself will give the warnings.
        warnings.simplefilter("ignore")
        optimizer.build(_weights_under(model, policies))
    return optimizer


def _weights_under(model, policies):
    """Returns the trainable weights, with copies of those that change their dtype."""
    variables = []
    for variable, layer in owners_of(model):
        if variable.trainable:
            dtype = weight_dtype(variable, layer, policies[id(layer)])
            is_own = dtype == keras.backend.standardize_dtype(variable.dtype)
            variables.append(variable if is_own else copy_of(variable, dtype))
    return variables


# --- The recommendation -------------------------------------------------------------


@dataclass
class Recommendation:
    """The result of `keras_lso.recommend`. `print` it, or `apply` it to a model.

    A path consists of the names of the enclosing layers and the layer's own name,
    separated by slashes, such as `"encoder/dense"`.

    Attributes:
        hardware: String, the hardware that the recommendation is for: `"cpu"`, `"tpu"`,
            or `"gpu:7.5"` with the compute capability.
        dtype_policy: String, the name of the dtype policy.
        layers_in_float32: List of the paths of layers that still compute in float32.
            The layers inside them do so as well.
        initial_scale: Float, the initial scale of the `LossScaleOptimizer`. None
            without loss scaling.
        master_weights: String, the kind of master weights. None if no weight needs a
            master.
        optimizer: `"LossScaleOptimizer"`, `"GuardedOptimizer"`, or None if the
            optimizer stays as it is.
        bytes: Dict of the bytes that training holds under the recommended dtype policy:
            `"weights"`, `"gradients"`, `"optimizer"` (with master weights), and
            `"outputs"` (the layers' outputs for the batch).
        bytes_now: Dict of the same bytes for the model as it is.
        reasons: List of strings, the reasons as sentences.
    """

    hardware: str
    dtype_policy: str
    layers_in_float32: list[str]
    initial_scale: float | None
    master_weights: str | None
    optimizer: str | None
    bytes: dict[str, int]
    bytes_now: dict[str, int]
    reasons: list[str]

    def apply(self, model: keras.Model) -> keras.Model:
        """Returns a model that follows the recommendation.

        If the model is compiled, the new model is compiled too, with an optimizer of
        the same config in the recommended wrapper. The wrapper keeps the spike guard,
        the kind of master weights and the loss-scale policy of the model's optimizer;
        the optimizer begins with a new state. Set the dtype policy with
        `keras.config.set_dtype_policy` as well: layers that you add have it, and a
        `GuardedOptimizer` warns if it is float16.

        Args:
            model: A built `keras.Model` with the layers of the model that was examined.

        Returns:
            A new model with the same weights: see `keras_lso.keep_in_float32`.

        Raises:
            ValueError: If the model lacks a layer of the recommendation, if its weights
                do not have the dtype that the recommendation is for, or for the reasons
                listed in `keras_lso.keep_in_float32`.

        Example:

        >>> import keras, keras_lso
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("adam", loss="mse")
        >>> x = keras.ops.ones((8, 2))
        >>> found = keras_lso.recommend(model, x, x[:, :1], hardware="gpu:7.5")
        >>> mixed = found.apply(model)
        >>> mixed.dtype_policy.name, type(mixed.optimizer).__name__
        ('mixed_float16', 'LossScaleOptimizer')
        """
        check_copied(model)
        own = weights_of_16_bits(model)
        expected = None if self.dtype_policy in WIDE_WEIGHTS else self.dtype_policy
        if own != expected:
            raise ValueError(
                "`model` must have weights of the dtype that the recommendation is for,"
                f" {expected or 'float32'}. Call `keras_lso.recommend(model,"
                f" x, y)` for it. Received: a model with weights in {own or 'float32'}"
            )
        paths = LayerPaths(model)
        for path in self.layers_in_float32:
            if path not in paths.layers and path not in paths.aliases:
                near = difflib.get_close_matches(path, paths.layers, n=3, cutoff=0.4)
                raise ValueError(
                    "`model` must have the layers that the recommendation is for, and "
                    f"has no {path!r}. Near it are: {near or list(paths.layers)[:10]}"
                )
        policies = policies_of(paths, self.dtype_policy, self.layers_in_float32)
        return copied(model, policies, self._wrap)

    def _wrap(self, optimizer):
        return wrapped_like(optimizer, self.optimizer, self.initial_scale)

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as a dict, ready for JSON."""
        return asdict(self)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the recommendation as JSON.

        Args:
            path: String or path of a file to write the JSON to. Defaults to `None`: the
                JSON is only returned.
        """
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{text}\n")
        return text

    @classmethod
    def from_json(cls, path_or_text: str | os.PathLike[str]) -> "Recommendation":
        """Returns the recommendation that `to_json` has written.

        Args:
            path_or_text: String or path of a file that `to_json` or `keras-lso report`
                has written; or the JSON itself, a string that begins with a brace.

        Raises:
            ValueError: If the file or the string holds no recommendation.

        Example:

        >>> import keras, keras_lso
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> found = keras_lso.recommend(model, keras.ops.ones((8, 2)), hardware="tpu")
        >>> type(found).from_json(found.to_json()) == found
        True
        """
        return cls(**recommendation_file.read(path_or_text))

    def __str__(self) -> str:
        from keras_lso.diagnostics.recommendation_table import text_of_recommendation

        return text_of_recommendation(self)
