"""`recommend`: the dtype policy, layers in float32 and loss scale for some hardware."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from keras_lso._backend import backend
from keras_lso._backend.codecs import CODECS
from keras_lso._backend.tensors import NARROW
from keras_lso._core.checks import refusal
from keras_lso.diagnostics import reports
from keras_lso.diagnostics.float16 import Float16Report, float16_report, words_of
from keras_lso.diagnostics.float32_layers import FLOATS, copied, made_again, policies_of
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.loss_scales import DynamicLossScale
from keras_lso.optimizers.guarded import GuardedOptimizer

# The arguments of a wrapper that hold for the recommended one as well.
_KEPT = "spike_guard", "slot_dtype", "shard_state"
_HARDWARE = re.compile(r"auto|cpu|tpu|gpu:\d{1,3}\.\d{1,3}")
# GPUs, with their compute capabilities.
_GPUS = {"V100": 7.0, "T4": 7.5, "RTX 20": 7.5, "A100": 8.0, "RTX 30": 8.6, "L4": 8.9}
_GPUS |= {"H100": 9.0, "H200": 9.0, "B200": 10.0}


def recommend(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    hardware: str = "auto",
) -> "Recommendation":
    """Recommends a dtype policy for a model and the hardware that is to train it.

    The dtype policy is `"float32"` on CPUs and older GPUs; `"mixed_float16"` in a
    `LossScaleOptimizer` on GPUs of compute capability 7.0 and 7.5; `"mixed_bfloat16"`
    in a `GuardedOptimizer` on TPUs and on GPUs from 8.0 on. A model whose own weights
    are in bfloat16 or float16 keeps them, and its optimizer keeps master weights.

    For float16, the function examines the model as `float16_report` does, to find the
    layers that have to stay in float32 and a loss scale at which no gradient overflows.
    They follow from the largest numbers of the batch: use real data, and check again
    after some training. `model` is left unchanged.

    Args:
        model: A `keras.Model`. If it is compiled, the function examines its gradients.
        x: Inputs of one batch, or any other data that `fit` takes. Only the first batch
            is used.
        y: Targets of one batch. Defaults to `None`: `x` yields them, or the model's
            loss needs none, or only the forward pass is examined.
        sample_weight: Weights of the examples. Defaults to `None`.
        hardware: String, the hardware that is to train the model: `"cpu"`, `"tpu"`, or
            `"gpu:7.5"` with the compute capability of the GPU, or `"V100"`, `"T4"`,
            `"RTX 20"`, `"A100"`, `"RTX 30"`, `"L4"`, `"H100"`, `"H200"` or `"B200"`.
            Defaults to `"auto"`: the hardware that the model is on. If bfloat16 has too
            few digits for your model, write `"gpu:7.5"` for a newer GPU too: it
            recommends float16.

    Raises:
        TypeError: If `model` is not a `keras.Model`.
        ValueError: If an argument is not valid, if a layer is quantized, or if the
            model is on hardware whose fast dtypes are unknown.

    Example:

    >>> import keras, keras_lso
    >>> layers = [keras.layers.Dense(4, name="hidden"), keras.layers.Dense(1)]
    >>> model = keras.Sequential([keras.Input((2,)), *layers])
    >>> model.compile("sgd", loss="mse")
    >>> x = keras.ops.ones((8, 2))
    >>> advice = keras_lso.recommend(model, x, x[:, :1], hardware="gpu:8.0")
    >>> advice.dtype_policy, advice.optimizer, advice.layers_in_float32
    ('mixed_bfloat16', 'GuardedOptimizer', [])
    >>> type(advice.apply(model).optimizer).__name__
    'GuardedOptimizer'
    """
    reports.check_model(model)
    if isinstance(hardware, str) and hardware in _GPUS:
        hardware = f"gpu:{_GPUS[hardware]}"
    if not _HARDWARE.fullmatch(str(hardware)):
        names = ", ".join(map(repr, _GPUS))
        requirement = (
            "be 'auto', 'cpu', 'tpu', a compute capability as in 'gpu:7.5', or one of "
            f"{names}"
        )
        raise refusal("hardware", hardware, requirement)
    [batch] = reports.batches_of(model, x, y, sample_weight)
    if hardware == "auto":
        hardware = _hardware_of(model, batch[0])
    policy, reasons = _policy_for(model, hardware)
    paths = reports.LayerPaths(model)
    wide = _in_float32_already(paths) if policy != "float32" else []
    reasons += [f"{p} already computes in float32, and stays in float32." for p in wide]
    wrapper, scale = None if policy == "float32" else "GuardedOptimizer", None
    if policy == "mixed_bfloat16":
        foreign = [p for p in paths.foreign() if p not in wide]
        reasons += [f"{p} stays in float32: {reports.HAS_OWN_DTYPES}." for p in foreign]
        wide = paths.outermost({*wide, *foreign})
    if policy in ("mixed_float16", "float16"):
        report = float16_report(model, *batch[:2], sample_weight=batch[2])
        wide = paths.outermost({*wide, *report.layers_to_keep})
        reasons += [*words_of(report), *_default_scale(report)]
        wrapper = "LossScaleOptimizer"
        scale = report.recommended_scale or DynamicLossScale.initial_loss_scale
    # On PyTorch, a model that is not compiled has no such attribute.
    codec = _masters_of(getattr(model, "optimizer", None))
    masters = codec if policy in NARROW else None
    return Recommendation(hardware, policy, wide, scale, masters, wrapper, reasons)


def _hardware_of(model: keras.Model, x: Any) -> str:
    """Returns the hardware of a model, or of its inputs if it has no weights."""
    tensors = [v.value for v in model.weights[:1]] or keras.tree.flatten(x)
    hardware = backend.host.hardware_of(tensors[0])
    if hardware is None:
        raise ValueError(
            "`hardware='auto'` knows CPUs, TPUs and NVIDIA's GPUs. Name hardware that "
            "is fast in the same dtypes: 'gpu:8.0' (bfloat16 and float16), 'gpu:7.5' "
            f"(float16) or 'cpu' (float32). Received: devices {backend.host.devices()}"
        )
    return hardware


def _policy_for(model: keras.Model, hardware: str) -> tuple[str, list[str]]:
    """Returns the dtype policy, and a list of reasons."""
    fast, reason = _fast_dtypes(hardware)
    dtypes = {keras.backend.standardize_dtype(v.dtype) for v in model.weights}
    narrow = next((dtype for dtype in NARROW if dtype in dtypes), None)
    if narrow is None:
        return f"mixed_{fast[0]}" if fast else "float32", [reason]
    reasons = [
        f"The weights are in {narrow}, and keep this dtype, with master weights."
    ]
    if narrow not in fast:
        reasons.append(f"The hardware is slow in {narrow}. {reason}")
    return narrow, reasons


def _fast_dtypes(hardware: str) -> tuple[list[str], str]:
    """Returns the 16-bit dtypes that are fast, the best first, and why, a sentence."""
    if hardware == "cpu":
        return [], "A CPU computes in float32 as fast as in 16 bits, or faster."
    wide = "bfloat16, which has the range of float32"
    if hardware == "tpu":
        return ["bfloat16"], f"A TPU multiplies in {wide}."
    capability = hardware.removeprefix("gpu:")
    gpu = f"A GPU of compute capability {capability}"
    if float(capability) < 7:
        return [], f"{gpu} has no Tensor Cores, which make 16 bits fast."
    if float(capability) < 8:
        why = f"{gpu} has Tensor Cores for float16, but none for bfloat16."
        return ["float16"], why
    why = f"{gpu} computes as fast in float16 as in {wide}."
    return ["bfloat16", "float16"], why


def _in_float32_already(paths: reports.LayerPaths) -> list[str]:
    """Returns the paths of the layers that compute in float32 in a 16-bit model."""
    layers = paths.layers
    if not any(layer.compute_dtype in NARROW for layer in layers.values()):
        return []
    wide = [
        path
        for path in paths.parents
        # An `InputLayer` computes nothing.
        if not isinstance(layers[path], keras.layers.InputLayer)
        and all(layers[p].compute_dtype == "float32" for p in paths.inside(path))
    ]
    return paths.outermost(wide)


def _default_scale(report: Float16Report) -> Iterator[str]:
    """Yields the reason if the loss scale does not follow from gradients."""
    counts = [layer.gradients for layer in report.layers.values()]
    default = "The loss scale begins at its default."
    if report.recommended_scale is None:
        yield f"There are no gradients without a loss and its targets. {default}"
    elif not any(count is not None and count.values for count in counts):
        yield f"The gradients in float16 are all 0. {default}"


def _masters_of(optimizer: Any) -> str:
    """Returns the name of the codec of an optimizer's masters, or of the default."""
    name = getattr(optimizer, "master_weights", None)
    return name if name in CODECS else "float32"


@dataclass
class Recommendation:
    """The result of `keras_lso.recommend`. `print` it, or `apply` it to a model.

    Attributes:
        hardware: String, the hardware, as the argument of `recommend`.
        dtype_policy: String, the name of the dtype policy.
        layers_in_float32: List of the paths of layers that still compute in float32, as
            do the layers inside them. For paths see `keras_lso.keep_in_float32`.
        initial_scale: Float, that of the `LossScaleOptimizer`. None without one.
        master_weights: String, the kind of master weights. None without any.
        optimizer: `"LossScaleOptimizer"`, `"GuardedOptimizer"`, or None if the
            optimizer stays as it is.
        reasons: List of strings, the reasons as sentences.
    """

    hardware: str
    dtype_policy: str
    layers_in_float32: list[str]
    initial_scale: float | None
    master_weights: str | None
    optimizer: str | None
    reasons: list[str]

    def apply(self, model: keras.Model) -> keras.Model:
        """Returns a model that follows the recommendation.

        If the model is compiled, so is the new one, with a new optimizer of the same
        config in the recommended wrapper, which keeps the spike guard, the kind of
        master weights, the dtype of slots and the loss-scale policy of the old one. Set
        the dtype policy with `keras.config.set_dtype_policy` as well: layers that you
        add have it.

        Args:
            model: A built `keras.Model` with the layers of the model that was examined.

        Returns:
            A new model with the same weights: see `keras_lso.keep_in_float32`, also for
            the errors that it raises.
        """
        # Layers with 16-bit weights keep their dtype policy.
        others = None if self.dtype_policy in NARROW else self.dtype_policy
        policies = policies_of(model, self.layers_in_float32, others, FLOATS)
        return copied(model, policies, self._wrapped)

    def _wrapped(self, optimizer: keras.Optimizer) -> keras.Optimizer:
        """Returns an optimizer of the same config, in the recommended wrapper."""
        is_wrapper = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        inner = made_again(optimizer.inner_optimizer if is_wrapper else optimizer)
        # Of Keras's own class, the new optimizer has the inner optimizer alone.
        old = optimizer if isinstance(optimizer, LossScaleOptimizer) else None
        options: dict[str, Any] = {}
        if old is not None:
            options = {n: getattr(old, n) for n in _KEPT}
            options["master_weights"] = _masters_of(old)
        if self.optimizer == "LossScaleOptimizer":
            return LossScaleOptimizer(inner, **self._loss_scale_like(old), **options)
        # Without loss scaling, an optimizer keeps what only a wrapper has.
        needs_wrapper = any(options.get(name) for name in _KEPT)
        is_guarded = needs_wrapper or isinstance(old, GuardedOptimizer)
        if self.optimizer == "GuardedOptimizer" or is_guarded:
            return GuardedOptimizer(inner, **options)
        return inner

    def _loss_scale_like(self, old: LossScaleOptimizer | None) -> dict[str, Any]:
        """Returns the loss-scale policy of an optimizer at the new scale, arguments."""
        if old is None or isinstance(old, GuardedOptimizer):
            return {"initial_scale": self.initial_scale}
        policy: Any = old.loss_scale_policy
        scale: Any = self.initial_scale  # A `LossScaleOptimizer` has one.
        config = policy.get_config()
        if "initial_loss_scale" in config:
            within = max(policy.min_scale, min(scale, policy.max_scale))
            config["initial_loss_scale"] = within
        if "loss_scale_value" in config:
            config["loss_scale_value"] = scale
        return {"loss_scale": type(policy).from_config(config)}

    def __str__(self) -> str:
        none = "all" if self.dtype_policy == "float32" else "none"
        optimizer = "unchanged, without loss scaling"
        if self.optimizer is not None:
            argument = ""
            if self.initial_scale is not None:
                argument = f", initial_scale={reports.scale_text(self.initial_scale)}"
            optimizer = f"keras_lso.{self.optimizer}(optimizer{argument})"
        rows = {
            "hardware": self.hardware,
            "dtype policy": self.dtype_policy,
            "layers in float32": ", ".join(self.layers_in_float32) or none,
            "optimizer": optimizer,
            "masters": self.master_weights or "none",
        }
        lines = [f"{name:<19}{value}" for name, value in rows.items()]
        return reports.text_of(*lines, *self.reasons)
