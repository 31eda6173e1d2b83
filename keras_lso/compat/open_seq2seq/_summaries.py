"""The tensors that a training op reports to TensorBoard."""

from keras import ops

from keras_lso._backend import backend
from keras_lso._backend.tensors import in_float32
from keras_lso._keras_internals.optimizers import chain_of
from keras_lso._keras_internals.variables import path_of
from keras_lso.compat.open_seq2seq._clipping import global_norm, norm_of
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

_OF_GRADIENT = {"gradients": backend.to_dense, "gradient_norm": norm_of}
_OF_VARIABLE = {
    # A copy, since on PyTorch the step updates the variable in place.
    "variables": lambda variable: ops.copy(in_float32(variable)),
    "variable_norm": lambda variable: norm_of(ops.convert_to_tensor(variable)),
}


def collect(summaries, optimizer, grads, variables):
    """Returns a dict of tags to tensors, given unscaled gradients before their step."""
    chain = chain_of(optimizer)
    reports = {}
    if "learning_rate" in summaries:
        rate = ops.convert_to_tensor(chain[-1].learning_rate)
        reports["learning_rate"] = ops.cast(rate, "float32")
    if "global_gradient_norm" in summaries:
        reports["global_gradient_norm"] = _finite(global_norm(grads))
    paths: list[str] = []
    for variable in variables:
        path = path_of(variable)
        paths.append(f"{path}_{paths.count(path)}" if path in paths else path)
    for path, grad, variable in zip(paths, grads, variables, strict=True):
        for name, compute in _OF_GRADIENT.items():
            if name in summaries and grad is not None:
                reports[f"{name}/{path}"] = _finite(compute(grad))
        for name, compute in _OF_VARIABLE.items():
            if name in summaries:
                reports[f"{name}/{path}"] = compute(variable)
    for wrapper in chain:
        if "loss_scale" in summaries and isinstance(wrapper, LossScaleOptimizer):
            reports["loss_scale"] = wrapper.loss_scale
        if "larc_summaries" in summaries and isinstance(wrapper, LARC):
            ratios = zip(paths, wrapper.ratios(grads, variables), strict=True)
            reports |= {f"larc_ratio/{p}": r for p, r in ratios if r is not None}
    return reports


def _finite(values):
    """Replaces non-finite values by 0, since no histogram accepts them."""
    values = ops.convert_to_tensor(values)
    return ops.where(ops.isfinite(values), values, ops.zeros_like(values))
