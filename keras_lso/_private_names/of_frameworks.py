"""The private functions of PyTorch and TensorFlow that the package leans on.

Of JAX it uses none. A test compares the list with the package's source.
"""

from keras_lso._private_names.probes import Probe

_KERNELS = "_backend/_torch_kernels.py"
_MASTERS = "_backend/_torch_masters.py"
_MEASURE = "_backend/_torch_measure.py"
_NUMBERS = "_backend/_torch_numbers.py"
_STEPS = "_backend/_torch_steps.py"
_SHARDS = "_backend/_torch_shards.py"
_ADDRESSES = "_backend/_torch_addresses.py"
_UNDO = "_backend/_torch_undo.py"

# Each applies one operation to a list of tensors.
_FOREACH = {
    "abs": _STEPS,
    "add": f"{_KERNELS} {_STEPS}",
    "add_": f"{_ADDRESSES} {_KERNELS} {_NUMBERS} {_STEPS}",
    "clamp_max_": _MEASURE,
    "clamp_min_": _MEASURE,
    "copy_": f"{_KERNELS} {_MASTERS} {_UNDO}",
    "div": _STEPS,
    "div_": _STEPS,
    "maximum_": _STEPS,
    "mul": f"{_KERNELS} {_MEASURE} {_NUMBERS} {_STEPS}",
    "mul_": f"{_KERNELS} {_MEASURE} {_STEPS}",
    "norm": _MEASURE,
    "sign_": _STEPS,
    "sqrt_": _STEPS,
    "zero_": f"{_KERNELS} {_SHARDS} {_STEPS}",
}


def _torch(owner, name, used_in):
    return Probe(owner, name, used_in, backend="torch")


PROBES = (
    *(_torch("torch", f"_foreach_{name}", at) for name, at in _FOREACH.items()),
    _torch("torch", "_fused_adam_", _KERNELS),
    _torch("torch", "_fused_sgd_", _KERNELS),
    _torch("torch", "_amp_update_scale_", "_backend/_torch_scalars.py"),
    _torch("torch._utils", "_flatten_dense_tensors", f"{_MASTERS} {_MEASURE}"),
    _torch(
        "torch._utils",
        "_unflatten_dense_tensors",
        f"{_KERNELS} {_MASTERS} _backend/_torch_processes.py",
    ),
    _torch("torch.utils", "_pytree", "_backend/_torch.py"),
    _torch("torch.Tensor", "_version", "_backend/_torch.py _backend/_torch_in_step.py"),
    Probe(
        "tensorflow.python.ops.control_flow_util",
        "GraphOrParentsInXlaContext",
        "_backend/_tf_measure.py",
        backend="tensorflow",
    ),
)
