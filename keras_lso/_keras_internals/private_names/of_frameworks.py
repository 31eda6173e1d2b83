"""The private functions of PyTorch and TensorFlow that the package relies on.

It uses no private function of JAX. A test compares the list with the package's source.
"""

from keras_lso._keras_internals.private_names.probes import Probe

# Each applies one operation to a list of tensors.
_FOREACH = [
    "abs",
    "add",
    "add_",
    "clamp_max_",
    "clamp_min_",
    "copy_",
    "div",
    "maximum",
    "mul",
    "mul_",
    "norm",
    "sign",
    "sqrt",
    "zero_",
]


def _torch(owner, name):
    return Probe(owner, name, backend="torch")


PROBES = (
    *(_torch("torch", f"_foreach_{name}") for name in _FOREACH),
    _torch("torch", "_fused_adam_"),
    _torch("torch", "_fused_sgd_"),
    _torch("torch", "_amp_update_scale_"),
    _torch("torch._utils", "_flatten_dense_tensors"),
    _torch(
        "torch._utils",
        "_unflatten_dense_tensors",
    ),
    _torch("torch.utils", "_pytree"),
    _torch("torch._C._dynamo.guards", "TensorGuards"),
    _torch("torch._C", "_is_any_autocast_enabled"),
    _torch(
        "torch.Tensor",
        "_version",
    ),
    # `to_local` of a Parameter returns a view, whose memory cannot be replaced.
    _torch("torch.distributed.tensor.DTensor", "_local_tensor"),
    Probe(
        "tensorflow.python.ops.control_flow_util",
        "GraphOrParentsInXlaContext",
        backend="tensorflow",
    ),
)
