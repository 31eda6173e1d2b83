"""`shard_state=True` on one device, and where there is no such thing.

`integration_tests/distributed/test_jax_state.py` trains on four devices.
"""

import keras
import numpy as np
import pytest

from keras_lso import GuardedOptimizer, LossScaleOptimizer

BACKEND = keras.backend.backend()
WRAPPERS = [LossScaleOptimizer, GuardedOptimizer]
on_jax = pytest.mark.skipif(BACKEND != "jax", reason="Only JAX shards state.")


def adam():
    return keras.optimizers.Adam(0.1, use_ema=True)


@pytest.fixture
def distribution():
    """Data parallelism over one device, whose layouts are those of several."""
    devices = keras.distribution.list_devices()[:1]
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices)
    )
    yield
    keras.distribution.set_distribution(None)


@pytest.mark.skipif(BACKEND == "jax", reason="JAX shards state.")
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_other_backends_refuse_sharded_state_and_say_what_to_write(wrap):
    inner = adam()
    words = {"torch": 'FSDP2 .* "Scaling out"', "tensorflow": "keeps the whole state"}
    with pytest.raises(ValueError, match="needs the JAX backend") as error:
        wrap(inner, shard_state=True)
    error.match(words[BACKEND])
    error.match("compile=False")
    wrap(inner, shard_state=False)  # It was not wrapped.


@on_jax
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_config_has_argument_that_is_not_at_its_default(wrap):
    assert "shard_state" not in wrap(adam()).get_config()
    config = wrap(adam(), shard_state=True).get_config()
    assert config["shard_state"] is True
    assert wrap.from_config(config).get_config() == config


@on_jax
def test_one_device_without_distribution_has_plain_state():
    found = []
    for shard_state in (False, True):
        optimizer = GuardedOptimizer(adam(), shard_state=shard_state)
        weight = keras.Variable(np.ones((64, 64), "float32"))
        optimizer.apply([keras.ops.ones((64, 64))], [weight])
        found.append([str(v.value.sharding) for v in optimizer.variables])
    assert found[0] == found[1]


@on_jax
@pytest.mark.parametrize("kind", ["float32", "remainder", "stochastic"])
@pytest.mark.parametrize("shape, axis", [((64, 64), 0), ((63, 65), None)])
def test_state_of_large_weights_has_batch_axis(distribution, kind, shape, axis):
    weight = keras.Variable(np.ones(shape, "float32"), dtype="bfloat16")
    layout = weight._layout
    optimizer = GuardedOptimizer(adam(), master_weights=kind, shard_state=True)
    optimizer.build([weight])
    assert weight._layout is layout
    expected = [None, None] if axis is None else ["batch", None]
    state = [v for v in optimizer.variables if tuple(v.shape) == shape]
    # Both moments, the average, and what is kept of a master.
    assert len(state) == 3 + (kind != "stochastic")
    layouts = [getattr(v._layout, "axes", None) or v._layout.spec for v in state]
    assert [list(axes) for axes in layouts] == [expected] * len(state)


@on_jax
def test_failed_build_leaves_layouts_of_weights(distribution):
    weight = keras.Variable(np.ones((64, 64), "float32"))
    layout, inner = weight._layout, keras.optimizers.Ftrl()
    optimizer = GuardedOptimizer(inner, slot_dtype="bfloat16", shard_state=True)
    with pytest.raises(ValueError, match="slot_dtype"):
        optimizer.build([weight])
    assert weight._layout is layout
