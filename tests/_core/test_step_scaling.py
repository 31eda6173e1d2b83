"""Whether a `LossScaleOptimizer` takes losses and gradients for scaled ones."""

import copy
import functools
import pickle
import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso.loss_scales import FixedLossScale
from keras_lso.mixed_precision.experimental import (
    LossScaleOptimizer as ExperimentalOptimizer,
)
from testing.compiling import jax_jit

BACKEND = keras.backend.backend()
SGD = keras.optimizers.SGD
SCALE = 8.0


def make(**options):
    options = {"initial_scale": SCALE, **options}
    return keras_lso.LossScaleOptimizer(SGD(1.0), **options)


def tensor(*values):
    return ops.convert_to_tensor(np.float32(values))


@pytest.fixture
def w():
    return keras.Variable(np.float32([4.0, 4.0]), name="w")


@pytest.fixture
def b():
    return keras.Variable(np.float32([2.0]), name="b")


def values(variable):
    return np.asarray(ops.convert_to_numpy(variable)).tolist()


def apply(optimizer, grads, variables):
    optimizer.apply(grads, variables)


def apply_gradients(optimizer, grads, variables):
    optimizer.apply_gradients(zip(grads, variables, strict=True))


def apply_by_larc(optimizer, grads, variables):
    # All variables are excluded, so that no gradient is rescaled.
    keras_lso.LARC(optimizer, exclude=["."]).apply(grads, variables)


APPLY = [apply, apply_gradients, apply_by_larc]
# What is passed on of gradients and the results of `get_unscaled_gradients`.
PASSED = {
    "originals": lambda grads, unscaled: grads,
    "clipped results": lambda grads, unscaled: [ops.clip(g, -1, 1) for g in unscaled],
}
if BACKEND == "torch":  # Elsewhere tensors share no memory.
    PASSED |= {
        "detached": lambda grads, unscaled: [g.detach() for g in grads],
        "data": lambda grads, unscaled: [g.data for g in grads],
        "view": lambda grads, unscaled: [g.view(-1) for g in grads],
    }


@pytest.mark.parametrize("passed", PASSED.values(), ids=PASSED)
@pytest.mark.parametrize("apply", APPLY)
def test_only_originals_and_their_views_count_as_scaled_after_unscaling(
    apply, passed, w, b
):
    optimizer = make()
    optimizer.scale_loss(1.0)
    grads = [tensor(SCALE, 0.0), tensor(SCALE)]
    unscaled = optimizer.get_unscaled_gradients(grads)
    assert float(ops.norm(unscaled[0])) == 1.0
    apply(optimizer, passed(grads, unscaled), [w, b])
    assert values(w) == [3.0, 4.0] and values(b) == [1.0]


def test_deprecated_class_tells_scaled_pairs_from_unscaled_pairs(w):
    with pytest.warns(DeprecationWarning):
        optimizer = ExperimentalOptimizer(SGD(1.0), SCALE)
    scaled = tensor(SCALE, 0.0)
    [unscaled] = optimizer.get_unscaled_gradients([scaled])
    for grad in (scaled, unscaled):
        optimizer.apply_gradients([(grad, w)])
    assert values(w) == [2.0, 4.0]


def test_traced_step_applies_original_gradients_as_scaled(w, compiled):
    optimizer = make()
    optimizer.build([w])

    def step(x):
        optimizer.scale_loss(1.0)
        grads = [x * SCALE]
        optimizer.get_unscaled_gradients(grads)
        optimizer.apply(grads, [w])

    step = compiled(step, [w, *optimizer.variables])
    for _ in range(2):
        step(tensor(1.0, 0.0))
    assert values(w) == [2.0, 4.0]


def test_sparse_and_missing_gradients_count_as_scaled_after_get_unscaled_gradients(
    sparse_gradient, b
):
    table = keras.Variable(np.ones((3, 2), "float32"))
    optimizer = make()
    optimizer.scale_loss(1.0)
    grads = [sparse_gradient(np.full((1, 2), SCALE, "float32"), [1], (3, 2)), None]
    optimizer.get_unscaled_gradients(grads)
    optimizer.apply(grads, [table, b])
    assert values(table) == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert values(b) == [2.0]


def test_mixed_scaled_and_unscaled_gradients_are_rejected(w, b):
    optimizer = make()
    optimizer.scale_loss(1.0)
    grads = [tensor(SCALE, 0.0), tensor(SCALE)]
    unscaled = optimizer.get_unscaled_gradients(grads)
    with pytest.raises(ValueError, match="`scaled=True`.* 1 of 2 gradients"):
        optimizer.apply([grads[0], unscaled[1]], [w, b])
    assert values(w) == [4.0, 4.0] and values(b) == [2.0]
    # Both were still recognized, and an argument may decide.
    optimizer.apply(grads, [w, b])
    optimizer.apply(grads, [w, b], scaled=False)
    assert values(w) == [3.0 - SCALE, 4.0]


def test_next_scale_loss_makes_original_gradients_count_as_scaled(w):
    optimizer = make()
    grads = [tensor(SCALE, 0.0)]
    for _ in range(2):
        optimizer.scale_loss(1.0)
        optimizer.apply(optimizer.get_unscaled_gradients(grads), [w])
    optimizer.scale_loss(1.0)
    optimizer.apply(grads, [w])
    assert values(w) == [1.0, 4.0]


@pytest.mark.skipif(BACKEND != "torch", reason="Only PyTorch's tensors can be written")
def test_gradients_written_after_unscaling_are_rejected(w):
    """They may still be scaled, or hold the result."""
    ways = {
        "clipped": lambda grad, unscaled: grad.mul_(0.5),
        "unscaled": lambda grad, unscaled: grad.copy_(unscaled),
    }
    for name, write in ways.items():
        grad = tensor(SCALE, 0.0)
        optimizer = make()
        optimizer.scale_loss(1.0)
        [unscaled] = optimizer.get_unscaled_gradients([grad])
        write(grad, unscaled)
        before = values(w)
        for tensor_of_grad in grad, grad.detach():
            with pytest.raises(ValueError, match="was written to after"):
                optimizer.apply([tensor_of_grad], [w])
        assert values(w) == before
        optimizer.apply([grad], [w], scaled=name == "clipped")
    assert values(w) == [3.0 - 0.5, 4.0]


def test_only_last_unscaled_gradients_are_tracked():
    optimizer = make()
    for _ in range(3):
        optimizer.get_unscaled_gradients([tensor(1.0, 2.0), None])
    assert len(optimizer._scaling._unscaled) <= 1


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_optimizer_is_copyable_and_picklable_after_unscaling(copied, w):
    optimizer = make()
    optimizer.build([w])
    grads = [tensor(SCALE, 0.0)]
    optimizer.get_unscaled_gradients(grads)
    assert copied(optimizer).get_config() == optimizer.get_config()
    assert pickle.loads(pickle.dumps(optimizer)).get_config()["name"] == optimizer.name


NO_LOSSES = {
    "words": "nonsense",
    "nothing": None,
    "dict": {"loss": 1.0},
    "list": [1.0, 2.0],
}


@pytest.mark.parametrize("loss", NO_LOSSES.values(), ids=NO_LOSSES)
@pytest.mark.parametrize("scale", ["scale_loss", "get_scaled_loss"])
def test_invalid_loss_is_rejected_and_changes_nothing(scale, loss, w):
    optimizer = make()
    optimizer.get_scaled_loss(1.0)
    grads = optimizer.get_unscaled_gradients([tensor(SCALE, 0.0)])
    with pytest.raises(
        TypeError, match="must be a tensor or a number.*Received: loss="
    ):
        getattr(optimizer, scale)(loss)
    optimizer.apply(grads, [w])
    assert values(w) == [3.0, 4.0]


def test_complex_loss_is_rejected():
    loss = ops.convert_to_tensor(np.complex64(1 + 1j))
    with pytest.raises(ValueError, match="must be real"):
        make().scale_loss(loss)


LOSSES = {
    "int": 3,
    "NumPy": np.float64(3.0),
    "array": np.float32([3.0]),
    "variable": lambda: keras.Variable(3.0),
    "half": lambda: ops.cast(tensor(3.0), "float16"),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_numbers_arrays_and_variables_are_scaled_as_losses(loss):
    scaled = make().scale_loss(loss() if callable(loss) else loss)
    assert float(ops.sum(scaled)) == 3.0 * SCALE


LINES = {
    "tensorflow": "with tf.GradientTape() as tape",
    "jax": "with keras.StatelessScope",
    "torch": "optimizer.scale_loss(loss).backward()",
}


def warned(function):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function()
    return [w for w in seen if "no loss has been multiplied" in str(w.message)]


@pytest.mark.parametrize("apply", [apply, apply_gradients])
def test_gradients_of_unscaled_loss_warn_once(apply, w):
    optimizer = make()
    [warning] = warned(lambda: [apply(optimizer, [tensor(1, 1)], [w]) for _ in "abc"])
    assert LINES[BACKEND] in str(warning.message)
    assert "`apply(..., scaled=False)`" in str(warning.message)
    assert warning.filename == __file__


SILENT = {
    "argument": lambda o, w: o.apply([tensor(1, 1)], [w], scaled=False),
    "minimized": lambda o, w: o.minimize(lambda: ops.sum(w), [w]),
    "scaled": lambda o, w: (o.scale_loss(1.0), o.apply([tensor(1, 1)], [w])),
    "unscaled": lambda o, w: o.apply(o.get_unscaled_gradients([tensor(1, 1)]), [w]),
}


@pytest.mark.parametrize("use", SILENT.values(), ids=SILENT)
def test_gradients_of_known_scaling_do_not_warn(use, w):
    assert not warned(lambda: use(make(), w))


def test_gradients_under_scale_of_one_do_not_warn(w):
    optimizer = make(loss_scale=FixedLossScale(1.0), initial_scale=None)
    assert not warned(lambda: optimizer.apply([tensor(1, 1)], [w]))


@pytest.mark.parametrize(
    "arguments, error",
    [
        (lambda w: ([w], [tensor(1, 1)]), TypeError),
        (lambda w: ([tensor(1, 1)],), ValueError),
        (lambda w: ([], [w]), ValueError),
    ],
    ids=["swapped", "not built", "too few"],
)
def test_wrong_arguments_raise_before_warning_of_unscaled_loss(arguments, error, w):
    def apply_wrongly():
        with pytest.raises(error):
            make().apply(*arguments(w))

    assert not warned(apply_wrongly)


def test_keras_fit_does_not_warn_of_unscaled_loss():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(make(), loss="mse")
    x = np.ones((2, 1), "float32")
    assert not warned(lambda: model.fit(x, x, verbose=0))


READS = {
    "scale_loss": lambda o, x: ops.sum(o.scale_loss(x)),
    "get_scaled_loss": lambda o, x: ops.sum(o.get_scaled_loss(lambda: x)()),
    "get_unscaled_gradients": lambda o, x: ops.sum(o.get_unscaled_gradients([x])[0]),
    "loss_scale": lambda o, x: ops.sum(x * o.loss_scale),
    "loss_scale_policy": lambda o, x: ops.sum(x * o.loss_scale_policy()),
}


@pytest.mark.skipif(BACKEND != "jax", reason="Elsewhere functions read variables")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_scale_that_is_compiled_in_warns(read, w):
    import jax

    optimizer, x = make(), tensor(1, 2)
    loss = functools.partial(read, optimizer)
    for transform in (jax.jit, jax.checkpoint, lambda f: jax.jit(jax.grad(f))):
        with pytest.warns(UserWarning, match="compiled in as a constant.*once") as seen:
            transform(loss)(x)
        assert LINES["jax"] in str(seen[0].message)
        assert seen[0].filename == __file__
    # Eager code reads the scale of this step, and so does a scope with the state.
    warnings.simplefilter("error")
    for transform in (jax.grad, jax.vmap, jax.value_and_grad, jax.hessian):
        transform(loss)(x)
    jax_jit(loss, [*optimizer.variables])(x)
    optimizer.minimize(lambda: read(optimizer, w), lambda: [w])
    fixed = make(dynamic=False), keras_lso.GuardedOptimizer(SGD(1.0))
    for other in fixed:
        jax.jit(functools.partial(read, other))(x)


PARTS = {
    "inner_optimizer": lambda: SGD(0.5),
    "loss_scale_policy": lambda: FixedLossScale(64.0),
    "master_weights": lambda: False,
    "spike_guard": lambda: keras_lso.SpikeGuard(),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_optimizer_cannot_be_replaced(name):
    optimizer = make()
    part = getattr(optimizer, name)
    setattr(optimizer, name, part)
    with pytest.raises(AttributeError, match=f"`{name}` .* cannot be replaced"):
        setattr(optimizer, name, PARTS[name]())
    assert getattr(optimizer, name) is part


def test_inner_optimizer_of_larc_cannot_be_replaced():
    optimizer = keras_lso.LARC(SGD(0.5))
    with pytest.raises(AttributeError, match="`inner_optimizer` of a LARC"):
        optimizer.inner_optimizer = SGD(1.0)


@pytest.mark.parametrize("has_stepped", [False, True])
def test_apply_rejects_loss_scale_factor_set_later_on_inner_optimizer(has_stepped, w):
    optimizer = make()
    optimizer.scale_loss(1.0)
    if has_stepped:
        optimizer.apply([tensor(0.0, 0.0)], [w])
    optimizer.inner_optimizer.loss_scale_factor = 4.0
    with pytest.raises(ValueError, match="loss_scale_factor=4.0, by which"):
        optimizer.apply([tensor(SCALE, 0.0)], [w])
    assert values(w) == [4.0, 4.0]
    optimizer.inner_optimizer.loss_scale_factor = None
    optimizer.apply([tensor(SCALE, 0.0)], [w])
    assert values(w) == [3.0, 4.0]


@pytest.mark.parametrize("scale", [2.0**126, 2.0**127, np.inf, np.nan])
def test_next_step_clamps_large_assigned_scale_and_skips_nan_scale(scale, w, compiled):
    """Beyond 2**126 its inverse is no normal float32, as the docs say."""
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([w])
    before = ops.convert_to_numpy(w) + 0
    step = compiled(
        lambda g: optimizer.apply([g], [w], scaled=True), [w, *optimizer.variables]
    )
    optimizer.dynamic_scale.assign(scale)
    largest = min(scale, 2.0**126) if scale == scale else 1.0
    step(ops.full(w.shape, np.float32(largest)))
    moved = before - ops.convert_to_numpy(w)
    if np.isnan(scale):
        assert np.isnan(float(optimizer.loss_scale))
        assert int(optimizer.skipped_steps) == 1
    else:
        assert float(optimizer.loss_scale) == 2.0**24
        assert int(optimizer.iterations) == 1
    right = largest / scale
    # PyTorch's CPU keeps subnormal numbers.
    allowed = [right] if right == 1.0 else [0.0, right]
    assert set(moved.ravel().tolist()) <= set(allowed)
