"""The tensors that a training op reports to TensorBoard."""

from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.tensors import in_float32
from keras_lso._keras_internals.optimizers import chain_of
from keras_lso._keras_internals.variables import path_of
from keras_lso.compat.open_seq2seq._clipping import global_norm
from keras_lso.loss_scale_optimizer import LossScaleOptimizer
from keras_lso.optimizers.larc import LARC

OPTIMIZER_SUMMARIES = [
    "learning_rate",
    "gradients",
    "gradient_norm",
    "global_gradient_norm",
    "variables",
    "variable_norm",
    "larc_summaries",
    "loss_scale",
]
DEFAULT_SUMMARIES = ["learning_rate", "global_gradient_norm", "loss_scale"]


def collect(summaries, optimizer, grads, variables):
    """Returns a dict of tags to tensors: scalars, and arrays for histograms.

    `summaries` are names from `OPTIMIZER_SUMMARIES`. `grads` are unscaled, one for each
    of `variables` or None; the optimizer has not applied them yet.
    """
    chain = chain_of(optimizer)
    reports = {}
    if "learning_rate" in summaries:
        rate = ops.convert_to_tensor(chain[-1].learning_rate)
        reports["learning_rate"] = ops.cast(rate, "float32")
    for scaler in (o for o in chain if isinstance(o, LossScaleOptimizer)):
        if "loss_scale" in summaries:
            reports["loss_scale"] = scaler.loss_scale
    if "global_gradient_norm" in summaries:
        reports["global_gradient_norm"] = _finite(global_norm(grads))
    paths: list[str] = []
    for grad, variable in zip(grads, variables, strict=True):
        path = path_of(variable)
        path = f"{path}_{paths.count(path)}" if path in paths else path
        paths.append(path)
        if grad is not None and "gradients" in summaries:
            reports[f"gradients/{path}"] = _finite(backend.to_dense(grad))
        if grad is not None and "gradient_norm" in summaries:
            reports[f"gradient_norm/{path}"] = _finite(_norm(grad))
        if "variables" in summaries:
            # A copy, since on PyTorch the step updates the variable in place.
            reports[f"variables/{path}"] = ops.copy(in_float32(variable))
        if "variable_norm" in summaries:
            reports[f"variable_norm/{path}"] = _norm(ops.convert_to_tensor(variable))
    for larc in (o for o in chain if isinstance(o, LARC)):
        if "larc_summaries" in summaries:
            ratios = zip(paths, larc.ratios(grads, variables), strict=True)
            reports |= {f"larc_ratio/{p}": r for p, r in ratios if r is not None}
    return reports


def _norm(tensor):
    [norm] = backend.l2_norms([tensor])
    return norm


def _finite(values):
    """Replaces non-finite values by 0, since no histogram accepts them."""
    values = ops.convert_to_tensor(values)
    return ops.where(ops.isfinite(values), values, ops.zeros_like(values))
