"""The tensors that a training op reports to TensorBoard.

They are apart from `_training_op.py` because they depend only on one step's gradients.
"""

from keras import ops

from keras_lso._backend import backend
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
        reports["learning_rate"] = _rate(chain)
    if "loss_scale" in summaries:
        for scaler in (o for o in chain if isinstance(o, LossScaleOptimizer)):
            reports["loss_scale"] = scaler.loss_scale
    if "global_gradient_norm" in summaries:
        reports["global_gradient_norm"] = _mask_nans(global_norm(grads))
    paths = _distinct_paths(variables)
    for grad, variable, path in zip(grads, variables, paths, strict=True):
        if grad is not None and "gradients" in summaries:
            reports[f"gradients/{path}"] = _mask_nans(backend.to_dense(grad))
        if grad is not None and "gradient_norm" in summaries:
            reports[f"gradient_norm/{path}"] = _mask_nans(_norm(grad))
        if "variables" in summaries:
            # A copy, since on PyTorch the step updates the variable in place.
            reports[f"variables/{path}"] = ops.copy(backend.in_float32(variable))
        if "variable_norm" in summaries:
            reports[f"variable_norm/{path}"] = _norm(ops.convert_to_tensor(variable))
    if "larc_summaries" in summaries:
        for larc in (o for o in chain if isinstance(o, LARC)):
            ratios = larc.ratios(grads, variables)
            reports.update(_of_larc(larc, ratios, _rate(chain), paths))
    return reports


def _rate(chain):
    return ops.cast(ops.convert_to_tensor(chain[-1].learning_rate), "float32")


def _distinct_paths(variables):
    """Returns the paths, and appends a number to each repetition."""
    paths: list[str] = []
    for path in map(path_of, variables):
        count = paths.count(path)
        paths.append(f"{path}_{count}" if count else path)
    return paths


def _of_larc(larc, ratios, rate, paths):
    reports = {}
    for ratio, path in zip(ratios, paths, strict=True):
        if ratio is None:
            continue
        if larc.mode == "clip":
            reports[f"larc_clip_on/{path}"] = ops.cast(ratio < 1.0, "float32")
        reports[f"larc_grad_update/{path}"] = ratio
        reports[f"larc_final_lr/{path}"] = rate * ratio
    return reports


def _norm(tensor):
    [norm] = backend.l2_norms([tensor])
    return norm


def _mask_nans(values):
    """Replaces non-finite values by 0, since no histogram accepts them."""
    values = ops.convert_to_tensor(values)
    return ops.where(ops.isfinite(values), values, ops.zeros_like(values))
