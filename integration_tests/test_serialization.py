"""Configs and whole files: what is written comes back, or is refused whole.

Configs go through every function that Keras has for them, and through JSON, as in
a file. Files hold a model that has trained, with an overflow in between, so that
its scale, its counters and its slots are not those of a new one. Saving and loading
print no warning. `test_resume.py` shows that training goes on from there, and
`test_across_backends.py` that it does so under another backend.
"""

import copy
import functools
import inspect
import json
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_lso
from keras_lso import LossScaleOptimizer
from keras_lso.loss_scales import DynamicLossScale, LogMaxLossScale, LossScale

pytestmark = pytest.mark.in_turn

INNER_CLASSES = sorted(
    name
    for name, cls in vars(keras.optimizers).items()
    if inspect.isclass(cls)
    and issubclass(cls, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
)


@keras.saving.register_keras_serializable("integration_tests")
class CountingLossScale(LossScale):
    """Halves at every overflow, never grows, and counts what it has seen."""

    def build(self, add_variable=None):
        if self.built:
            return
        super().build(add_variable)
        self.overflows = self.add_variable("overflows", 0, dtype="int")

    def step(self, finite, amax=None):
        finite = ops.convert_to_tensor(finite, dtype="bool")
        overflows = ops.convert_to_tensor(self.overflows)
        self.assign_scale(ops.where(finite, self.value, self.value / 2))
        self.overflows.assign(ops.where(finite, overflows, overflows + 1))


class UnregisteredLossScale(CountingLossScale):
    """Found by `custom_objects` only."""


class UnregisteredSGD(keras.optimizers.SGD):
    """Found by `custom_objects` only, and needs a key of its own."""

    def __init__(self, *args, stride=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.stride = stride

    def get_config(self):
        return {**super().get_config(), "stride": self.stride}


@keras.saving.register_keras_serializable("integration_tests")
class RegisteredSGD(UnregisteredSGD):
    """Found by its registered name."""


# Each makes the arguments anew: a policy belongs to one optimizer.
POLICIES = {
    "default": dict,
    "scale": lambda: {"initial_scale": 2.0**10, "dynamic_growth_steps": 3},
    "bounds": lambda: {
        "initial_scale": 8.0,
        "dynamic_growth_steps": 2,
        "min_scale": 2.0,
        "max_scale": 16.0,
    },
    "fixed": lambda: {"dynamic": False, "initial_scale": 128.0},
    "fixed policy": lambda: {"loss_scale": 128},
    "multiplier": lambda: {"loss_scale": DynamicLossScale(2.0**10, 3, 4.0)},
    "factors": lambda: {
        "loss_scale": DynamicLossScale(
            2.0**10, 3, growth_factor=1.5, backoff_factor=0.25
        )
    },
    "hysteresis": lambda: {"loss_scale": DynamicLossScale(2.0**10, 3, hysteresis=2)},
    "consecutive hysteresis": lambda: {
        "loss_scale": DynamicLossScale(
            2.0**10, 3, hysteresis=3, consecutive_hysteresis=True
        )
    },
    "auto": lambda: {"initial_scale": "auto"},
    "LogMax": lambda: {
        "loss_scale": LogMaxLossScale(0.5, 2.0**12, beta2=0.9, original_overflow=True)
    },
    "user's own": lambda: {"loss_scale": CountingLossScale(2.0**10, min_scale=16.0)},
}
every_policy = pytest.mark.parametrize("policy", POLICIES)


def through_json(config):
    return json.loads(json.dumps(config))


def arguments_of(inner_optimizer):
    """Its config, but for the number that Keras gives to each of a class (`sgd_1`)."""
    config = inner_optimizer.get_config()
    return {**config, "name": config["name"].rstrip("_0123456789")}


CONFIG_ROUTES = {
    "from_config": lambda o: LossScaleOptimizer.from_config(
        through_json(o.get_config())
    ),
    "keras.saving": lambda o: keras.saving.deserialize_keras_object(
        through_json(keras.saving.serialize_keras_object(o))
    ),
    "keras_lso.deserialize": lambda o: keras_lso.deserialize(
        through_json(keras.optimizers.serialize(o))
    ),
}

LOADERS = {"keras": keras.saving.load_model, "keras_lso": keras_lso.load_model}
every_loader = pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS.keys())


def momentum_sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def scales_after(optimizer, steps):
    """The scale after each step: "f" for a finite one, "o" for an overflow."""
    optimizer.build([keras.Variable([1.0])])
    scales = []
    for step in steps:
        # The largest gradient, for policies that ask for it.
        optimizer.loss_scale_policy.step(step == "f", ops.ones(()))
        scales.append(float(optimizer.loss_scale))
    return scales


def small_model(optimizer=None, dtype="mixed_float16", extra_layers=()):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, activation="tanh", dtype=dtype),
            *extra_layers,
            layers.Dense(2, dtype=dtype),
        ]
    )
    if optimizer is not None:
        model.compile(optimizer, loss="mean_squared_error")
    return model


def train(model, overflows=True, epochs=2):
    """Three batches an epoch; the gradients of the second overflow."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(12, 4)).astype("float32")
    y = numbers.normal(size=(12, 2)).astype("float32")
    if overflows:
        x[4, 0] = np.inf
    model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return model


def take_steps(model):
    """What `train` does to the optimizer; a policy's step need not be compiled."""
    optimizer, variables = model.optimizer, model.trainable_variables
    numbers = np.random.default_rng(0)
    for step in range(6):
        grads = [numbers.normal(size=v.shape).astype("float32") for v in variables]
        if step in (1, 4):
            grads[0][0, 0] = np.inf
        scale = optimizer.scale_loss(1.0)
        optimizer.apply([ops.convert_to_tensor(g) * scale for g in grads], variables)
    return model


@functools.cache
def trained_model(policy="default"):
    """Shared by the tests, which only read it."""
    optimizer = LossScaleOptimizer(momentum_sgd(), **POLICIES[policy]())
    model = small_model(optimizer)
    return train(model) if policy == "default" else take_steps(model)


def built_model(optimizer, **options):
    """A model whose optimizer has a state of its own, without the time to train."""
    model = small_model(optimizer, **options)
    optimizer.build(model.trainable_variables)
    for i, variable in enumerate(optimizer.variables):
        variable.assign(np.full(variable.shape, 20 - i))
    return model


def state(optimizer):
    """What a file brings back: all variables but the last, `consecutive_skips`."""
    return [v.numpy() for v in optimizer.variables[:-1]]


def assert_same(actual, expected):
    """Bit for bit: NaN equals NaN, and 0.0 does not equal -0.0."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def assert_same_model(actual, expected):
    assert_same(actual.get_weights(), expected.get_weights())
    assert_same(state(actual.optimizer), state(expected.optimizer))


def config_in(path):
    with zipfile.ZipFile(path) as archive:
        return archive.read("config.json").decode()


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


# --- Configs ----------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("route", CONFIG_ROUTES.values(), ids=CONFIG_ROUTES.keys())
@every_policy
def test_a_config_makes_an_optimizer_that_behaves_alike(policy, route, no_warnings):
    optimizer = LossScaleOptimizer(momentum_sgd(), **POLICIES[policy]())
    loaded = route(optimizer)

    assert type(loaded) is LossScaleOptimizer
    assert loaded.get_config() == optimizer.get_config()
    assert repr(loaded.loss_scale_policy) == repr(optimizer.loss_scale_policy)
    assert arguments_of(loaded.inner_optimizer) == arguments_of(
        optimizer.inner_optimizer
    )
    steps = "fffoofooofffffff"
    assert scales_after(loaded, steps) == scales_after(optimizer, steps)


@pytest.mark.one_backend
@every_policy
def test_the_config_holds_keras_four_keys_first(policy):
    theirs = keras.optimizers.LossScaleOptimizer(momentum_sgd())
    config = LossScaleOptimizer(momentum_sgd(), **POLICIES[policy]()).get_config()
    assert list(config)[:4] == list(theirs.get_config())


@pytest.mark.one_backend
def test_the_config_of_keras_own_class_and_of_ours_are_the_same_by_default():
    inner = momentum_sgd()
    theirs = keras.optimizers.LossScaleOptimizer(inner, 2.0**10, 3, name="wrapper")
    ours = LossScaleOptimizer(
        inner, initial_scale=2.0**10, dynamic_growth_steps=3, name="wrapper"
    )
    assert (
        ours.get_config()
        == keras_lso.deserialize(keras.optimizers.serialize(theirs)).get_config()
    )
    assert set(ours.get_config()) == set(theirs.get_config())


@pytest.mark.one_backend
def test_the_config_holds_what_json_can_hold():
    optimizer = LossScaleOptimizer(
        momentum_sgd(),
        initial_scale=np.float32(1024),
        dynamic_growth_steps=np.int64(3),
        max_scale=np.float64(2048),
    )
    config = optimizer.get_config()
    assert through_json(config) == config
    assert type(config["dynamic_growth_steps"]) is int


@pytest.mark.one_backend
@every_policy
def test_from_config_leaves_the_dict_that_it_is_given_alone(policy):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    inner = keras.optimizers.Adam(schedule)
    optimizer = LossScaleOptimizer(inner, **POLICIES[policy]())
    config = through_json(optimizer.get_config())
    before = copy.deepcopy(config)

    LossScaleOptimizer.from_config(config)
    assert config == before
    assert LossScaleOptimizer.from_config(config).get_config() == before


@pytest.mark.one_backend
def test_deserialize_leaves_the_dict_that_it_is_given_alone():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(schedule))
    config = through_json(keras.optimizers.serialize(theirs))
    before = copy.deepcopy(config)

    assert type(keras_lso.deserialize(config)) is LossScaleOptimizer
    assert config == before


@pytest.mark.parametrize("name", INNER_CLASSES)
def test_the_inner_config_names_the_public_class(name):
    inner = getattr(keras.optimizers, name)(0.01)
    optimizer = LossScaleOptimizer(inner)
    config = through_json(optimizer.get_config())

    named = config["inner_optimizer"]
    assert named["module"] == "keras.optimizers"
    assert named["class_name"] == name
    assert named["registered_name"] is None
    loaded = LossScaleOptimizer.from_config(config).inner_optimizer
    assert type(loaded) is type(inner)
    assert arguments_of(loaded) == arguments_of(inner)


needs_multi_optimizer = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"),
    reason="keras.optimizers.MultiOptimizer came with Keras 3.15",
)


def multi_optimizer():
    choice = keras.optimizers.OptimizerMap(
        momentum_sgd(), {".*bias": keras.optimizers.Adam(0.01)}
    )
    return keras.optimizers.MultiOptimizer(choice)


@pytest.mark.one_backend
@needs_multi_optimizer
def test_the_config_of_a_multi_optimizer_names_public_classes_throughout():
    optimizer = LossScaleOptimizer(multi_optimizer(), initial_scale=2.0**10)
    text = json.dumps(optimizer.get_config())

    assert "keras.src" not in text
    loaded = LossScaleOptimizer.from_config(json.loads(text))
    assert json.dumps(loaded.get_config()) == text
    assert [type(o) for o in loaded.inner_optimizer.optimizers] == [
        type(o) for o in optimizer.inner_optimizer.optimizers
    ]


@pytest.mark.one_backend
def test_a_registered_inner_optimizer_needs_no_custom_objects():
    optimizer = LossScaleOptimizer(RegisteredSGD(0.05, stride=3))
    for route in CONFIG_ROUTES.values():
        loaded = route(optimizer)
        assert type(loaded.inner_optimizer) is RegisteredSGD
        assert loaded.inner_optimizer.stride == 3


UNREGISTERED = {
    "UnregisteredSGD": UnregisteredSGD,
    "UnregisteredLossScale": UnregisteredLossScale,
}
CUSTOM_ROUTES = {
    "from_config": lambda o, objects: LossScaleOptimizer.from_config(
        o.get_config(), custom_objects=objects
    ),
    "keras.saving": lambda o, objects: keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(o), custom_objects=objects
    ),
    "keras_lso.deserialize": lambda o, objects: keras_lso.deserialize(
        keras.optimizers.serialize(o), custom_objects=objects
    ),
}


@pytest.mark.one_backend
@pytest.mark.parametrize("route", CUSTOM_ROUTES.values(), ids=CUSTOM_ROUTES.keys())
def test_custom_objects_name_unregistered_classes(route):
    optimizer = LossScaleOptimizer(
        UnregisteredSGD(0.05, stride=3), loss_scale=UnregisteredLossScale(64.0)
    )
    loaded = route(optimizer, UNREGISTERED)
    assert type(loaded.inner_optimizer) is UnregisteredSGD
    assert loaded.inner_optimizer.stride == 3
    assert type(loaded.loss_scale_policy) is UnregisteredLossScale
    assert loaded.initial_scale == 64.0

    with keras.saving.custom_object_scope(UNREGISTERED):
        loaded = route(optimizer, None)
    assert type(loaded.inner_optimizer) is UnregisteredSGD

    with pytest.raises(TypeError, match="Could not locate class 'UnregisteredSGD'"):
        route(optimizer, None)


@pytest.mark.one_backend
def test_a_policy_of_the_user_may_be_called_as_one_of_ours():
    class Theirs(CountingLossScale):
        pass

    Theirs.__name__ = Theirs.__qualname__ = "DynamicLossScale"
    optimizer = LossScaleOptimizer(momentum_sgd(), loss_scale=Theirs(64.0))
    loaded = LossScaleOptimizer.from_config(
        through_json(optimizer.get_config()), {"DynamicLossScale": Theirs}
    )
    assert type(loaded.loss_scale_policy) is Theirs


@pytest.mark.one_backend
def test_a_subclass_of_ours_comes_back_as_itself():
    @keras.saving.register_keras_serializable("integration_tests")
    class Subclass(LossScaleOptimizer):
        pass

    optimizer = Subclass(momentum_sgd(), initial_scale=64.0)
    for restore in (keras.saving.deserialize_keras_object, keras_lso.deserialize):
        loaded = restore(through_json(keras.saving.serialize_keras_object(optimizer)))
        assert type(loaded) is Subclass
        assert loaded.initial_scale == 64.0


# --- keras_lso.deserialize --------------------------------------------------


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "class_name", ["LossScaleOptimizer", "lossscaleoptimizer"], ids=str
)
@pytest.mark.parametrize("module", ["keras.optimizers", None, "missing"])
def test_deserialize_reads_every_spelling_of_keras_own_class(class_name, module):
    theirs = keras.optimizers.LossScaleOptimizer(momentum_sgd(), 2.0**10, 3)
    config = {"class_name": class_name, "config": theirs.get_config()}
    if module != "missing":
        config["module"] = module

    ours = keras_lso.deserialize(config)
    assert type(ours) is LossScaleOptimizer
    assert (ours.initial_scale, ours.dynamic_growth_steps) == (2.0**10, 3)
    assert ours.inner_optimizer.get_config() == theirs.inner_optimizer.get_config()


@pytest.mark.one_backend
def test_deserialize_reads_the_keys_that_old_versions_of_keras_wrote():
    theirs = keras.optimizers.LossScaleOptimizer(momentum_sgd())
    config = keras.optimizers.serialize(theirs)
    config["config"].update(weight_decay=None, use_ema=False, ema_momentum=0.99)
    assert keras_lso.deserialize(config).initial_scale == 2.0**15

    config["config"]["use_ema"] = True
    with pytest.raises(ValueError, match="does not support `use_ema`"):
        keras_lso.deserialize(config)


@pytest.mark.parametrize("name", INNER_CLASSES)
def test_deserialize_reads_other_optimizers_as_keras_does(name):
    optimizer = getattr(keras.optimizers, name)(0.01)
    loaded = keras_lso.deserialize(keras.optimizers.serialize(optimizer))
    assert type(loaded) is type(optimizer)
    assert loaded.get_config() == optimizer.get_config()


@pytest.mark.in_turn("torch")
def test_deserialize_reads_classes_that_exist_under_torch_only():
    inner = through_json(keras.optimizers.serialize(keras.optimizers.Adam(0.25)))
    inner["module"] = "keras.src.backend.torch.optimizers.torch_adam"
    inner["registered_name"] = "Adam"
    config = {
        "module": "keras.optimizers",
        "class_name": "LossScaleOptimizer",
        "registered_name": None,
        "config": {"inner_optimizer": inner, "initial_scale": 4.0},
    }
    expected = type(keras.optimizers.Adam())
    assert type(keras_lso.deserialize(inner)) is expected
    loaded = keras_lso.deserialize(config)
    assert type(loaded) is LossScaleOptimizer
    assert type(loaded.inner_optimizer) is expected
    assert float(loaded.learning_rate) == 0.25


@pytest.mark.one_backend
def test_deserialize_leaves_a_class_of_the_same_name_alone():
    class Theirs(keras.optimizers.SGD):
        pass

    Theirs.__name__ = Theirs.__qualname__ = "LossScaleOptimizer"
    config = keras.optimizers.serialize(Theirs(0.05))
    loaded = keras_lso.deserialize(config, {"LossScaleOptimizer": Theirs})
    assert type(loaded) is Theirs


@pytest.mark.one_backend
@pytest.mark.parametrize("config", [None, "SGD", {}, {"config": {}}], ids=str)
def test_deserialize_refuses_what_is_no_config(config):
    with pytest.raises(ValueError, match="`config` must be the dict"):
        keras_lso.deserialize(config)


@pytest.mark.one_backend
def test_deserialize_refuses_the_config_of_something_else():
    config = keras.saving.serialize_keras_object(layers.Dense(2))
    with pytest.raises(ValueError, match="It describes a Dense"):
        keras_lso.deserialize(config)


# --- Damaged configs --------------------------------------------------------

DAMAGED_CONFIGS = {
    "no inner optimizer": (
        lambda c: c.pop("inner_optimizer"),
        ValueError,
        "'inner_optimizer'",
    ),
    "inner optimizer None": (
        lambda c: c.update(inner_optimizer=None),
        ValueError,
        "inner_optimizer=None",
    ),
    "inner optimizer a layer": (
        lambda c: c.update(
            inner_optimizer=keras.saving.serialize_keras_object(layers.Dense(2))
        ),
        TypeError,
        "`inner_optimizer` must be an instance of `keras.optimizers.Optimizer`",
    ),
    "unknown key": (
        lambda c: c.update(growth_interval=5),
        ValueError,
        "does not support arguments: `growth_interval`",
    ),
    "policy a layer": (
        lambda c: c.update(
            loss_scale=keras.saving.serialize_keras_object(layers.Dense(2))
        ),
        ValueError,
        "Received one of Dense",
    ),
    "policy without class": (
        lambda c: c.update(loss_scale={"initial_loss_scale": 2.0}),
        ValueError,
        "has the keys 'class_name' and 'config'",
    ),
    "policy with an unknown key": (
        lambda c: c.update(
            loss_scale={"class_name": "DynamicLossScale", "config": {"growth": 2}}
        ),
        TypeError,
        "unexpected keyword argument 'growth'",
    ),
    "scale zero": (
        lambda c: c.update(initial_scale=0.0),
        ValueError,
        "`initial_scale` must be positive",
    ),
    "crossed bounds": (
        lambda c: c.update(min_scale=4.0, max_scale=2.0),
        ValueError,
        "`min_scale` must not be above `max_scale`",
    ),
}


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("damage", "error", "words"),
    DAMAGED_CONFIGS.values(),
    ids=DAMAGED_CONFIGS.keys(),
)
def test_a_damaged_config_is_refused_by_name(damage, error, words):
    config = LossScaleOptimizer(momentum_sgd()).get_config()
    damage(config)
    with pytest.raises(error, match=words):
        LossScaleOptimizer.from_config(config)


# --- Whole files ------------------------------------------------------------


@pytest.mark.exhaustive
@every_loader
@every_policy
def test_a_keras_file_brings_back_the_model_and_all_state(
    policy, load, tmp_path, no_warnings
):
    model = trained_model(policy)
    assert int(model.optimizer.skipped_steps) == 2
    model.save(tmp_path / "model.keras")
    assert "keras.src" not in config_in(tmp_path / "model.keras")

    loaded = load(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert_same_model(loaded, model)
    assert int(loaded.optimizer.skipped_steps) == 2


@every_policy
def test_a_weights_file_brings_back_all_state(policy, tmp_path, no_warnings):
    model = trained_model(policy)
    model.save_weights(tmp_path / "model.weights.h5")

    other = built_model(LossScaleOptimizer(momentum_sgd(), **POLICIES[policy]()))
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same_model(other, model)
    assert bool(other.optimizer.last_step_applied)


@pytest.mark.in_turn("jax")
def test_shards_bring_back_all_state(tmp_path, no_warnings):
    model = trained_model("hysteresis")
    model.save_weights(tmp_path / "model.weights.json", max_shard_size=1e-7)
    assert len(list(tmp_path.glob("*.h5"))) > 1

    other = built_model(LossScaleOptimizer(momentum_sgd(), **POLICIES["hysteresis"]()))
    other.load_weights(tmp_path / "model.weights.json")
    assert_same_model(other, model)


@pytest.mark.in_turn("torch")
@needs_multi_optimizer
def test_a_multi_optimizer_comes_back_with_all_state(tmp_path, no_warnings):
    model = train(small_model(LossScaleOptimizer(multi_optimizer())))
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    # Momentum of two kernels; momentum and velocity of two biases.
    slots = [v for v in model.optimizer.variables[:-1] if len(v.shape)]
    assert sum(np.any(v.numpy() != 0) for v in slots) == 6

    for load in LOADERS.values():
        loaded = load(tmp_path / "model.keras")
        assert_same_model(loaded, model)
    other = built_model(LossScaleOptimizer(multi_optimizer()))
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same_model(other, model)
    assert_same_model(train(loaded, epochs=1), train(model, epochs=1))


@every_loader
def test_a_file_with_a_registered_inner_optimizer_loads(load, tmp_path, no_warnings):
    model = built_model(LossScaleOptimizer(RegisteredSGD(0.05, momentum=0.9, stride=3)))
    model.save(tmp_path / "model.keras")
    loaded = load(tmp_path / "model.keras")
    assert type(loaded.optimizer.inner_optimizer) is RegisteredSGD
    assert loaded.optimizer.inner_optimizer.stride == 3
    assert_same_model(loaded, model)


@pytest.mark.in_turn("tensorflow")
def test_a_file_with_unregistered_classes_loads_by_custom_objects(
    tmp_path, no_warnings
):
    optimizer = LossScaleOptimizer(
        UnregisteredSGD(0.05, momentum=0.9), loss_scale=UnregisteredLossScale(64.0)
    )
    model = train(small_model(optimizer))
    model.save(tmp_path / "model.keras")

    for load in LOADERS.values():
        with pytest.raises(TypeError, match="Could not locate class 'UnregisteredSGD'"):
            load(tmp_path / "model.keras")
        loaded = load(tmp_path / "model.keras", custom_objects=UNREGISTERED)
        assert type(loaded.optimizer.inner_optimizer) is UnregisteredSGD
        assert type(loaded.optimizer.loss_scale_policy) is UnregisteredLossScale
        assert int(loaded.optimizer.loss_scale_policy.overflows.numpy()) == 2
        assert_same_model(loaded, model)


def sgd_model(momentum=0.0):
    return small_model(LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum)))


@pytest.mark.in_turn("jax")
@pytest.mark.filterwarnings("error::UserWarning")
def test_the_state_of_an_optimizer_without_slots_is_loaded_before_it_is_built(tmp_path):
    # It has all of its variables already, the loss scale's among them.
    model = train(sgd_model(), epochs=1)
    model.save_weights(tmp_path / "model.weights.h5")
    other = sgd_model()
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same_model(other, model)
    for going_on in (model, other):
        train(going_on, epochs=1)
    assert int(other.optimizer.iterations) == int(model.optimizer.iterations) > 2
    assert_same_model(other, model)


@pytest.mark.in_turn("tensorflow")
def test_weights_without_a_built_optimizer_load_as_keras_loads_them(tmp_path):
    # With more variables than it has, the file must not be taken for that of another
    # class or policy.
    model = train(sgd_model(0.9), epochs=1)
    model.save_weights(tmp_path / "model.weights.h5")
    other = sgd_model(0.9)
    with pytest.warns(UserWarning, match="has not been built yet") as caught:
        other.load_weights(tmp_path / "model.weights.h5")
    assert len(caught) == 1
    assert_same(other.get_weights(), model.get_weights())
    train(other, epochs=1)
    assert int(other.optimizer.iterations) == 2


@pytest.mark.in_turn("torch")
def test_bare_weights_without_a_built_optimizer_load_as_keras_loads_them(tmp_path):
    # Two slots and two variables of its own: as many as an unbuilt wrapper has.
    def dense(optimizer):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        model.compile(optimizer, loss="mean_squared_error")
        return model

    model = train(dense(momentum_sgd()), overflows=False)
    model.save_weights(tmp_path / "model.weights.h5")
    other = dense(LossScaleOptimizer(momentum_sgd()))
    with pytest.warns(UserWarning, match="has not been built yet"):
        other.load_weights(tmp_path / "model.weights.h5")
    assert_same(other.get_weights(), model.get_weights())
    assert int(other.optimizer.iterations) == 0


# --- Legacy whole-model .h5 -------------------------------------------------
# Keras builds the optimizer that it loads from such a file for no variables, so no
# optimizer can go on from there, its own ones included. What it does bring back is
# the model, its weights and the optimizer's config. `tests/test_h5_models.py` has what
# `keras_lso.load_model` brings back.


# Saving one takes the optimizer out of the model's compile config, so these tests
# save models of their own.


@every_loader
@pytest.mark.parametrize("policy", ["default", "fixed", "hysteresis", "user's own"])
def test_a_legacy_h5_file_brings_back_the_model_and_the_config(
    policy, load, tmp_path, no_warnings
):
    optimizer = LossScaleOptimizer(momentum_sgd(), **POLICIES[policy]())
    model = built_model(optimizer)
    model.save(tmp_path / "model.h5")
    with h5py.File(tmp_path / "model.h5") as file:
        assert "keras.src" not in file.attrs["training_config"]

    loaded = load(tmp_path / "model.h5")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert loaded.optimizer.get_config() == optimizer.get_config()
    assert_same(loaded.get_weights(), model.get_weights())


@pytest.mark.in_turn("torch")
def test_a_model_from_a_legacy_h5_file_trains_once_compiled(tmp_path, no_warnings):
    model = built_model(LossScaleOptimizer(momentum_sgd()))
    model.save(tmp_path / "model.h5")
    loaded = keras_lso.load_model(tmp_path / "model.h5", compile=False)
    loaded.compile(LossScaleOptimizer(momentum_sgd()), loss="mean_squared_error")
    train(loaded)
    assert int(loaded.optimizer.iterations) == 4
    assert int(loaded.optimizer.skipped_steps) == 2


# --- keras_lso.load_model ---------------------------------------------------


def keras_wrapper(inner=None):
    return keras.optimizers.LossScaleOptimizer(inner or momentum_sgd(), 2.0**10)


@pytest.fixture
def set_dtype_policy():
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize("policy_on_loading", ["mixed_float16", "float32"])
def test_load_model_adopts_what_keras_wrapped_by_itself(
    policy_on_loading, set_dtype_policy, tmp_path, no_warnings
):
    # The file's config names the bare optimizer; its state is that of the wrapper.
    set_dtype_policy("mixed_float16")
    model = train(small_model(momentum_sgd()))
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    model.save(tmp_path / "model.keras")

    set_dtype_policy(policy_on_loading)
    optimizer = keras_lso.load_model(tmp_path / "model.keras").optimizer
    assert type(optimizer) is LossScaleOptimizer
    assert type(optimizer.inner_optimizer) is type(momentum_sgd())
    assert float(optimizer.loss_scale) == 2.0**13
    assert int(optimizer.iterations) == 4
    assert_same(
        state(optimizer)[1:], [v.numpy() for v in model.optimizer.variables][1:]
    )


@pytest.mark.in_turn("torch")
def test_load_model_leaves_the_file_alone(tmp_path):
    path = tmp_path / "model.keras"
    built_model(keras_wrapper()).save(path)
    before = path.read_bytes()
    assert type(keras_lso.load_model(path).optimizer) is LossScaleOptimizer
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model.keras"]


@pytest.mark.in_turn("jax")
def test_load_model_takes_a_text_path(tmp_path):
    model = built_model(keras_wrapper())
    model.save(tmp_path / "model.keras")
    loaded = keras_lso.load_model(str(tmp_path / "model.keras"))
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert_same(loaded.get_weights(), model.get_weights())


@pytest.mark.parametrize("wrap", [keras_wrapper, LossScaleOptimizer, lambda o: o])
def test_load_model_need_not_compile(wrap, tmp_path, no_warnings):
    model = built_model(wrap(momentum_sgd()))
    model.save(tmp_path / "model.keras")
    loaded = keras_lso.load_model(tmp_path / "model.keras", compile=False)
    assert not loaded.compiled
    assert_same(loaded.get_weights(), model.get_weights())


@pytest.mark.one_backend
def test_load_model_reads_a_model_that_was_never_compiled(tmp_path, no_warnings):
    model = small_model()
    model.save(tmp_path / "model.keras")
    loaded = keras_lso.load_model(tmp_path / "model.keras")
    assert not loaded.compiled
    assert_same(loaded.get_weights(), model.get_weights())


@pytest.mark.in_turn("jax")
def test_load_model_reads_a_file_with_nothing_to_adopt(tmp_path, no_warnings):
    model = built_model(keras.optimizers.Adam(), dtype="float32")
    model.save(tmp_path / "model.keras")
    loaded = keras_lso.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert_same_model(loaded, model)


@pytest.mark.one_backend
@pytest.mark.parametrize("name", ["missing.keras", "text.keras", "text.txt"])
def test_load_model_refuses_in_keras_own_words(name, tmp_path):
    for text in ("text.keras", "text.txt"):
        (tmp_path / text).write_text("This is no model.")
    messages = []
    for load in LOADERS.values():
        with pytest.raises(ValueError, match=name) as caught:
            load(tmp_path / name)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("wrap", [keras_wrapper, LossScaleOptimizer])
def test_load_model_refuses_code_unless_told_otherwise(wrap, tmp_path):
    model = built_model(
        wrap(momentum_sgd()), extra_layers=[layers.Lambda(lambda x: x * 2)]
    )
    with warnings.catch_warnings():
        # Keras says on saving what this test is about.
        warnings.simplefilter("ignore")
        model.save(tmp_path / "model.keras")

    with pytest.raises(ValueError, match="Python lambda"):
        keras_lso.load_model(tmp_path / "model.keras")
    loaded = keras_lso.load_model(tmp_path / "model.keras", safe_mode=False)
    assert type(loaded.optimizer) is LossScaleOptimizer
    x = np.ones((1, 4), "float32")
    assert_same([loaded.predict(x, verbose=0)], [model.predict(x, verbose=0)])


@pytest.mark.in_turn("jax")
def test_load_model_passes_custom_objects_on(tmp_path, no_warnings):
    model = built_model(keras_wrapper(UnregisteredSGD(0.05, momentum=0.9)))
    model.save(tmp_path / "model.keras")
    loaded = keras_lso.load_model(tmp_path / "model.keras", custom_objects=UNREGISTERED)
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert type(loaded.optimizer.inner_optimizer) is UnregisteredSGD
    assert_same(loaded.get_weights(), model.get_weights())


@pytest.mark.in_turn("jax")
def test_load_model_adopts_no_class_that_custom_objects_name(tmp_path, no_warnings):
    own = type("LARS", (keras.optimizers.SGD,), {})
    model = small_model(own(0.05))
    model.save(tmp_path / "saved.keras")
    # As a program that was run by itself may have written it.
    with (
        zipfile.ZipFile(tmp_path / "saved.keras") as saved,
        zipfile.ZipFile(tmp_path / "model.keras", "w") as copy,
    ):
        for name in saved.namelist():
            content = saved.read(name)
            if name == "config.json":
                config = json.loads(content)
                optimizer = config["compile_config"]["optimizer"]
                optimizer |= {"module": None, "registered_name": "LARS"}
                content = json.dumps(config)
            copy.writestr(name, content)
    loaded = keras_lso.load_model(
        tmp_path / "model.keras", custom_objects={"LARS": own}
    )
    assert type(loaded.optimizer) is own


@pytest.mark.in_turn("jax")
def test_load_model_says_what_it_does_not_replace(tmp_path):
    model = small_model(keras_wrapper())
    model.save(tmp_path / "folder", zipped=False)
    with pytest.warns(UserWarning, match="Only in a `.keras` or `.h5` file"):
        loaded = keras_lso.load_model(tmp_path / "folder")
    assert type(loaded.optimizer) is keras.optimizers.LossScaleOptimizer


@keras.saving.register_keras_serializable("integration_tests")
class WithVocabulary(layers.Layer):
    """A layer with a file of its own inside the archive."""

    words = ""

    def call(self, x):
        return x

    def save_assets(self, folder):
        with open(f"{folder}/words.txt", "w") as file:
            file.write(self.words)

    def load_assets(self, folder):
        with open(f"{folder}/words.txt") as file:
            self.words = file.read()


@pytest.mark.in_turn("torch")
def test_load_model_carries_all_that_is_in_the_archive(tmp_path, no_warnings):
    layer = WithVocabulary()
    model = built_model(keras_wrapper(), extra_layers=[layer])
    layer.words = "loss scale " * 1000
    model.save(tmp_path / "model.keras")
    loaded = keras_lso.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert loaded.layers[1].words == layer.words


# --- Damaged files ----------------------------------------------------------


def shorten_a_slot(variables):
    shape = variables["6"].shape
    del variables["6"]
    variables["6"] = np.zeros((shape[0] - 1, *shape[1:]), "float32")


def flatten_the_last_slot(variables):
    del variables["9"]
    variables["9"] = np.float32(0)


def lengthen_the_scale(variables):
    del variables["3"]
    variables["3"] = np.full(2, 64, "float32")


def rename_the_scale(variables):
    variables.move("3", "33")


DAMAGED_FILES = {
    "a slot too short": (shorten_a_slot, "shape"),
    "a scalar for a slot": (flatten_the_last_slot, "shape"),
    "two scales": (lengthen_the_scale, "shape"),
    "no scale": (rename_the_scale, "'3'"),
}
every_damage = pytest.mark.parametrize(
    ("damage", "words"), DAMAGED_FILES.values(), ids=DAMAGED_FILES.keys()
)


@every_damage
def test_a_damaged_weights_file_is_refused_and_nothing_half_loaded(
    damage, words, tmp_path
):
    path = tmp_path / "model.weights.h5"
    trained_model().save_weights(path)
    with h5py.File(path, "r+") as file:
        damage(file["optimizer/vars"])

    other = built_model(LossScaleOptimizer(momentum_sgd()))
    before = [v.numpy() for v in other.optimizer.variables]
    with pytest.raises(ValueError, match=words):
        other.load_weights(path)
    assert_same([v.numpy() for v in other.optimizer.variables], before)
    with pytest.warns(UserWarning, match=words):
        other.load_weights(path, skip_mismatch=True)
    assert_same([v.numpy() for v in other.optimizer.variables], before)


@pytest.mark.exhaustive
@every_damage
@every_loader
def test_a_damaged_keras_file_is_refused(damage, words, load, tmp_path):
    trained_model().save(tmp_path / "good.keras")
    with zipfile.ZipFile(tmp_path / "good.keras") as good:
        good.extractall(tmp_path)
    with h5py.File(tmp_path / "model.weights.h5", "r+") as file:
        damage(file["optimizer/vars"])
    with zipfile.ZipFile(tmp_path / "bad.keras", "w") as bad:
        for name in good.namelist():
            bad.write(tmp_path / name, name)

    with pytest.raises(ValueError, match=words):
        load(tmp_path / "bad.keras")


@pytest.mark.in_turn("tensorflow")
def test_a_file_with_other_variables_is_skipped_with_a_warning(tmp_path):
    path = tmp_path / "model.weights.h5"
    trained_model().save_weights(path)

    other = built_model(LossScaleOptimizer(keras.optimizers.SGD()))
    before = [v.numpy() for v in other.optimizer.variables]
    with pytest.warns(UserWarning, match="has 6 variables .* optimizer has 10"):
        other.load_weights(path)
    assert_same([v.numpy() for v in other.optimizer.variables], before)


@pytest.mark.in_turn("jax")
def test_as_many_variables_of_other_shapes_are_refused(tmp_path):
    # Six: those of a bare optimizer with four slots, or of the wrapper of one
    # without any.
    path = tmp_path / "model.weights.h5"
    built_model(momentum_sgd()).save_weights(path)

    other = built_model(LossScaleOptimizer(keras.optimizers.SGD(0.05)))
    before = [v.numpy() for v in other.optimizer.variables]
    with pytest.raises(ValueError, match="shape"):
        other.load_weights(path)
    assert_same([v.numpy() for v in other.optimizer.variables], before)
