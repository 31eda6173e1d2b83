"""The seam to the frameworks: four primitives, one module a framework.

| primitive | does |
| --- | --- |
| `measure(grads, ..., inv_scale)` | reads the gradients once: are they finite? |
| `run_if(finite, step, grads, state)` | runs a step or leaves all as it was |
| `fused_step(rule, ...)` | unscales, skips and updates in one pass |
| `compute_gradients(loss_fn, ...)` | the gradients of a callable |

`differentiate` is the last one's twin for a tensor. The rest are helpers.

`keras_lso/backend/` is the only place that imports a framework. `generic` is
the reference in `keras.ops` that the others are tested against; the environment
variable `KERAS_LSO_KERNELS=generic` (default `auto`) turns every fast path off.
"""

import importlib
import os

import keras

from keras_lso.backend import generic, masters

_MODULES = {"tensorflow": "_tensorflow", "jax": "_jax", "torch": "_torch"}

KERNELS = os.environ.get("KERAS_LSO_KERNELS", "auto")
if KERNELS not in ("auto", "generic"):
    raise ValueError(
        "The environment variable KERAS_LSO_KERNELS must be 'auto' or 'generic'. "
        f"Received: KERAS_LSO_KERNELS={KERNELS!r}"
    )

_name = _MODULES.get(keras.backend.backend())
# NumPy and OpenVINO cannot train, but a model that was trained elsewhere and
# carries our optimizer must load there.
_framework = importlib.import_module(f"keras_lso.backend.{_name}") if _name else generic
_kernels = _framework if KERNELS == "auto" else generic

Measurement = generic.Measurement
in_float32 = generic.in_float32
times = generic.times
# Keras's own operations would copy numbers to PyTorch's device.
restarted = getattr(_framework, "restarted", masters.restarted)
rounded = getattr(_framework, "rounded", masters.rounded)
measure = _kernels.measure
fused_step = _kernels.fused_step
run_if = _framework.run_if
compute_gradients = _framework.compute_gradients
differentiate = _framework.differentiate
trained_variables = _framework.trained_variables
compile_step = _framework.compile_step
UPDATES_IN_PLACE = _framework.UPDATES_IN_PLACE
is_traced = _framework.is_traced
outside_of_functions = _framework.outside_of_functions
is_variable = _framework.is_variable
scalar = _framework.scalar
check_replica_context = _framework.check_replica_context
AVERAGES_IN_STEP = _framework.AVERAGES_IN_STEP
count_processes = _framework.count_processes
check_processes_run = _framework.check_processes_run
average_over_processes = _framework.average_over_processes
register_list_class = _framework.register_list_class
with_positions = _framework.with_positions
without_host = _framework.without_host
as_gradient = _framework.as_gradient
map_values = _framework.map_values
l2_norms = _framework.l2_norms
to_dense = _framework.to_dense
total = _framework.total
# Only PyTorch's tensors say that they are sharded.
any_sharded = getattr(_framework, "any_sharded", generic.any_sharded)
sharded_like = getattr(_framework, "sharded_like", generic.sharded_like)
check_shards = getattr(_framework, "check_shards", generic.check_shards)
# Only TensorFlow's strategies have replicas.
check_on_replicas = getattr(_framework, "check_on_replicas", generic.check_on_replicas)


def check_stateless_is_supported():
    """Refuses `stateless_apply` where Keras itself does."""
    if not getattr(_framework, "SUPPORTS_STATELESS", True):
        raise ValueError(
            "stateless_apply is not supported with the TensorFlow backend (as it is "
            "incompatible with tf.distribute). Call `optimizer.apply` instead."
        )


def check_axis_name(axis_name):
    """Refuses an axis where there are none."""
    if axis_name is not None and not getattr(_framework, "HAS_NAMED_AXES", False):
        raise ValueError(
            "`axis_name` is an axis of `jax.shard_map` or `jax.pmap`, which this Keras "
            "backend does not have: leave it out. On TensorFlow the replicas of a "
            "`tf.distribute.Strategy` add up their gradients by themselves; on PyTorch "
            "`DistributedDataParallel` has averaged them already. "
            f"Received: axis_name={axis_name!r}"
        )


def are_shards(grads, variables):
    """Whether each device has shards of the gradients, inside of `jax.shard_map`."""
    tell = getattr(_framework, "are_shards", None)
    return tell is not None and tell(grads, variables)


def fused_step_takes(rule, variables, gradients):
    """Whether `fused_step` is the faster way for these tensors, right here."""
    return KERNELS == "auto" and _framework.fused_step_takes(rule, variables, gradients)
