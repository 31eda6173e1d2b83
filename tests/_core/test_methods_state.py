"""Slots and weights of an optimizer, as tf.keras named and ordered them."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LARC, LARS, LossScaleOptimizer, NovoGrad
from keras_lso.mixed_precision import experimental
from testing.keras_versions import multi_optimizer, needs_multi_optimizer
from testing.trained_optimizers import saved

BACKEND = keras.backend.backend()


def adam(**arguments):
    return keras.optimizers.Adam(0.5, **arguments)


MAKERS = {
    "modern": lambda: LossScaleOptimizer(adam(), initial_scale=8),
    "experimental": lambda: experimental.LossScaleOptimizer(adam(), 8),
    "LARS": lambda: LARS(0.5),
    "LARC": lambda: LossScaleOptimizer(LARC(adam()), initial_scale=8),
}


@pytest.fixture(params=MAKERS)
def optimizer(request):
    return MAKERS[request.param]()


@pytest.fixture
def weights():
    return [keras.Variable([1.0, 2.0], name="kernel"), keras.Variable(3.0, name="bias")]


def step(optimizer, weights):
    def loss():
        return sum(ops.sum(w * w) for w in weights)

    optimizer.minimize(loss, weights)


def names(variables):
    return [v.name for v in variables]


SLOTS = {
    "SGD": ([], {}),
    "SGD with momentum": (["momentum"], {"momentum": 0.9}),
    "Adam": (["m", "v"], {}),
    "Adam with amsgrad": (["m", "v", "vhat"], {"amsgrad": True}),
    "RMSprop with both": (["rms", "momentum", "mg"], {"momentum": 1, "centered": True}),
    "Adadelta": (["accum_grad", "accum_var"], {}),
    "Adamax": (["m", "v"], {}),
    "Ftrl": (["accumulator", "linear"], {}),
    "Lion": (["m"], {}),
    "Lamb": (["momentum", "velocity"], {}),
}


@pytest.mark.parametrize("kind", SLOTS)
def test_slots_have_names_of_tf_keras(kind, weights):
    expected, arguments = SLOTS[kind]
    inner = getattr(keras.optimizers, kind.split()[0])(0.5, **arguments)
    optimizer = LossScaleOptimizer(inner)
    optimizer.build(weights)
    assert optimizer.get_slot_names() == expected
    slots = [optimizer.get_slot(w, name) for name in expected for w in weights]
    assert len({id(slot) for slot in slots}) == len(slots)
    for slot, w in zip(slots, weights * len(expected), strict=True):
        assert any(slot is v for v in optimizer.variables)
        assert slot.name.startswith(f"{w.name}_")
        assert tuple(slot.shape) == tuple(w.shape)
    if kind == "Ftrl":  # by variable, the others by slot
        assert names(optimizer.weights)[2] == "kernel_linear"


@pytest.mark.parametrize("make", [LARS, keras.optimizers.Lamb], ids=["LARS", "Lamb"])
@pytest.mark.parametrize("order", [1, -1])
def test_get_slot_distinguishes_variable_names_with_same_prefix(make, order):
    # Variables without a name are called `variable`, `variable_1`, ...
    weights = [keras.Variable([1.0, 2.0], name=n) for n in ("w", "w_1")][::order]
    optimizer = make()
    optimizer.build(weights)
    if make is not LARS:
        optimizer = LossScaleOptimizer(optimizer)
        optimizer.build(weights)
    assert "1_momentum" not in optimizer.get_slot_names()
    for w in weights:
        assert optimizer.get_slot(w, "momentum").name == f"{w.name}_momentum"


def test_slots_of_float16_variables_belong_to_their_masters():
    half = [keras.Variable([1.0, 2.0], dtype="float16", name="w")]
    optimizer = LossScaleOptimizer(adam(), initial_scale=8)
    step(optimizer, half)
    assert optimizer.get_slot_names() == ["m", "v"]
    assert optimizer.get_slot(half[0], "m").dtype == "float32"
    assert np.all(np.array(optimizer.get_slot(half[0], "v")) > 0)


def test_subclass_overrides_method_of_tf_keras_and_calls_super():
    class Named(NovoGrad):
        def get_slot_names(self):
            return [name.upper() for name in super().get_slot_names()]

    optimizer = Named()
    optimizer.build([keras.Variable([1.0])])
    assert optimizer.get_slot_names() == ["M", "V"]


def test_unknown_slot_raises_key_error(optimizer, weights):
    kernel, bias = weights
    for var, name, words in (
        (kernel, "m", "has not been built yet"),
        (kernel, "other", "kernel has no slot 'other'"),
        (bias, "m", "bias has no slot 'm'"),
    ):
        with pytest.raises(KeyError, match=words):
            optimizer.get_slot(var, name)
        optimizer.build([kernel])


@pytest.mark.parametrize("when", ["before", "after"])
def test_add_slot_adds_slot_once(optimizer, weights, when):
    if when == "after":
        step(optimizer, weights)
    slot = optimizer.add_slot(weights[0], "average", "ones")
    assert optimizer.add_slot(weights[0], "average") is slot
    other = optimizer.add_slot(weights[1], "average", 7.0)
    step(optimizer, weights)
    assert optimizer.get_slot(weights[0], "average") is slot
    assert optimizer.get_slot(weights[1], "average") is other
    assert optimizer.get_slot_names().count("average") == 1
    assert slot.name == "kernel_average"
    np.testing.assert_array_equal(slot.numpy(), [1.0, 1.0])
    assert float(other.numpy()) == 7.0
    for variables in (optimizer.variables, optimizer.weights, optimizer.variables()):
        assert sum(v is slot for v in variables) == 1
    assert int(optimizer.iterations) == (2 if when == "after" else 1)
    # It is saved, and loaded.
    store = saved(optimizer)
    slot.assign([0.0, 0.0])
    optimizer.load_own_variables(store)
    np.testing.assert_array_equal(slot.numpy(), [1.0, 1.0])


def test_add_weight_adds_optimizer_variable(optimizer, weights):
    optimizer.build(weights)
    weight = optimizer.add_weight("cache", (2,), "int32", "ones")
    assert weight.dtype == "int32" and not weight.trainable
    np.testing.assert_array_equal(weight.numpy(), [1, 1])
    assert optimizer.weights[-1] is weight
    assert any(v is weight for v in optimizer.variables)
    assert optimizer.add_weight("other", []).dtype == keras.config.floatx()
    assert optimizer.add_weight("third", [], trainable=True).trainable
    with pytest.raises(ValueError, match="not trainable.*on_read"):
        optimizer.add_weight("w", [], trainable=True, synchronization="on_read")


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own enums")
def test_add_weight_accepts_tensorflow_enums(optimizer):
    import tensorflow as tf

    weight = optimizer.add_weight(
        "w",
        [],
        tf.int64,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.compat.v1.VariableAggregation.ONLY_FIRST_REPLICA,
    )
    assert (weight.aggregation, weight.synchronization, weight.dtype) == (
        "only_first_replica",
        "on_read",
        "int64",
    )


def test_weights_are_iterations_and_slots(optimizer, weights):
    assert names(optimizer.weights) == ["iteration"]
    step(optimizer, weights)
    slots = [
        optimizer.get_slot(w, name)
        for name in optimizer.get_slot_names()
        for w in weights
    ]
    assert [id(v) for v in optimizer.weights] == [
        id(optimizer.iterations),
        *(id(v) for v in slots),
    ]
    assert [id(v) for v in optimizer.variables()] == [id(v) for v in optimizer.weights]
    for array, variable in zip(optimizer.get_weights(), optimizer.weights, strict=True):
        assert type(array) is np.ndarray
        np.testing.assert_array_equal(array, variable.numpy())


def test_set_weights_restores_values_of_weights_or_variables(
    optimizer, weights, snapshot
):
    step(optimizer, weights)
    expected = snapshot(optimizer.variables)
    weights_before = snapshot(optimizer.weights)
    of_weights = [a.tolist() for a in optimizer.get_weights()]
    of_all = [np.array(v.numpy()) for v in optimizer.variables]
    if hasattr(optimizer, "loss_scale"):
        # The loss scale and the count of skipped steps are no weights.
        optimizer.apply([ops.full(w.shape, np.nan) for w in weights], weights)
        step(optimizer, weights)
        optimizer.set_weights(of_weights)
        assert int(optimizer.iterations) == int(optimizer.skipped_steps) == 1
    for arrays in (of_weights, of_all):
        step(optimizer, weights)
        optimizer.set_weights(arrays)
        assert snapshot(optimizer.weights) == weights_before
    assert snapshot(optimizer.variables) == expected


WRONG = {
    "too many": (lambda a: [*a, a[-1], a[-1]], "`weights` must be a list of"),
    "a shape": (lambda a: [*a[:-2], np.ones(3), a[-1]], r"has shape \(3,\). Nothing"),
    "strings": (lambda a: [*a[:-1], np.array("x")], "takes an array of numbers"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_invalid_weights_are_rejected_without_change(
    optimizer, weights, kind, snapshot
):
    # Keras's own method assigns one after the other and stops half-way.
    step(optimizer, weights)
    arrays = [a + 1 for a in optimizer.get_weights()]
    before = snapshot(optimizer.variables)
    change, words = WRONG[kind]
    with pytest.raises((TypeError, ValueError), match=words):
        optimizer.set_weights(change(arrays))
    assert snapshot(optimizer.variables) == before


def test_set_weights_before_build_raises(optimizer):
    with pytest.raises(ValueError, match="has not yet been built"):
        optimizer.set_weights([np.array(1)])


def test_zeroing_all_variables_resets_state_but_not_loss_scale_or_rate(weights):
    """The idiom of tf.keras, which must not reset the loss scale and the rate."""
    optimizer = LossScaleOptimizer(adam(), initial_scale=8)
    step(optimizer, weights)
    optimizer.apply([ops.full(w.shape, np.nan) for w in weights], weights)
    for v in optimizer.variables():
        v.assign(np.zeros(v.shape))
    assert int(optimizer.iterations) == 0
    assert not any(w.any() for w in optimizer.get_weights())
    assert float(optimizer.loss_scale) == 4.0
    assert float(optimizer.learning_rate) == 0.5
    step(optimizer, weights)
    assert int(optimizer.iterations) == 1


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own format")
@pytest.mark.parametrize("with_weights", [False, True])
def test_tensorflow_checkpoint_restores_optimizer(
    optimizer, weights, with_weights, tmp_path, snapshot
):
    # TensorFlow saves the slots of an object with a `get_slot_names`, and then refuses
    # those that it finds among the variables as well.
    import tensorflow as tf

    step(optimizer, weights)
    parts = {"optimizer": optimizer}
    if with_weights:
        parts |= {"kernel": weights[0], "bias": weights[1]}
    path = tf.train.Checkpoint(**parts).save(str(tmp_path / "checkpoint"))
    expected = snapshot(optimizer.variables)
    step(optimizer, weights)
    tf.train.Checkpoint(**parts).restore(path).assert_existing_objects_matched()
    assert snapshot(optimizer.variables) == expected


@needs_multi_optimizer
def test_multi_optimizer_has_slots_of_each_inner_optimizer(weights):
    of_biases = keras.optimizers.SGD(0.25, momentum=0.9)
    inner = multi_optimizer(adam(), {"bias": of_biases})
    optimizer = LossScaleOptimizer(inner, initial_scale=8)
    step(optimizer, weights)
    kernel, bias = weights
    assert set(optimizer.get_slot_names()) == {"m", "v", "momentum"}
    assert optimizer.get_slot(kernel, "m").shape == (2,)
    assert optimizer.get_slot(bias, "momentum").shape == ()
    with pytest.raises(KeyError, match="bias has no slot 'm'"):
        optimizer.get_slot(bias, "m")
    # Three counts and three slots; no learning rate, which zeros would freeze.
    assert len(optimizer.get_weights()) == 6
    before = float(bias.numpy())
    for v in optimizer.variables():
        v.assign(np.zeros(v.shape))
    step(optimizer, weights)
    assert float(bias.numpy()) != before
