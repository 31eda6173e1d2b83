"""One of two processes that step on shards of gradients.

    python -m integration_tests.distributed.worker_torch_shards RANK FOLDER

For every optimizer and every layout it prints the distance of the weights and slots
from those of a step on the whole gradients, and more lines for `test_torch_shards.py`.
"""

import json
import sys

import keras
import numpy as np
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import keras_lso
from integration_tests.distributed import problem, torch_training
from keras_lso import loss_scales

rank, folder = int(sys.argv[1]), sys.argv[2]

# One process has no row of the second, and one row more of the first, the third and the
# last, which is larger than a piece of the kernels, and has slots in 8 bits.
SHAPES = [(3, 4), (1, 2), (5,), (4, 6), (71, 64)]
STEPS = 12

KERAS = keras.optimizers
OPTIMIZERS = {
    "SGD": lambda: KERAS.SGD(0.05),
    "Nesterov": lambda: KERAS.SGD(0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda: KERAS.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: KERAS.SGD(0.05, momentum=0.9, clipnorm=0.5),
    "global_clipnorm": lambda: KERAS.Adam(0.01, global_clipnorm=0.5),
    "clipvalue": lambda: KERAS.SGD(0.05, clipvalue=0.5),
    "accumulation": lambda: KERAS.SGD(
        0.05, momentum=0.9, gradient_accumulation_steps=2
    ),
    "EMA": lambda: KERAS.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "RMSprop": lambda: KERAS.RMSprop(0.01, momentum=0.9, centered=True),
    "Lion": lambda: KERAS.Lion(0.01),
    "Lamb": lambda: KERAS.Lamb(0.01),
    "LARS": lambda: keras_lso.LARS(
        0.5, eeta=0.1, weight_decay_rate=0.01, exclude_1d=True
    ),
    "LARS, popular": lambda: keras_lso.LARS(
        0.5, eeta=0.1, nesterov=True, classic_momentum=False
    ),
    "LARS, paper": lambda: keras_lso.LARS(
        0.5, eeta=0.1, weight_decay_rate=0.01, nesterov=True, trust_ratio="paper"
    ),
    "LARS, clipped": lambda: keras_lso.LARS(0.5, eeta=0.1, global_clipnorm=0.5),
    "LAMB": lambda: keras_lso.LAMB(0.05, weight_decay_rate=0.01, exclude_1d=True),
    "LAMB, clipped": lambda: keras_lso.LAMB(0.05, global_clipnorm=0.5),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.05, weight_decay_rate=0.01),
    "LARC": lambda: keras_lso.LARC(KERAS.SGD(0.5, momentum=0.9), eta=0.02),
    "LARC, scale": lambda: keras_lso.LARC(KERAS.Adam(0.5), eta=0.02, mode="scale"),
}
POLICIES = {
    "dynamic": lambda: loss_scales.DynamicLossScale(2.0**10, increment_period=3),
    "LogMax": loss_scales.LogMaxLossScale,
    "small": lambda: loss_scales.FixedLossScale(2.0**-10),
}


def arrays(seed):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype("float32") for shape in SHAPES]


def sharded_by_fsdp(tensors):
    module = torch.nn.ParameterList(map(torch.nn.Parameter, tensors))
    network = torch.nn.Sequential(module)
    fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    return list(network.parameters())


def sharded_over(mesh_shape, *placements):
    """Returns a function that shards a list of tensors."""
    mesh = init_device_mesh("cpu", mesh_shape)

    def distribute(tensors):
        return [
            torch.nn.Parameter(
                distribute_tensor(t, mesh, _of(placements, t), src_data_rank=None)
            )
            for t in tensors
        ]

    return distribute


def _of(placements, tensor):
    # One that has no such axis is replicated.
    return [
        p if p.is_replicate() or p.dim < tensor.ndim else Replicate()
        for p in placements
    ]


def gradient_of(parameter, whole):
    if not isinstance(parameter, DTensor):
        return whole.clone()
    return distribute_tensor(
        whole, parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def overflow(grads, step):
    """Puts an inf or a NaN into one element, and so into one process's shard."""
    grad = grads[step % len(grads)]
    grad.view(-1)[-1 if step % 2 else 0] = torch.nan if step % 3 else torch.inf


def train(parameters, optimizer, dtype):
    """Returns the weights and the optimizer's variables after steps, some of inf."""
    variables = [keras.Variable(p) for p in parameters]
    for step in range(STEPS):
        grads = [torch.from_numpy(g) * 2.0**10 for g in arrays(step + 1)]
        grads = [g.to(getattr(torch, dtype)) for g in grads]
        if step in (3, 4, 8):
            overflow(grads, step)
        with torch.no_grad():
            optimizer.apply(
                [gradient_of(*pair) for pair in zip(parameters, grads, strict=True)],
                variables,
            )
    return [v.value.detach() for v in (*variables, *optimizer.variables)]


def compare(layout, optimizer_name, policy, dtype, masters="auto", slots=None):
    """Returns differences from a run on whole tensors, and tensors without shards."""

    def make(slot_dtype):
        return keras_lso.LossScaleOptimizer(
            OPTIMIZERS[optimizer_name](),
            loss_scale=POLICIES[policy](),
            master_weights=masters,
            slot_dtype=slot_dtype,
        )

    tensors = [torch.from_numpy(w).to(getattr(torch, dtype)) for w in arrays(0)]
    # Two processes hold the halves of a block, and its slots stay in bfloat16.
    of_whole = "bfloat16" if slots and layout == "dim 1" else slots
    whole = [torch.nn.Parameter(t.clone()) for t in tensors]
    alone = train(whole, make(of_whole), dtype)
    together = train(layouts[layout](tensors), make(slots), dtype)
    return {
        "differences": [
            difference(*pair) for pair in zip(together, alone, strict=True)
        ],
        "plain": [t.tolist() for t in together if not isinstance(t, DTensor)],
        "shapes of plain": [list(t.shape) for t in together if type(t) is not DTensor],
        "dtypes": sorted({str(t.dtype)[6:] for t in together[len(SHAPES) :]}),
    }


def difference(tensor, alone):
    """Returns the largest one as a share of the largest magnitude."""
    # Gloo gathers no int16.
    whole, alone = tensor.double(), alone.double()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    return float((whole - alone).abs().max() / alone.abs().max().clamp(min=1e-30))


def recorded(optimizer_name):
    """Returns the number of steps whose record equals that of whole tensors."""
    tensors = [torch.from_numpy(w) for w in arrays(0)]
    whole = [torch.nn.Parameter(t.clone()) for t in tensors]
    records = []
    for parameters in (layouts["fsdp"](tensors), whole):
        optimizer = keras_lso.LossScaleOptimizer(
            OPTIMIZERS[optimizer_name](), loss_scale=loss_scales.LogMaxLossScale()
        )
        optimizer.record_steps(STEPS)
        train(parameters, optimizer, "float32")
        records.append(optimizer.read_record())
    outcomes = [record.pop("outcome") for record in records]
    alike = [outcomes[0] == outcomes[1]]
    for name in records[0]:
        # What is not finite is inf, or NaN.
        ours, theirs = (np.nan_to_num(r[name], nan=-1.0, posinf=-1.0) for r in records)
        # Of norms that are added up in another order: a few roundings.
        alike.append(np.isclose(ours, theirs, rtol=2e-6, atol=0))
    return int(np.all(alike, axis=0).sum())


def sharded_network(optimizer):
    """Returns the variables of a sharded network, with their gradients."""
    network = fully_shard(torch_training.Network(), mesh=init_device_mesh("cpu", (2,)))
    batch = problem.batch_of("none", 0, rank, 2)
    torch_training.backward(network, optimizer, batch)
    variables = [keras.Variable(p) for p in network.parameters()]
    return variables, [v.value.grad for v in variables]


def count_collectives(optimizer):
    variables, grads = sharded_network(optimizer)
    with torch.no_grad(), CommDebugMode() as counted:
        optimizer.apply(grads, variables)
    return counted.get_total_counts()


def refusals():
    """Yields the name, optimizer, gradients and variables of each invalid step."""

    def make(inner=None):
        inner = inner or KERAS.Adam(0.01)
        return keras_lso.LossScaleOptimizer(inner)

    variables, grads = sharded_network(make())
    plain = [keras.Variable(v.value.full_tensor()) for v in variables]
    yield "local gradients", make(), [g.to_local() for g in grads], variables
    yield "whole gradients", make(), [g.full_tensor() for g in grads], variables
    yield "plain variables", make(), grads, plain
    replicated = [g.redistribute(placements=[Replicate()]) for g in grads]
    yield "other placements", make(), replicated, variables
    built = KERAS.Adam(0.01)
    built.build(variables)
    yield "built before", make(built), grads, variables
    model, optimizer = torch_training.keras_network(), make()
    optimizer.build(model.trainable_variables)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    torch_training.backward(model, optimizer, problem.batch_of("none", 0, rank, 2))
    own = model.trainable_variables
    local = [v.value.grad for v in own]
    yield "Keras model", optimizer, local, own
    # It builds itself before it looks at anything.
    lars = keras_lso.LARS()
    lars.build(own)
    yield "Keras model, not scaled", lars, local, own
    yield "its parameters", make(), [p.grad for p in model.parameters()], own
    around = torch.nn.Sequential(torch_training.keras_network())
    fully_shard(around, mesh=init_device_mesh("cpu", (2,)))
    own = around[0].trainable_variables
    yield "Keras layer", make(), [v.value for v in own], own
    # It has made a step on the same variables, and decided how.
    stepped, late = make(), torch_training.keras_network()
    own = late.trainable_variables
    grads = [torch.ones_like(v.value) for v in own]
    with torch.no_grad():
        stepped.apply(grads, own)
    fully_shard(late, mesh=init_device_mesh("cpu", (2,)))
    yield "sharded after a step", stepped, grads, own


def refused(optimizer, grads, variables):
    """Returns the message, and whether nothing has changed."""

    def state():
        return [local_bits(v.value) for v in (*variables, *optimizer.variables)]

    was_built, before = optimizer.built, state()
    try:
        with torch.no_grad():
            optimizer.apply(grads, variables)
    except ValueError as error:
        return [str(error), optimizer.built == was_built and state() == before]
    return ["", False]


def local_bits(tensor):
    shard = tensor.detach()
    shard = shard.to_local() if isinstance(shard, DTensor) else shard
    return shard.numpy().tobytes()


with torch_training.process_group(rank, folder):
    layouts = {
        "fsdp": sharded_by_fsdp,
        "dim 1": sharded_over((2,), Shard(1)),
        "2 replicas": sharded_over((2, 1), Replicate(), Shard(0)),
        "1 replica": sharded_over((1, 2), Replicate(), Shard(0)),
    }
    cases = [("fsdp", name, "dynamic", "float32") for name in OPTIMIZERS]
    with_norms = ("LARS", "LAMB", "NovoGrad", "LARC", "global_clipnorm", "clipnorm")
    cases += [
        (o, n, "LogMax", "float32") for o in layouts for n in ("SGD", *with_norms)
    ]
    cases += [("fsdp", name, "small", "float32") for name in ("SGD", "LARS")]
    cases += [("fsdp", n, "dynamic", "float16") for n in ("SGD", "AdamW", *with_norms)]
    cases += [
        ("fsdp", name, "dynamic", "bfloat16", kind)
        for name in ("AdamW", "EMA", "accumulation", "Nesterov")
        for kind in ("remainder", "remainder8", "stochastic")
    ]
    cases += [
        *((o, "AdamW", "dynamic", "float32", "auto", "bfloat16") for o in layouts),
        ("fsdp", "accumulation", "dynamic", "bfloat16", "stochastic", "bfloat16"),
        ("fsdp", "EMA", "LogMax", "bfloat16", "remainder", "bfloat16"),
        ("fsdp", "LAMB, clipped", "dynamic", "float32", "auto", "bfloat16"),
        *((o, "AdamW", "dynamic", "float32", "auto", "int8") for o in layouts),
        ("fsdp", "accumulation", "dynamic", "bfloat16", "stochastic", "int8"),
        ("fsdp", "EMA", "LogMax", "bfloat16", "remainder8", "int8"),
        ("fsdp", "AdamW", "dynamic", "float16", "float32", "int8"),
        ("fsdp", "LARS", "dynamic", "float32", "auto", "int8"),
        ("fsdp", "LAMB, clipped", "dynamic", "bfloat16", "stochastic", "int8"),
    ]
    for case in cases:
        print("CASE", json.dumps([case, compare(*case)]))
    for name in ("SGD", "accumulation", "RMSprop"):
        print("RECORD", json.dumps([name, recorded(name)]))
    for name in problem.OPTIMIZERS:
        count = count_collectives(problem.make_optimizer(name))
        print("COLLECTIVES", json.dumps([name, count]))
    for name, *arguments in refusals():
        print("REFUSED", json.dumps([name, *refused(*arguments)]))
