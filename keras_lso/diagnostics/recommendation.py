"""`recommend`: the dtype policy, layers in float32 and loss scale for some hardware.

Which dtype policy which hardware is for is in `hardware.py`, the bytes are counted in
`training_bytes.py`, the optimizer is wrapped in `recommended_optimizers.py`. What a
file of a recommendation may hold is in `recommendation_file.py`.
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
    | CPU, older GPU | `"float32"` | as it is |
    | GPU of compute capability 7.0 or 7.5 | `"mixed_float16"` | `LossScaleOptimizer` |
    | GPU from 8.0 on, TPU | `"mixed_bfloat16"` | `GuardedOptimizer` |

    With float16 the model is looked at as by `float16_report`: which layers have to
    stay in float32, and at which loss scale no gradient overflows. A model whose own
    weights are in bfloat16 or float16 keeps them, and its optimizer masters of them.

    ```python
    found = keras_lso.recommend(model, x_batch, y_batch, hardware="gpu:7.5")
    print(found)
    model = found.apply(model)
    ```

    The model is run on the batch, and left as it was. The optimizer that is recommended
    is built once to count its variables, which takes their memory for a moment.

    Args:
        model: A `keras.Model`. If it is compiled, its gradients are looked at, and
            the variables of its optimizer are counted.
        x: Inputs of one batch. Or any other data that `fit` takes, of which the first
            batch is used.
        y: Targets of one batch. Defaults to `None`: `x` yields them, or the model's
            loss needs none, or the forward pass alone is looked at.
        sample_weight: Weights of the examples. Defaults to `None`: 1, or those that
            `x` yields.
        hardware: String, what is to train the model: `"cpu"`, `"tpu"`, or `"gpu:7.5"`
            with the compute capability of the GPU. Defaults to `"auto"`: what the
            model is on. If bfloat16 has too few digits for a model, `"gpu:7.5"`
            recommends float16, on a newer GPU too.

    Returns:
        A `keras_lso.diagnostics.Recommendation`.

    Raises:
        TypeError: If `model` is not a `keras.Model`.
        ValueError: If `hardware` is none of the above, if it is `"auto"` and the model
            is on hardware of which it is unknown which dtypes are fast there, if a
            layer is quantized, or if another argument is none of the above.

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

    Layers that compute in float32 in a model of bfloat16 stay so in it.

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
        report: What `report_of` returned for it. Defaults to `None`: it is called
            where there is something to ask it.
    """
    paths = LayerPaths(model)
    own = weights_of_16_bits(model)
    policy, reason = policy_for(hardware)
    if own:
        policy, reason = own, recommendation_reasons.of_weights(own, hardware)
    reasons = [reason]
    kept = [] if policy == "float32" else in_float32_already(paths)
    reasons += [f"{p} computes in float32 already, and stays so." for p in kept]
    scale = None
    if policy in ("mixed_float16", "float16"):
        report = report_of(model, batch) if report is None else report
        kept = outermost(paths, {*kept, *report.layers_to_keep})
        reasons += recommendation_reasons.of_report(report)
        reasons.append(recommendation_reasons.of_scale(report.recommended_scale))
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
    """Writes the bytes of a recommendation."""
    counted = TrainingBytes(model, x)
    own = dict.fromkeys(policies)
    # PyTorch knows no such attribute of a model that is not compiled.
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

    None if there is none, or none can be made.
    """
    if optimizer is None:
        return None
    try:
        optimizer = make(optimizer)
    except (NotImplementedError, TypeError, ValueError):
        return None
    with warnings.catch_warnings():
        # Training itself will give them.
        warnings.simplefilter("ignore")
        optimizer.build(_weights_under(model, policies))
    return optimizer


def _weights_under(model, policies):
    """Returns the trainable weights, those that change their dtype as copies."""
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

    A path is the names of the layers that a layer is in and its own, with slashes
    between, such as `"encoder/dense"`.

    Attributes:
        hardware: String, for which it is: `"cpu"`, `"tpu"`, or `"gpu:7.5"` with the
            compute capability.
        dtype_policy: String, the name of the dtype policy.
        layers_in_float32: List of the paths of layers that compute in float32 all the
            same. Layers inside them do so as well.
        initial_scale: Float, of the `LossScaleOptimizer`. None without loss scaling.
        master_weights: String, the kind of masters. None if no weight needs one.
        optimizer: `"LossScaleOptimizer"`, `"GuardedOptimizer"`, or None: as it is.
        bytes: Dict of what training holds under the recommended dtype policy:
            `"weights"`, `"gradients"`, `"optimizer"` (with masters), and `"outputs"`,
            what layers return for the batch.
        bytes_now: Dict, the same of the model as it is.
        reasons: List of strings, sentences that say why.
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

        If the model is compiled, so is the new one: with an optimizer of the same
        config, in the wrapper that is recommended. A spike guard, a kind of masters and
        a loss-scale policy that the model's optimizer has stay; the optimizer starts
        again. Set the dtype policy by `keras.config.set_dtype_policy` as well: layers
        that you add have it, and a `GuardedOptimizer` warns where it is float16.

        Args:
            model: A `keras.Model` that is built, with the layers of the one that was
                looked at.

        Returns:
            A new model with the same weights: see `keras_lso.keep_in_float32`.

        Raises:
            ValueError: If a layer of the recommendation is none of the model's, if the
                dtype of the model's weights is not the one it is for, and as
                `keras_lso.keep_in_float32` does.

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
            path: String or path of a file to write it to as well. Defaults to `None`:
                it is only returned.
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
            path_or_text: String or path of a file, also one that `keras-lso report`
                has written; or the JSON itself, a string that begins with a brace.

        Raises:
            ValueError: If it holds no recommendation.

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
