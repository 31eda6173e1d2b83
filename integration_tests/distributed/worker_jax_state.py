"""Trains with `shard_state=True` on four devices of one JAX process.

    python -m integration_tests.distributed.worker_jax_state FOLDER

Prints lines of a word and JSON; see `test_jax_state.py`.
"""

import json
import math
import pathlib
import sys

import jax
import keras
import numpy as np

import keras_lso
from integration_tests.distributed.jax_meshes import CPUS, data_parallel

FOLDER = pathlib.Path(sys.argv[1])
INPUTS = 64
BATCH = 8


def distribute(devices=4):
    """Each of the devices has its own batch, or there is no distribution."""
    distribution = data_parallel(CPUS[:devices]) if devices else None
    keras.distribution.set_distribution(distribution)


def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(6 * BATCH, INPUTS)).astype("float32")
    return x, x[:, :3].sum(axis=1, keepdims=True)


def new_model(make, policy="bfloat16", wrap=keras_lso.GuardedOptimizer, **options):
    """Returns a model whose first two kernels are large, and the rest small."""
    # Orbax finds variables by their paths, in which Keras counts what it makes.
    distribution = keras.distribution.distribution()
    keras.utils.clear_session()
    keras.distribution.set_distribution(distribution)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((INPUTS,)),
            keras.layers.Dense(128, activation="tanh", name="first"),
            # Four devices divide its first axis alone.
            keras.layers.Dense(66, activation="tanh", name="second"),
            keras.layers.Dense(1, name="last"),
        ],
        name="model",
    )
    model.compile(wrap(make(), **options), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model, epochs=1, **options):
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **options}
    return model.fit(*data(), epochs=epochs, **options).history["loss"]


def held(model):
    """Returns the variables of the optimizer that hold a value."""
    # The placeholders of 16-bit weights do not.
    return [v for v in model.optimizer.variables if v.value is not None]


def bits(model):
    return [np.asarray(v.value).tobytes() for v in [*model.weights, *held(model)]]


def layouts(model):
    """Returns the shape of each variable of the optimizer, and of a device's part."""
    return [(v.shape, v.value.sharding.shard_shape(v.shape)) for v in held(model)]


def bytes_a_weight(model):
    """Returns the bytes of large weights' state in one device, for each weight."""
    large = {v.shape for v in model.weights if math.prod(v.shape) >= 2**12}
    kept = [v for v in held(model) if v.shape in large or v.name.endswith("_scales")]
    kept = [v.value for v in kept]
    local = sum(v.addressable_shards[0].data.nbytes for v in kept)
    return local / sum(map(math.prod, large))


def adam(**options):
    return lambda: keras.optimizers.AdamW(0.01, **options)


# Its first steps overflow.
SCALING = {
    "policy": "mixed_float16",
    "wrap": keras_lso.LossScaleOptimizer,
    "initial_scale": 2.0**18,
}
ACCUMULATING = {
    "gradient_accumulation_steps": 2,
    "ema_overwrite_frequency": 3,
    "clipvalue": 0.1,
}
INT8 = {"slot_dtype": "int8"}
KINDS = {
    "float32": (adam(), {"policy": "float32"}),
    "masters": (adam(), {}),
    "remainder": (adam(), {"master_weights": "remainder"}),
    "stochastic": (adam(), {"master_weights": "stochastic", "slot_dtype": "bfloat16"}),
    "mixed_float16": (adam(), {"slot_dtype": "bfloat16", **SCALING}),
    "stochastic, int8": (adam(), {"master_weights": "stochastic", **INT8}),
    "24 bits, int8": (adam(), {"master_weights": "remainder8", **INT8}),
    "int8, accumulation": (adam(use_ema=True, **ACCUMULATING), INT8),
    "averages and accumulation": (adam(use_ema=True, **ACCUMULATING), {}),
    # Norms, which are sums of the devices' parts in another order.
    "LAMB": (lambda: keras_lso.LAMB(0.01), {"policy": "float32"}),
    "LAMB, int8": (lambda: keras_lso.LAMB(0.01), {"policy": "float32", **INT8}),
    "guard and clipping": (
        adam(global_clipnorm=0.1),
        {"policy": "float32", "spike_guard": keras_lso.SpikeGuard(1.0, 4, 2)},
    ),
}

distribute()
for name, (make, options) in KINDS.items():
    whole = new_model(make, **options)
    model = new_model(make, **options, shard_state=True)
    built, expected = layouts(model), fit(whole, epochs=2)
    losses = fit(model, epochs=2)
    farthest = max(
        np.max(np.abs(np.asarray(a.value, "float32") - np.asarray(b.value, "float32")))
        for a, b in zip(whole.weights, model.weights, strict=True)
    )
    kinds = {
        "bytes": [bytes_a_weight(whole), bytes_a_weight(model)],
        "layouts": built,
        "keeps layouts": layouts(model) == built,
        "weights are whole": all(v.value.is_fully_replicated for v in model.weights),
        "losses": [losses, expected],
        "is equal": bits(model) == bits(whole),
        "farthest": float(farthest),
        "skipped": int(model.optimizer.skipped_steps),
    }
    print("KIND", json.dumps([name, kinds]))


# --- Files ----------------------------------------------------------------------------

MAKE, OPTIONS = KINDS["24 bits, int8"]
# By the number of devices, 0 for no distribution, and whether state is sharded.
SETUPS = {
    "four, sharded": (4, True),
    "four, whole": (4, False),
    "two, sharded": (2, True),
    "one, sharded": (1, True),
    "no distribution": (0, False),
}


def trained(devices, is_sharded):
    distribute(devices)
    return new_model(MAKE, **OPTIONS, shard_state=is_sharded)


def orbax(model):
    return keras.callbacks.OrbaxCheckpoint(
        str(FOLDER / "orbax"), save_on_background=False
    )


source = trained(4, True)
fit(source)
recorded = keras_lso.callbacks.StepRecord(FOLDER / "record.jsonl")
fit(trained(4, True), callbacks=[recorded])
steps = (FOLDER / "record.jsonl").read_text().splitlines()
print("RECORD", json.dumps([json.loads(step)["step"] for step in steps]))
source.save_weights(FOLDER / "sharded.weights.h5")
source.save(FOLDER / "sharded.keras")
whole = trained(4, False)
fit(whole)
whole.save_weights(FOLDER / "whole.weights.h5")
expected = bits(source)
for path in ("sharded.weights.h5", "whole.weights.h5"):
    for setup, (devices, is_sharded) in SETUPS.items():
        model = trained(devices, is_sharded)
        before = layouts(model)
        model.load_weights(FOLDER / path)
        is_kept = layouts(model) == before
        print("FILE", json.dumps([path, setup, bits(model) == expected, is_kept]))
distribute(4)
loaded = keras.saving.load_model(FOLDER / "sharded.keras")
is_kept = loaded.optimizer.shard_state and layouts(loaded) == layouts(source)
print("FILE", json.dumps(["model", "four", bits(loaded) == expected, is_kept]))
fit(source)
fit(loaded)
print("FILE", json.dumps(["model", "on", bits(loaded) == bits(source), True]))
if hasattr(keras.callbacks, "OrbaxCheckpoint"):
    source = trained(4, True)
    fit(source, callbacks=[orbax(source)])
    again = trained(4, True)
    before = layouts(again)
    again.load_weights(str(FOLDER / "orbax"))
    is_same = bits(again) == bits(source)
    print("FILE", json.dumps(["Orbax", "four", is_same, layouts(again) == before]))


# --- Steps outside of `fit` -----------------------------------------------------------


def gradients(model):
    random = np.random.default_rng(1)
    return [random.normal(size=v.shape).astype("float32") for v in model.weights]


def eagerly(model):
    model.optimizer.apply(gradients(model), model.trainable_variables)


def jitted(model):
    optimizer, weights = model.optimizer, model.trainable_variables
    state = [v.value for v in weights], [v.value for v in optimizer.variables]
    shardings = jax.tree.map(lambda value: value.sharding, state)
    step = jax.jit(
        lambda trainable, own, grads: optimizer.stateless_apply(own, grads, trainable),
        out_shardings=shardings,
    )
    new = step(*state, gradients(model))
    assert jax.tree.map(lambda value: value.sharding, new) == shardings
    for variables, values in zip((weights, optimizer.variables), new, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


for name in ("float32", "stochastic, int8"):
    make, options = KINDS[name]
    distribute()
    for way in (eagerly, jitted):
        whole = new_model(make, **options)
        model = new_model(make, **options, shard_state=True)
        before = layouts(model)
        for one in (whole, model):
            way(one)
        is_kept = layouts(model) == before
        print("WAY", json.dumps([name, way.__name__, bits(model) == bits(whole)]))
        assert is_kept, way
    # Without sums, another number of devices changes nothing.
    for devices in (2, 1):
        distribute(devices)
        model = new_model(make, **options, shard_state=True)
        jitted(model)
        print("WAY", json.dumps([name, devices, bits(model) == bits(whole)]))
    distribute()


# --- Model parallelism, and what is refused -------------------------------------------

mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], CPUS[:4])
layout_map = keras.distribution.LayoutMap(mesh)
layout_map[".*first.*kernel"] = (None, "model")
layout_map[".*second.*kernel"] = ("batch", None)
by_layouts = keras.distribution.ModelParallel(
    layout_map=layout_map, batch_dim_name="batch"
)
keras.distribution.set_distribution(by_layouts)
model = new_model(adam(), shard_state=True)
built = layouts(model)
fit(model)
print("MODEL", json.dumps([sorted(set(built)), layouts(model) == built]))

# FSDP, as on the page "Scaling out".
distribute()
whole = new_model(adam(), "float32")
mesh = keras.distribution.DeviceMesh((4,), ["batch"], CPUS[:4])
layout_map = keras.distribution.LayoutMap(mesh)
layout_map[".*(first|second).*kernel"] = ("batch", None)
fsdp = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
keras.distribution.set_distribution(fsdp)
model = new_model(adam(), "float32")
losses = fit(model, epochs=2), fit(whole, epochs=2)
parts = [v.value.sharding.shard_shape(v.shape) for v in model.weights]
print("FSDP", json.dumps([losses, bytes_a_weight(model), parts]))

# The gradient of an embedding, whose rows XLA gathers if a batch is small.
distribute()
tokens = np.random.default_rng(0).integers(64, size=(6 * BATCH, 32))
embedded = []
for is_sharded in (False, True):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    layers = [keras.layers.Embedding(8192, INPUTS), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(1)])
    optimizer = keras_lso.GuardedOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9), shard_state=is_sharded
    )
    model.compile(optimizer, loss="mse")
    model.fit(tokens, data()[1], batch_size=BATCH, shuffle=False, verbose=0)
    embedded.append(model)
whole, model = ([np.asarray(v.value) for v in m.weights] for m in embedded)
farthest = max(np.max(np.abs(a - b)) for a, b in zip(whole, model, strict=True))
moved = embedded[1].optimizer.inner_optimizer.variables[2].value
parts = [moved.shape, moved.sharding.shard_shape(moved.shape)]
print("EMBEDDING", json.dumps([float(farthest), parts]))

# Slots in 8 bits, if no device has a part of a block.


def slots_of(weight, **options):
    optimizer = keras_lso.GuardedOptimizer(
        keras.optimizers.SGD(momentum=0.9), slot_dtype="int8", **options
    )
    optimizer.build([weight])
    slots = [v for v in optimizer.variables if "momentum" in v.path]
    return [[v.dtype, v.value.sharding.shard_shape(v.shape)] for v in slots]


distribute()
# The first axis that four devices divide is the last, but for the last weight.
for shape in [(66, 128), (66, 256), (68, 128)]:
    weight = keras.Variable(np.zeros(shape), dtype="float32")
    print("SLOTS", json.dumps([shape, slots_of(weight, shard_state=True)]))
keras.distribution.set_distribution(by_layouts)
for shape in [(64, 64), (64, 128)]:
    weight = keras.Variable(np.zeros(shape), dtype="float32", name="first_kernel")
    print("SLOTS", json.dumps([["columns", *shape], slots_of(weight)]))

# A layer that is so large that Keras compiles what initializes its variables.
distribute()
large = keras.Variable(np.zeros((2**12, 2**12), "uint8"), dtype="bfloat16")
for is_sharded in (False, True):
    optimizer = keras_lso.GuardedOptimizer(
        keras.optimizers.SGD(), shard_state=is_sharded
    )
    optimizer.build([large])
    [master] = [v.value for v in optimizer.variables if v.shape == large.shape]
    part = master.sharding.shard_shape(master.shape)
    print("LARGE", json.dumps([is_sharded, part]))


def refusal(variable, inner):
    """Returns the error of `build`."""
    optimizer = keras_lso.GuardedOptimizer(inner, shard_state=True)
    try:
        optimizer.build([variable])
    except ValueError as error:
        return str(error)
    return "none"


built = keras.optimizers.SGD()
built.build([large])
print("REFUSED", json.dumps(["built", refusal(large, built)]))
distribute(0)
early = keras.Variable(np.zeros((64, 64)))
print("REFUSED", json.dumps(["undistributed", refusal(early, keras.optimizers.SGD())]))
distribute()
print("REFUSED", json.dumps(["early", refusal(early, keras.optimizers.SGD())]))
