"""One of two processes that train weights of 16 bits, with each kind of masters.

    python -m integration_tests.distributed.worker_torch_masters RANK FOLDER

Each holds a shard of the weights, or all of them and gradients that are averaged.
Prints lines of a word and JSON; see `test_torch_masters.py`.
"""

import json
import sys

import keras
import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import keras_lso
from integration_tests.distributed import torch_training
from testing import tiers

rank, folder = int(sys.argv[1]), sys.argv[2]
K = keras.optimizers
KINDS = ("float32", "remainder", "stochastic")
# Of the second one process has no row, of the first and the third one more than the
# other. The last is a chunk by itself.
SHAPES = [(3, 4), (1, 2), (5,), (70, 64), (300, 70)]
OPTIMIZERS = {
    "AdamW": lambda: K.AdamW(0.01, weight_decay=0.1),
    "Adadelta": lambda: K.Adadelta(0.5),
    "momentum": lambda: K.SGD(0.05, momentum=0.9),
    "clipped": lambda: K.Adam(0.01, global_clipnorm=0.5),
    "accumulation": lambda: K.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
    "averages": lambda: K.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "LARS": lambda: keras_lso.LARS(0.5, eeta=0.1, weight_decay_rate=0.01),
    "LAMB": lambda: keras_lso.LAMB(0.05, weight_decay_rate=0.01),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.05),
    "LARC": lambda: keras_lso.LARC(K.SGD(0.5, momentum=0.9), eta=0.02),
    "Ftrl": lambda: K.Ftrl(0.05),
}
NAMES = list(OPTIMIZERS) if tiers.is_full() else ["AdamW", "Adadelta", "LAMB"]
DTYPES = ("bfloat16", "float16") if tiers.is_full() else ("bfloat16",)


def arrays(seed):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype("float32") for shape in SHAPES]


def parameters(dtype, is_sharded):
    tensors = [torch.from_numpy(w).to(getattr(torch, dtype)) for w in arrays(0)]
    whole = torch.nn.ParameterList(map(torch.nn.Parameter, tensors))
    if is_sharded:
        fully_shard(torch.nn.Sequential(whole), mesh=init_device_mesh("cpu", (2,)))
    return list(whole)


@torch.no_grad()
def train(name, kind, dtype, is_sharded):
    """Returns an optimizer and variables after nine steps, of which two overflow."""
    variables = [keras.Variable(p) for p in parameters(dtype, is_sharded)]
    optimizer = keras_lso.LossScaleOptimizer(
        OPTIMIZERS[name](), initial_scale=4.0, master_weights=kind
    )
    for step in range(9):
        grads = [
            torch.from_numpy(g).to(getattr(torch, dtype)) for g in arrays(step + 1)
        ]
        if step in (3, 4):
            # The first and the last row, each in the shard of one process.
            grads[3][0 if step == 3 else -1] = torch.inf
        if is_sharded:
            grads = [
                distribute_tensor(
                    g, v.value.device_mesh, v.value.placements, src_data_rank=None
                )
                for g, v in zip(grads, variables, strict=True)
            ]
        optimizer.apply(grads, variables, scaled=True)
    return optimizer, variables


def whole(tensor):
    """The whole of a tensor in float32, which Gloo gathers."""
    tensor = tensor.detach().float()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def numbers_of(optimizer):
    masters = optimizer._masters
    return [whole(masters.saved(v).detach()) for v in masters.numbers]


def bits_of(tensors):
    return [t.contiguous().numpy().tobytes() for t in tensors]


def compare(name, dtype):
    """What of each kind `test_torch_masters` asks for, and the numbers of all kinds."""
    found, numbers = {}, {}
    for kind in KINDS:
        alone = train(name, kind, dtype, is_sharded=False)
        together = train(name, kind, dtype, is_sharded=True)
        pairs = [
            (numbers_of(o), [whole(v.value) for v in vs]) for o, vs in (alone, together)
        ]
        numbers[kind] = pairs[1][0]
        found[kind] = {
            "is as alone": bits_of(pairs[0][1]) == bits_of(pairs[1][1]),
            "distance": max(
                float((a - b).abs().max())
                for a, b in zip(*(p[0] for p in pairs), strict=True)
            ),
            "skipped": int(together[0].skipped_steps),
            "memory": max(
                [
                    v._value.to_local().untyped_storage().nbytes()
                    for v in together[0]._masters._stand_ins
                ],
                default=0,
            ),
        }
    is_normal = [
        n.abs() >= (2.0**-14 if dtype == "float16" else 0) for n in numbers["float32"]
    ]
    found["remainders are exact"] = all(
        torch.equal(a[mask], b[mask])
        for a, b, mask in zip(
            numbers["remainder"], numbers["float32"], is_normal, strict=True
        )
    )
    return found


def train_averaged(kind):
    """Returns this process's weights after steps on gradients that DDP averages."""
    torch.manual_seed(0)
    network = torch.nn.Linear(6, 5).to(torch.bfloat16)
    variables = [keras.Variable(p) for p in network.parameters()]
    optimizer = keras_lso.LossScaleOptimizer(
        K.AdamW(0.01), initial_scale=4.0, master_weights=kind
    )
    optimizer.build(variables)
    averaged = DistributedDataParallel(network)
    random = np.random.default_rng(rank)
    for step in range(8):
        network.zero_grad()
        x = torch.from_numpy(random.normal(size=(4, 6))).to(torch.bfloat16)
        if step == 3 and rank == 1:
            x[0, 0] = torch.inf
        optimizer.scale_loss(averaged(x).float().square().mean()).backward()
        torch_training.apply(variables, optimizer)
    state = [*variables, *optimizer.variables]
    bits = [v.value.detach().float().numpy().tobytes().hex() for v in state]
    return bits, int(optimizer.skipped_steps)


with torch_training.process_group(rank, folder):
    for name in NAMES:
        for dtype in DTYPES:
            print("SHARDS", json.dumps([name, dtype, compare(name, dtype)]))
    for kind in KINDS[1:]:
        print("AVERAGED", json.dumps([kind, train_averaged(kind)]))
