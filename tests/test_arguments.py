"""Bad input gets an error that helps, and leaves everything as it was.

Each message names the argument, what came, and what to write instead.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LossScaleOptimizer, loss_scales
from keras_lso._core.step import Gradients
from keras_lso.loss_scales import DynamicLossScale, FixedLossScale


def sgd():
    return keras.optimizers.SGD(1.0, momentum=0.5)


def refused(exception, *words):
    """Expects `exception`, with a message that holds all of `words`."""
    return _Refused(exception, words)


class _Refused:
    def __init__(self, exception, words):
        self.raises = pytest.raises(exception)
        self.exception, self.words = exception, words

    def __enter__(self):
        self.info = self.raises.__enter__()

    def __exit__(self, *details):
        handled = self.raises.__exit__(*details)
        assert self.info.type is self.exception
        message = str(self.info.value)
        for word in self.words:
            assert word in message, f"{word!r} is not in: {message}"
        return handled


# --- The constructor ---------------------------------------------------------

NOT_OPTIMIZERS = {
    "None": (None, "keras.optimizers.Adam()", "None"),
    "name": ("sgd", 'keras.optimizers.get("sgd")', "'sgd'"),
    "class": (keras.optimizers.Nadam, "such as `Nadam(...)`", "Nadam"),
    "dict": ({"class_name": "SGD"}, "keras.optimizers.Adam()", "{'class_name': 'SGD'}"),
    "list": ([keras.optimizers.SGD()], "keras.optimizers.Adam()", "of type list"),
    "number": (0.1, "keras.optimizers.Adam()", "0.1"),
    "policy": (FixedLossScale(8), "keras.optimizers.Adam()", "FixedLossScale("),
}


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "inner, instead, received", NOT_OPTIMIZERS.values(), ids=NOT_OPTIMIZERS
)
def test_what_is_not_an_optimizer_is_refused(inner, instead, received):
    with refused(TypeError, "`inner_optimizer`", "Received", received, instead):
        LossScaleOptimizer(inner)


@pytest.mark.parametrize(
    "wrapper", [LossScaleOptimizer, keras.optimizers.LossScaleOptimizer]
)
def test_a_loss_scale_optimizer_inside_another_is_refused(wrapper):
    inner = wrapper(sgd(), initial_scale=16.0)
    with refused(
        TypeError,
        "`inner_optimizer`",
        "must not be a LossScaleOptimizer",
        "Pass its `inner_optimizer` instead",
        "Received",
    ):
        LossScaleOptimizer(inner)
    assert float(inner.scale_loss(1.0)) == 16.0


@pytest.mark.one_backend
@pytest.mark.parametrize("dynamic", [2.0**15, 1, 0, None, "dynamic", np.True_])
def test_dynamic_must_be_a_bool(dynamic):
    with refused(
        TypeError,
        "`dynamic`",
        f"dynamic={dynamic!r}",
        "True or False",
        "initial_scale=",
        "dynamic=False",
    ):
        LossScaleOptimizer(sgd(), dynamic)


@pytest.mark.one_backend
def test_a_fixed_scale_must_be_given():
    with refused(
        ValueError, "`dynamic=False`", "`initial_scale`", "initial_scale=1024"
    ):
        LossScaleOptimizer(sgd(), dynamic=False)


@pytest.mark.one_backend
def test_a_fixed_scale_has_no_growth_steps():
    with refused(
        ValueError,
        "`dynamic=False`",
        "`dynamic_growth_steps` must not be given",
        "dynamic_growth_steps=7",
    ):
        LossScaleOptimizer(
            sgd(), dynamic=False, initial_scale=8.0, dynamic_growth_steps=7
        )


@pytest.mark.one_backend
@pytest.mark.parametrize("bound", ["min_scale", "max_scale"])
def test_a_fixed_scale_has_no_bounds(bound):
    with refused(
        ValueError, "`dynamic=False`", f"`{bound}`", f"{bound}=2.0", "must not be given"
    ):
        LossScaleOptimizer(sgd(), dynamic=False, initial_scale=2.0, **{bound: 2.0})


BAD_SCALES = {
    "zero": (0.0, ValueError),
    "integer zero": (0, ValueError),
    "negative zero": (-0.0, ValueError),
    "negative": (-8.0, ValueError),
    "nan": (float("nan"), ValueError),
    "inf": (float("inf"), ValueError),
    "negative inf": (float("-inf"), ValueError),
    "numpy nan": (np.float32("nan"), ValueError),
    "too large for float32": (1e39, ValueError),
    "too large for float64": (10**400, ValueError),
    "too small for float32": (1e-50, ValueError),
    "true": (True, TypeError),
    "numpy bool": (np.True_, TypeError),
    "text": ("1024", TypeError),
    "list": ([8.0], TypeError),
    "array": (np.array([8.0, 16.0]), TypeError),
    "complex": (8j, TypeError),
}
bad_scales = pytest.mark.parametrize(
    "value, exception", BAD_SCALES.values(), ids=BAD_SCALES
)


@pytest.mark.one_backend
@bad_scales
@pytest.mark.parametrize(
    "make",
    [
        lambda value: LossScaleOptimizer(sgd(), initial_scale=value),
        lambda value: LossScaleOptimizer(sgd(), dynamic=False, initial_scale=value),
    ],
    ids=["dynamic", "fixed"],
)
def test_a_bad_initial_scale_is_refused(make, value, exception):
    received = f"initial_scale={value!r}"
    with refused(
        exception, "`initial_scale`", received, "positive", "finite", "2.0**15"
    ):
        make(value)


@pytest.mark.one_backend
@bad_scales
@pytest.mark.parametrize("bound", ["min_scale", "max_scale"])
def test_a_bad_bound_is_refused(bound, value, exception):
    received = f"{bound}={value!r}"
    with refused(exception, f"`{bound}`", received, "positive", "finite", "2.0**15"):
        LossScaleOptimizer(sgd(), **{bound: value})
    with refused(exception, f"`{bound}`", received, "positive", "finite", "2.0**15"):
        DynamicLossScale(**{bound: value})


@pytest.mark.one_backend
@bad_scales
def test_a_bad_scale_of_a_policy_is_refused(value, exception):
    words = (repr(value), "positive", "finite", "2.0**15")
    with refused(exception, "`loss_scale_value`", *words):
        FixedLossScale(value)
    with refused(exception, "`initial_loss_scale`", *words):
        DynamicLossScale(value)


@pytest.mark.one_backend
@pytest.mark.parametrize("bound", ["min_scale", "max_scale"])
def test_a_bound_of_none_is_refused(bound):
    with refused(TypeError, f"`{bound}`", f"{bound}=None", "2.0**15"):
        LossScaleOptimizer(sgd(), **{bound: None})


@pytest.mark.one_backend
def test_bounds_that_cross_are_refused():
    words = ("`min_scale`", "`max_scale`", "min_scale=64.0", "max_scale=32.0", "above")
    with refused(ValueError, *words):
        LossScaleOptimizer(sgd(), min_scale=64.0, max_scale=32.0)
    with refused(ValueError, *words):
        DynamicLossScale(48.0, min_scale=64.0, max_scale=32.0)


@pytest.mark.one_backend
@pytest.mark.parametrize("initial", [4.0, 1024.0])
def test_bounds_that_exclude_the_initial_scale_are_refused(initial):
    bounds = {"min_scale": 8.0, "max_scale": 512.0}
    words = ("min_scale=8.0", "max_scale=512.0", "widen the bounds")
    received = f"initial_scale={initial}"
    with refused(ValueError, "`initial_scale`", received, *words):
        LossScaleOptimizer(sgd(), initial_scale=initial, **bounds)
    received = f"initial_loss_scale={initial}"
    with refused(ValueError, "`initial_loss_scale`", received, *words):
        DynamicLossScale(initial, **bounds)


@pytest.mark.one_backend
def test_bounds_that_exclude_the_default_initial_scale_are_refused():
    words = ("initial_scale=32768.0", "max_scale=1024.0", "Choose another scale")
    with refused(ValueError, "`initial_scale`", *words):
        LossScaleOptimizer(sgd(), max_scale=1024.0)


WHOLE = [7, 7.0, np.int32(7), np.uint8(7), np.float32(7), np.float16(7)]


@pytest.mark.parametrize("value", WHOLE, ids=repr)
def test_a_count_may_be_a_whole_float_as_in_tf_keras(value):
    optimizer = LossScaleOptimizer(sgd(), dynamic_growth_steps=value)
    policy = DynamicLossScale(increment_period=value, hysteresis=value)
    counts = [optimizer.dynamic_growth_steps, policy.increment_period]
    counts += [policy.hysteresis, optimizer.get_config()["dynamic_growth_steps"]]
    counts += [policy.get_config()[name] for name in ("increment_period", "hysteresis")]
    assert [(type(count), count) for count in counts] == [(int, 7)] * 6
    assert DynamicLossScale.from_config(policy.get_config()).hysteresis == 7
    optimizer.build([keras.Variable([1.0])])
    optimizer.check_stalled(patience=value)


BAD_COUNTS = [0, -3, 0.0, -2.0, 2.5, True, np.True_, "7", None, [7]]
BAD_COUNTS += [float("nan"), float("inf"), np.float32(2.5), np.float64("nan")]


@pytest.mark.one_backend
@pytest.mark.parametrize("value", BAD_COUNTS, ids=repr)
def test_a_growth_period_that_is_not_a_positive_integer_is_refused(value):
    words = (repr(value), "positive integer")
    if value is not None:  # the default
        with refused(ValueError, "`dynamic_growth_steps`", *words):
            LossScaleOptimizer(sgd(), dynamic_growth_steps=value)
    with refused(ValueError, "`increment_period`", *words):
        DynamicLossScale(increment_period=value)
    with refused(ValueError, "`hysteresis`", *words):
        DynamicLossScale(hysteresis=value)
    with refused(ValueError, "`patience`", *words):
        LossScaleOptimizer(sgd()).check_stalled(patience=value)


@pytest.mark.one_backend
@pytest.mark.parametrize("value", [1.0, 0.5, -2, float("inf"), float("nan"), "2", True])
@pytest.mark.parametrize("factor", ["multiplier", "growth_factor"])
def test_a_growth_that_does_not_grow_is_refused(factor, value):
    with refused(ValueError, f"`{factor}`", f"{factor}={value!r}", "above 1.0"):
        DynamicLossScale(**{factor: value})


@pytest.mark.one_backend
@pytest.mark.parametrize("value", [1.0, 0.0, 2, -0.5, float("nan"), "0.5", True])
def test_a_backoff_that_does_not_back_off_is_refused(value):
    words = (f"backoff_factor={value!r}", "above 0.0 and below 1.0")
    with refused(ValueError, "`backoff_factor`", *words):
        DynamicLossScale(backoff_factor=value)


@pytest.mark.one_backend
@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_consecutive_hysteresis_must_be_a_bool(value):
    words = (f"consecutive_hysteresis={value!r}", "True or False")
    with refused(TypeError, "`consecutive_hysteresis`", *words):
        DynamicLossScale(consecutive_hysteresis=value)


@pytest.mark.one_backend
@pytest.mark.parametrize("value", [1, 0, None, "yes", ["auto"]], ids=repr)
def test_master_weights_must_be_one_of_three(value):
    words = (f"master_weights={value!r}", "'auto'", "True", "False")
    with refused(ValueError, "`master_weights`", *words):
        LossScaleOptimizer(sgd(), master_weights=value)


TOGETHER = {
    "dynamic=False": {"dynamic": False},
    "initial_scale": {"initial_scale": 8.0},
    "dynamic_growth_steps": {"dynamic_growth_steps": 7},
    "min_scale": {"min_scale": 1.0},
    "max_scale": {"max_scale": 2.0**20},
}


@pytest.mark.one_backend
@pytest.mark.parametrize("name, arguments", TOGETHER.items(), ids=TOGETHER)
def test_a_policy_together_with_what_describes_another_is_refused(name, arguments):
    policy = DynamicLossScale(16.0)
    words = ("`loss_scale`", name, "Set them there instead", f"{policy!r}")
    with refused(ValueError, *words):
        LossScaleOptimizer(sgd(), loss_scale=policy, **arguments)
    # The policy is still free.
    assert LossScaleOptimizer(sgd(), loss_scale=policy).loss_scale_policy is policy


@pytest.mark.one_backend
def test_all_that_goes_together_with_no_policy_is_named_at_once():
    words = ("dynamic=False", "initial_scale", "dynamic_growth_steps", "min_scale")
    with refused(ValueError, *words):
        LossScaleOptimizer(sgd(), False, 8.0, 7, loss_scale="dynamic", min_scale=1.0)


NOT_POLICIES = {
    "text": ("fixed", ValueError, ("'dynamic'", "'fixed'")),
    "true": (True, TypeError, ("number", "'dynamic'", "True")),
    "list": ([8.0], TypeError, ("number", "'dynamic'", "[8.0]")),
    "class": (DynamicLossScale, TypeError, ("number", "LossScale", "DynamicLossScale")),
    "zero": (0, ValueError, ("positive", "2.0**15", "0")),
    "empty config": ({}, ValueError, ("'class_name'", "'config'", "{}")),
    "another class": (
        {"module": "keras.optimizers", "class_name": "SGD", "config": {}},
        ValueError,
        ("LossScale", "SGD"),
    ),
}


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "value, exception, words", NOT_POLICIES.values(), ids=NOT_POLICIES
)
def test_what_is_not_a_policy_is_refused(value, exception, words):
    with refused(exception, *words):
        LossScaleOptimizer(sgd(), loss_scale=value)
    with refused(exception, *words):
        loss_scales.get(value)


@pytest.mark.one_backend
def test_no_policy_at_all_is_refused():
    with refused(TypeError, "number", "'dynamic'", "None"):
        loss_scales.get(None)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "name, value",
    [
        ("weight_decay", 0.1),
        ("clipnorm", 1.0),
        ("global_clipnorm", 1.0),
        ("clipvalue", 1.0),
        ("use_ema", True),
        ("ema_momentum", 0.5),
        ("ema_overwrite_frequency", 3),
        ("loss_scale_factor", 8.0),
        ("gradient_accumulation_steps", 2),
    ],
)
def test_what_belongs_to_the_inner_optimizer_is_refused(name, value):
    # In Keras's own words.
    words = (f"`{name}`", f"set `{name}` on the `inner_optimizer`")
    with refused(ValueError, *words):
        LossScaleOptimizer(sgd(), **{name: value})


@pytest.mark.one_backend
def test_unknown_arguments_are_refused():
    with refused(ValueError, "does not support arguments", "`scale`", "`steps`"):
        LossScaleOptimizer(sgd(), scale=1.0, steps=2)


@pytest.mark.one_backend
def test_unknown_config_keys_are_refused():
    config = {**LossScaleOptimizer(sgd()).get_config(), "increment": 2}
    with refused(ValueError, "does not support arguments", "`increment`"):
        LossScaleOptimizer.from_config(config)
    with refused(TypeError, "increment"):
        loss_scales.get({"class_name": "DynamicLossScale", "config": {"increment": 2}})


@pytest.mark.one_backend
@pytest.mark.parametrize("inner", [None, "sgd", 3])
def test_a_config_without_that_of_an_inner_optimizer_is_refused(inner):
    config = {**LossScaleOptimizer(sgd()).get_config(), "inner_optimizer": inner}
    words = ("'inner_optimizer'", f"inner_optimizer={inner!r}", "config dict")
    with refused(ValueError, *words):
        LossScaleOptimizer.from_config(config)


@pytest.mark.one_backend
def test_a_refused_constructor_leaves_its_arguments_alone():
    inner = keras.optimizers.SGD(1.0, loss_scale_factor=8.0)
    policy = DynamicLossScale(16.0)
    for name, value in (
        ("clipnorm", 1.0),
        ("scale", 1.0),
        ("dynamic", 1),
        ("initial_scale", 8.0),
        ("master_weights", 1),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            LossScaleOptimizer(inner, loss_scale=policy, **{name: value})
    with pytest.raises(TypeError, match="`inner_optimizer`"):
        LossScaleOptimizer("sgd", loss_scale=policy)
    assert inner.loss_scale_factor == 8.0
    assert not policy.built
    owner = LossScaleOptimizer(sgd(), loss_scale=policy)

    with refused(ValueError, "belongs to one optimizer", "from_config", owner.name):
        LossScaleOptimizer(inner, loss_scale=policy)
    assert inner.loss_scale_factor == 8.0
    policy.claim(owner)  # is still the owner
    inner.loss_scale_factor = None
    LossScaleOptimizer(inner)  # is still nobody's


# --- Steps --------------------------------------------------------------------


@pytest.fixture
def weights():
    return [keras.Variable([1.0, 2.0], name="w"), keras.Variable(3.0, name="b")]


@pytest.fixture
def optimizer(weights):
    """Has taken one finite step and one that overflowed."""
    optimizer = LossScaleOptimizer(sgd(), initial_scale=8.0)
    for bad in (0.0, np.inf):
        optimizer.apply(gradients(np.array([1.0, bad], "float32"), 4.0), weights)
    optimizer.get_unscaled_gradients([])
    return optimizer


def gradients(*values):
    return [None if v is None else ops.convert_to_tensor(v) for v in values]


@pytest.fixture(autouse=True)
def nothing_is_half_changed(request, snapshot):
    """Compares the optimizer of a test before and after it."""
    if "optimizer" not in request.fixturenames:
        yield
        return
    optimizer = request.getfixturevalue("optimizer")
    weights = request.getfixturevalue("weights")

    def state():
        return (
            snapshot(weights),
            snapshot(optimizer.variables),
            float(optimizer.loss_scale),
            int(optimizer.dynamic_counter),
            int(optimizer.skipped_steps),
            bool(optimizer.last_step_applied),
            optimizer._scaling.gradients,
        )

    before = state()
    assert before[2:] == (4.0, 0, 1, False, Gradients.UNSCALED)
    yield
    assert state() == before
    optimizer.loss_scale_policy.claim(optimizer)


@pytest.fixture(params=["apply", "apply_gradients"])
def apply(request, optimizer):
    def by_pairs(grads, variables):
        # `zip` would hide a difference in length.
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))

    return {"apply": optimizer.apply, "apply_gradients": by_pairs}[request.param]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_other_counts_of_gradients_than_of_variables_are_refused(
    optimizer, weights, count
):
    grads = gradients(*[1.0] * count)
    words = ("`grads`", "`trainable_variables`", f"{count} gradients", "2 variables")
    with refused(ValueError, *words, "one-to-one", "Pass None"):
        optimizer.apply(grads, weights)
    with refused(ValueError, *words, "one-to-one", "Pass None"):
        optimizer.apply(grads)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 2), (2, 1)])
def test_a_gradient_of_another_shape_is_refused(apply, weights, shape):
    words = ("A gradient", "`grads`", "`trainable_variables`", weights[0].path)
    with refused(ValueError, *words, str(shape), "(2,)"):
        apply([ops.ones(shape), ops.ones(())], weights)
    # Nor is the first one trained by itself, because it fits.
    with refused(ValueError, *words, str(shape), "(2,)"):
        apply([ops.ones(()), ops.ones(shape)], weights[::-1])


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tf.function")
@pytest.mark.parametrize("known", [None, [None]])
def test_a_shape_that_is_not_known_yet_is_taken(weights, known):
    import tensorflow as tf

    optimizer = LossScaleOptimizer(sgd(), initial_scale=8.0)
    optimizer.build(weights[:1])

    @tf.function(input_signature=[tf.TensorSpec(known)])
    def step(gradient):
        optimizer.apply([gradient], weights[:1])

    step(ops.array([8.0, 8.0]))
    assert weights[0].numpy().tolist() == [0.0, 1.0]


NO_GRADIENTS = ("No gradients provided for any variable", "`grads`", "None", "2")


def test_no_gradients_at_all_are_refused(apply, weights):
    with refused(ValueError, *NO_GRADIENTS):
        apply([None, None], weights)


def test_unknown_variables_are_refused(apply, weights):
    stranger = keras.Variable([1.0, 2.0], name="stranger")
    with refused(ValueError, "Unknown variable", "stranger", "new"):
        apply(gradients(np.ones(2, "float32"), 1.0), [stranger, weights[1]])


PAIRS = {
    "gradients alone": lambda w: gradients([1.0, 1.0], 1.0),
    "triples": lambda w: [
        (g, v, 1) for g, v in zip(gradients(1.0), w[1:], strict=True)
    ],
    "numbers": lambda w: [1, 2],
}


@pytest.mark.one_backend
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_what_are_not_pairs_is_refused(optimizer, weights, pairs):
    words = ("`grads_and_vars`", "pairs", "zip(gradients, model.trainable_variables)")
    with refused(TypeError, *words):
        optimizer.apply_gradients(pairs(weights))


def test_an_optimizer_that_was_built_is_not_built_for_others(weights):
    inner = sgd()
    inner.build(weights)
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    with refused(ValueError, "Unknown variable", "stranger"):
        optimizer.build([keras.Variable(1.0, name="stranger")])
    assert not optimizer.built


WRAPPED_AGAIN = {
    "itself": lambda inner: inner,
    "inside of LARC": keras_lso.LARC,
}


@pytest.mark.parametrize("again", WRAPPED_AGAIN.values(), ids=WRAPPED_AGAIN)
def test_an_optimizer_that_has_a_wrapper_is_not_wrapped_again(again):
    inner = sgd()
    weight = keras.Variable(1.0)
    optimizer = LossScaleOptimizer(inner, name="the_first")
    policy = DynamicLossScale()
    words = ("already wrapped", "'the_first'", "SGD.from_config(", "Received")
    with refused(ValueError, "`inner_optimizer`", *words):
        LossScaleOptimizer(again(inner), loss_scale=policy)
    # What was refused has claimed nothing.
    LossScaleOptimizer(sgd(), loss_scale=policy)
    optimizer.apply(gradients(np.inf), [weight])
    optimizer.apply(gradients(1.0), [weight])
    assert int(optimizer.skipped_steps) == int(optimizer.iterations) == 1


@pytest.mark.one_backend
def test_what_was_refused_may_be_wrapped_rightly():
    inner = sgd()
    with pytest.raises(TypeError, match="`dynamic`"):
        LossScaleOptimizer(inner, 1024)
    LossScaleOptimizer(inner, initial_scale=1024)


def test_a_new_wrapper_goes_on_from_the_state_of_the_old(weights):
    old = LossScaleOptimizer(sgd())
    for _ in range(2):
        old.apply(gradients(np.ones(2, "float32"), 1.0), weights)
    inner = old.inner_optimizer
    new = LossScaleOptimizer(type(inner).from_config(inner.get_config()))
    new.build(weights)
    new.set_weights(old.get_weights())
    assert int(new.iterations) == 2
    for now, before in zip(new.weights, old.weights, strict=True):
        assert (
            ops.convert_to_numpy(now).tolist() == ops.convert_to_numpy(before).tolist()
        )


@pytest.mark.one_backend
def test_before_the_first_build_the_variables_must_be_given():
    optimizer = LossScaleOptimizer(sgd())
    words = ("`grads`", "`trainable_variables`", "optimizer.build(trainable_variables)")
    with refused(ValueError, *words):
        optimizer.apply(gradients(1.0))
    assert not optimizer.built


@pytest.mark.parametrize(
    "grads, words",
    [
        ([1.0], ("1 gradients", "2 variables", "Pass None")),
        ([None, None], NO_GRADIENTS),
    ],
)
def test_a_refused_first_step_builds_nothing(weights, grads, words):
    optimizer = LossScaleOptimizer(sgd())
    with refused(ValueError, *words):
        optimizer.apply(gradients(*grads), weights)
    assert not optimizer.built
    assert not optimizer.inner_optimizer.built
    optimizer.apply(gradients(np.ones(2, "float32"), 1.0), weights)
    assert int(optimizer.iterations) == 1


def test_a_first_step_without_any_variable_is_refused():
    optimizer = LossScaleOptimizer(sgd())
    with refused(ValueError, "No gradients provided for any variable"):
        optimizer.apply([], [])
    assert not optimizer.built


# --- Stateless steps ----------------------------------------------------------


def test_stateless_apply_is_refused_where_keras_refuses_it(optimizer, weights):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("It works on JAX and PyTorch; the tests below are about that")
    with refused(ValueError, "stateless_apply", "TensorFlow", "`optimizer.apply`"):
        optimizer.stateless_apply(
            [v.value for v in optimizer.variables],
            gradients([1.0, 1.0], 1.0),
            [w.value for w in weights],
        )


@pytest.fixture
def stateless():
    if keras.backend.backend() == "tensorflow":
        pytest.skip("Keras has no `stateless_apply` on TensorFlow")


def test_a_stateless_step_needs_a_built_optimizer(stateless):
    optimizer = LossScaleOptimizer(sgd())
    words = ("`stateless_apply`", "must be built", "build(trainable_variables)")
    with refused(ValueError, *words):
        optimizer.stateless_apply([], [], [])


def test_a_stateless_gradient_of_another_shape_is_refused(
    stateless, optimizer, weights
):
    own, trained = ([v.value for v in of] for of in (optimizer.variables, weights))
    with refused(ValueError, "A gradient", weights[0].path, "(1,)", "(2,)"):
        optimizer.stateless_apply(own, gradients([1.0], 1.0), trained)


def test_other_counts_of_values_than_of_variables_are_refused(
    stateless, optimizer, weights
):
    own = [v.value for v in optimizer.variables]
    trained = [w.value for w in weights]
    grads = gradients(np.ones(2, "float32"), 1.0)
    words = (f"a list of {len(own)} tensors", f"Received {len(own) - 1}")
    with refused(ValueError, "`optimizer_variables`", *words):
        optimizer.stateless_apply(own[:-1], grads, trained)
    words = ("a list of 2 tensors", "Received 1")
    with refused(ValueError, "`trainable_variables`", *words):
        optimizer.stateless_apply(own, grads, trained[:1])
    with refused(ValueError, "`grads`", "1 gradients", "2 variables"):
        optimizer.stateless_apply(own, grads[:1], trained)
    with refused(ValueError, *NO_GRADIENTS):
        optimizer.stateless_apply(own, [None, None], trained)


# --- State --------------------------------------------------------------------


@pytest.mark.one_backend
def test_weights_are_refused_before_the_first_build():
    optimizer = LossScaleOptimizer(sgd())
    with refused(ValueError, "`set_weights()`", "build(trainable_variables)"):
        optimizer.set_weights([])


@pytest.mark.one_backend
@pytest.mark.parametrize("less", [2, 9])
def test_another_number_of_weights_is_refused(optimizer, less):
    weights = [v.numpy() for v in optimizer.variables][:-less]
    words = ("`weights`", f"Received {len(weights)}", "`optimizer.variables`")
    with refused(ValueError, *words, str(len(optimizer.variables) - 1)):
        optimizer.set_weights(weights)


@pytest.mark.one_backend
def test_weights_of_other_shapes_are_refused(optimizer):
    weights = [v.numpy() for v in optimizer.variables]
    weights[6] = np.zeros(5, "float32")
    words = (optimizer.variables[6].path, "(2,)", "(5,)", "Nothing was assigned")
    with refused(ValueError, *words):
        optimizer.set_weights(weights)


@pytest.mark.one_backend
def test_a_loss_scale_factor_cannot_be_set(optimizer):
    words = ("`loss_scale_factor`", "dynamic=False", "initial_scale=512")
    with refused(ValueError, *words):
        optimizer.loss_scale_factor = 512
    optimizer.loss_scale_factor = None
    assert optimizer.inner_optimizer.loss_scale_factor is None
