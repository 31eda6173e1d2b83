"""`apply_gradients` as tf.keras called it: pairs, scaled or not, and by replicas."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LARS, LossScaleOptimizer
from keras_lso._backend import backend
from keras_lso.mixed_precision import experimental

SCALE = 1024.0


def sgd():
    return keras.optimizers.SGD(0.5)


# Steps of plain SGD at a rate of 0.5, all numbers exact.
MAKERS = {
    "modern": lambda: LossScaleOptimizer(sgd(), initial_scale=SCALE),
    "experimental": lambda: experimental.LossScaleOptimizer(sgd(), SCALE),
    "LARS": lambda: LARS(0.5, momentum=0.0, exclude_from_layer_adaptation=[""]),
}


@pytest.fixture(params=MAKERS)
def optimizer(request):
    return MAKERS[request.param]()


@pytest.fixture(params=["modern", "experimental"])
def scaling(request):
    return MAKERS[request.param]()


def new_variable():
    return keras.Variable([3.0, 4.0])


def values(variable):
    return np.array(ops.convert_to_numpy(variable)).tolist()


def grad(*values):
    return ops.convert_to_tensor(np.array(values, "float32"))


# --- Scaled or not ------------------------------------------------------------


@pytest.mark.parametrize("name, scale", [("modern", SCALE), ("experimental", 1.0)])
def test_class_decides_if_pairs_are_scaled_before_any_scaling(name, scale):
    optimizer, w = MAKERS[name](), new_variable()
    optimizer.apply_gradients([(grad(scale, -scale), w)])
    assert values(w) == [2.5, 4.5]
    # `minimize` says nothing about the pairs that come next.
    optimizer.minimize(lambda: ops.sum(w), [w])
    optimizer.apply_gradients([(grad(scale, -scale), w)])
    assert values(w) == [1.5, 4.5]


def test_pairs_count_as_scaled_after_scale_loss_until_unscaled(scaling):
    # Keras 3's TensorFlow trainer calls these two.
    w = new_variable()
    scaling.scale_loss(1.0)
    scaling.apply_gradients([(grad(SCALE, 0.0), w)])
    assert values(w) == [2.5, 4.0]
    scaling.get_unscaled_gradients([None])
    scaling.apply_gradients([(grad(1.0, 0.0), w)])
    assert values(w) == [2.0, 4.0]


def test_pairs_count_as_unscaled_after_get_unscaled_gradients(scaling):
    w = new_variable()
    scaling.get_scaled_loss(1.0)
    grads = scaling.get_unscaled_gradients([grad(SCALE, 0.0), None])
    assert values(grads[0]) == [1.0, 0.0] and grads[1] is None
    scaling.apply_gradients(zip(grads, [w, new_variable()], strict=True))
    assert values(w) == [2.5, 4.0]
    scaling.apply_gradients([(grad(1.0, 0.0), w)])
    assert values(w) == [2.0, 4.0]


@pytest.mark.parametrize("scaled, scale", [(True, SCALE), (False, 1.0)])
def test_scaled_argument_overrides_inference(scaling, scaled, scale):
    w = new_variable()
    scaling.apply_gradients([(grad(scale, 0.0), w)], scaled=scaled)
    scaling.get_scaled_loss(1.0)
    scaling.apply_gradients([(grad(scale, 0.0), w)], scaled=scaled)
    scaling.get_unscaled_gradients([grad(1.0, 1.0)])
    scaling.apply_gradients([(grad(scale, 0.0), w)], scaled=scaled)
    assert values(w) == [1.5, 4.0]


def test_fit_with_experimental_class_matches_plain_optimizer():
    def fit(optimizer):
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile(optimizer, "mse")
        x = np.array([[1.0, 2.0], [0.5, -1.0]], "float32")
        model.fit(x, np.zeros((2, 1)), epochs=3, verbose=0)
        return [np.array(w) for w in model.get_weights()]

    # A scale that is a power of two changes no bit of a float32 model.
    for a, b in zip(fit(MAKERS["experimental"]()), fit(sgd()), strict=True):
        np.testing.assert_array_equal(a, b)


# --- Arguments ----------------------------------------------------------------


def make_step(optimizer, w, **arguments):
    scale = SCALE if type(optimizer) is LossScaleOptimizer else 1.0
    return optimizer.apply_gradients([(grad(scale, 0.0), w)], **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "train", "experimental_aggregate_gradients": False},
        {"skip_gradients_aggregation": True},
    ],
    ids=str,
)
def test_aggregation_arguments_change_nothing_with_one_replica(optimizer, arguments):
    w = new_variable()
    for expected in ([2.5, 4.0], [2.0, 4.0]):
        assert make_step(optimizer, w, **arguments) is optimizer.iterations
        assert values(w) == expected
    make_step(optimizer, w)
    assert values(w) == [1.5, 4.0]


@pytest.mark.parametrize(
    "arguments, count",
    [
        ({}, 1),
        ({"experimental_aggregate_gradients": False}, 0),
        ({"skip_gradients_aggregation": True}, 0),
    ],
    ids=str,
)
def test_aggregated_gradients_are_not_reduced_again(
    optimizer, arguments, count, monkeypatch
):
    totals = []
    reduce = backend.reduce_gradients
    # On PyTorch nothing is called that would do nothing.
    monkeypatch.setattr(backend, "REDUCES_GRADIENTS", True)
    monkeypatch.setattr(
        backend, "reduce_gradients", lambda *args: totals.append(args) or reduce(*args)
    )
    w = new_variable()
    # The word holds for one step.
    for _ in range(2):
        make_step(optimizer, w, **arguments)
    assert len(totals) == 2 * count
    make_step(optimizer, w)
    assert len(totals) == 2 * count + 1


MALFORMED = {
    "none": lambda w: None,
    "a gradient": lambda w: [grad(1.0, 1.0)],
    "three items": lambda w: [(grad(1.0, 1.0), w, w)],
    "the wrong way round": lambda w: [(w, grad(1.0, 1.0))],
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_pairs_raise_type_error(optimizer, kind, snapshot):
    w = new_variable()
    with pytest.raises(TypeError, match="grads_and_vars"):
        optimizer.apply_gradients(MALFORMED[kind](w))
    make_step(optimizer, w)
    assert values(w) == [2.5, 4.0]


@pytest.mark.parametrize("pairs", ["none", "only None"])
def test_missing_gradients_raise_value_error(optimizer, pairs):
    w = new_variable()
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply_gradients([] if pairs == "none" else [(None, w)])
    assert int(optimizer.iterations) == 0


# --- Replicas -----------------------------------------------------------------


def calls(optimizer, w):
    def loss():
        return ops.sum(w)

    return {
        "minimize": lambda: optimizer.minimize(loss, [w]),
        "get_gradients": lambda: optimizer.get_gradients(loss, [w]),
        "get_updates": lambda: optimizer.get_updates(loss, [w]),
        "apply_gradients": lambda: optimizer.apply_gradients([(grad(1.0, 1.0), w)]),
        "skipping": lambda: optimizer.apply_gradients(
            [(grad(1.0, 1.0), w)], skip_gradients_aggregation=True
        ),
    }


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="Replicas are TensorFlow's"
)
@pytest.mark.parametrize("method", calls(None, None))
def test_cross_replica_context_is_rejected(optimizer, method):
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        w = new_variable()
        if method == "get_gradients" and isinstance(optimizer, LARS):
            pytest.skip("It touches no variable")
        with pytest.raises(RuntimeError, match="cross-replica context"):
            calls(optimizer, w)[method]()
    assert values(w) == [3.0, 4.0]
    assert not optimizer.built
