"""The bytes and the kernels of a step on JAX, as XLA compiles it for a GPU or a TPU.

XLA needs a description of the device, not the device.
"""

import functools
import pathlib
import warnings
from unittest import mock

import jax
import keras
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import keras_lso
from benchmarks.accelerators.program import Program
from benchmarks.bytes_moved import bytes_of_step
from benchmarks.inner import INNER
from benchmarks.shapes import SHAPES, parameters

ROWS = ("keras_lso", "inner alone")
# The inner optimizer, the dtype of weights and gradients, `master_weights`, and
# `slot_dtype`.
RECIPES = [
    (inner, kind, "auto", None)
    for kind in ("float32", "float16")
    for inner in ("SGD+momentum", "Adam", "LARS")
]
RECIPES += [
    (inner, kind, masters, None)
    for masters in ("remainder", "remainder8", "stochastic")
    for kind in ("bfloat16", "float16")
    for inner in ("SGD+momentum", "Adam")
]
RECIPES += [
    ("Adam", "float32", "auto", "bfloat16"),
    ("Adam", "bfloat16", "stochastic", "bfloat16"),
    ("Adam", "bfloat16", "remainder8", "int8"),
    ("Adam", "bfloat16", "stochastic", "int8"),
]
_H200 = pathlib.Path(__file__).with_name("h200.txtpb")
_ASKS_FOR_CPU = "keras_lso._backend.jax.measure._is_on_cpu"
_CANONICAL = "jax._src.xla_bridge.canonicalize_platform"


def _gpus(count):
    """Returns the devices of a host with some H200s.

    JAX asks for a GPU that is there before it believes that one is named.
    """
    from jax._src import xla_bridge

    canonical = xla_bridge.canonicalize_platform
    known = lambda name: "cuda" if name in ("gpu", "cuda") else canonical(name)  # noqa: E731
    with mock.patch(_CANONICAL, known):
        description = topologies.get_topology_desc(
            "",
            "cuda",
            target_config=_H200.read_text(),
            topology=f"1x1x{count}",
        )
    return description.devices[:count]


def _tpus():
    """Returns the four chips of a TPU v5e host."""
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


TARGETS = {
    "H200": lambda: _gpus(1),
    "4 x H200": lambda: _gpus(4),
    "TPU v5e": lambda: _tpus()[:1],
    "4 x TPU v5e": _tpus,
}


def measure(target, shapes="resnet50"):
    """Yields dicts: a target, a recipe, a row, and what its program does."""
    # The step is given gradients: no loss is scaled.
    warnings.filterwarnings("ignore", "LossScaleOptimizer divides gradients")
    devices = TARGETS[target]()
    for inner, kind, masters, slots in RECIPES:
        facts_of_recipe = [f for f in (kind, masters) if f not in ("float32", "auto")]
        facts_of_recipe += [f"{slots} slots"] if slots else []
        for name in ROWS:
            optimizer = INNER[inner].make()
            if name == "keras_lso":
                optimizer = keras_lso.LossScaleOptimizer(
                    optimizer, master_weights=masters, slot_dtype=slots
                )
            program = compiled(optimizer, devices, shapes, kind)
            yield {
                "target": target,
                "recipe": ", ".join([inner, *facts_of_recipe]),
                "row": name,
                **facts(program, shapes),
                "least": least(name, inner, kind, masters, slots, shapes),
            }
            jax.clear_caches()


def facts(program, shapes):
    """Returns what the tables say of a program, a dict."""
    return {
        "bytes": round(program.bytes / parameters(SHAPES[shapes]()), 1),
        "kernels": program.kernels,
        "conditionals": program.count("conditional"),
        "host transfers": program.host_transfers,
        "in place": program.aliased,
        "all-reduces": program.count("all-reduce", "all-reduce-start"),
    }


def least(name, inner, kind, masters, slots, shapes):
    is_ours = name == "keras_lso"
    if not is_ours:
        masters = slots = False
    elif masters == "auto":
        masters = None
    moved = bytes_of_step(shapes, inner, kind, is_ours, masters, slots)
    return moved / parameters(SHAPES[shapes]())


def compiled(optimizer, devices, shapes, kind):
    """Returns the `Program` of a step in which the devices share the batch."""
    shapes, dtype = SHAPES[shapes](), getattr(jax.numpy, kind)
    mesh = Mesh(np.array(devices), ("batch",))
    whole = NamedSharding(mesh, PartitionSpec())
    variables = [keras.Variable(np.zeros(s, "float32"), dtype=kind) for s in shapes]
    optimizer.build(variables)
    of_each = [len(devices)] if len(devices) > 1 else []
    of_batch = NamedSharding(mesh, PartitionSpec("batch")) if of_each else whole
    gradients = [
        jax.ShapeDtypeStruct((*of_each, *s), dtype, sharding=of_batch) for s in shapes
    ]
    state = [
        [jax.ShapeDtypeStruct(v.shape, v.value.dtype, sharding=whole) for v in some]
        for some in (variables, optimizer.variables)
    ]

    @functools.partial(
        jax.jit, donate_argnums=0, out_shardings=[[whole] * len(s) for s in state]
    )
    def step(state, grads):
        trainable, own = state
        if of_each:
            grads = [g.mean(axis=0) for g in grads]
        return list(map(list, optimizer.stateless_apply(own, grads, trainable)))

    return Program(compiled_for(devices, step, state, gradients).as_text())


def compiled_for(devices, step, *arguments):
    """Returns a function that `jax.jit` has made, compiled for devices."""
    # What the package would trace on an accelerator.
    has_devices = mock.patch.object(jax, "device_count", lambda: len(devices))
    with mock.patch(_ASKS_FOR_CPU, lambda: False), has_devices:
        lowered = step.lower(*arguments)
    # A command buffer is one instruction, whatever is in it.
    is_gpu = devices[0].platform in ("gpu", "cuda")
    options = {"xla_gpu_enable_command_buffer": ""} if is_gpu else None
    return lowered.compile(compiler_options=options)
