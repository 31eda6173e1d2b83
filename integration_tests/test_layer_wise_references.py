"""`LARS`, `LAMB` and `NovoGrad` step like the Model Garden's and optax's.

Each original runs in its own framework, on the same gradients of layers of every kind.
TensorFlow Addons has no release for this TensorFlow. Its LAMB is the Model Garden's,
which was copied from there, except for the name of an argument.

Largest difference allowed, after each fifth of 50 steps: 2e-6 of the tensor's largest
magnitude. Rounding of a step is 6e-8 of it at most; sums of squares in another order
add as much to a trust ratio.
"""

import json

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LAMB, LARS, NovoGrad

STEPS = 50
RECORDED = slice(4, None, 5)
SHAPES = {
    "conv/kernel": (3, 3, 2, 4),
    "conv/bias": (4,),
    "bn/gamma": (4,),
    "bn/beta": (4,),
    "dense/kernel": (4, 3),
    "scale": (),
}
ZERO_AT_FIRST = ("conv/bias", "bn/beta")  # |w| is 0
WITHOUT_GRADIENT = ("dense/kernel", "dense")  # |g| is 0


def make_start(shapes):
    """Returns the weights by their paths."""
    random = np.random.default_rng(1)
    return {
        path: np.zeros(shape, "float32")
        if path in ZERO_AT_FIRST
        else random.standard_normal(shape).astype("float32")
        for path, shape in shapes.items()
    }


def make_gradients(shapes, zero_at=0):
    """Returns the gradients of each step; those of some are 0 at every third step."""
    random = np.random.default_rng(2)
    return [
        {
            path: np.float32(10.0 ** random.integers(-3, 3))
            * random.standard_normal(shape).astype("float32")
            * np.float32(not (path in WITHOUT_GRADIENT and step % 3 == zero_at))
            for path, shape in shapes.items()
        }
        for step in range(STEPS)
    ]


def make_variables(start):
    variables = []
    for path, value in start.items():
        *scopes, name = path.split("/")
        with keras.name_scope(scopes[0] if scopes else "top"):
            variables.append(keras.Variable(value, name=name))
    return variables


def recorded(steps):
    """Returns for each variable an array of its values after each fifth step."""
    return [np.stack(values) for values in zip(*steps[RECORDED], strict=True)]


@pytest.fixture
def check(original, assert_close):
    """`check(optimizer, run)`: compares the steps with those that `run` returns."""

    def check(optimizer, run, shapes=SHAPES, **of_gradients):
        variables, steps = make_variables(make_start(shapes)), []
        for grads in make_gradients(shapes, **of_gradients):
            optimizer.apply([ops.array(g) for g in grads.values()], variables)
            steps.append([np.array(ops.convert_to_numpy(v)) for v in variables])
        ours, theirs = recorded(steps), original(run)
        assert len(theirs[0]) == STEPS // 5
        for of_step in range(STEPS // 5):
            each = ([values[of_step] for values in all_] for all_ in (ours, theirs))
            assert_close(*each, share=2e-6)

    return check


def by_model_garden(load, settings, rates=None):
    """Returns a function that takes the steps by a class of the Model Garden."""

    def run():
        import tensorflow as tf
        import tf_keras

        schedule = {}
        if rates is not None:
            decay = tf_keras.optimizers.schedules.PolynomialDecay(**rates)
            schedule["learning_rate"] = decay
        optimizer = load()(**settings, **schedule)
        start = make_start(SHAPES)
        variables = [tf.Variable(value, name=path) for path, value in start.items()]
        steps = []
        for grads in make_gradients(SHAPES):
            tensors = [tf.constant(g) for g in grads.values()]
            optimizer.apply_gradients(zip(tensors, variables, strict=True))
            steps.append([np.array(v) for v in variables])
        return recorded(steps)

    return run


def by_optax(name, rate, shapes=SHAPES, zero_at=0, **settings):
    """Returns a function that takes the steps by an optimizer of optax."""

    def run():
        import jax
        import optax

        optimizer = getattr(optax, name)(rate, **settings)
        weights = jax.tree.map(jax.numpy.asarray, make_start(shapes))
        state = optimizer.init(weights)
        steps = []
        for grads in make_gradients(shapes, zero_at):
            grads = jax.tree.map(jax.numpy.asarray, grads)
            updates, state = optimizer.update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
            steps.append([np.asarray(weights[path]) for path in shapes])
        return recorded(steps)

    return run


@pytest.fixture
def theirs(model_garden):
    """`theirs(cls)`: a function that loads the Model Garden's class of the name."""
    return lambda cls: lambda: getattr(model_garden(cls.__name__.lower()), cls.__name__)


EXCLUDED = dict(exclude_from_weight_decay=["bn", "bias"])
OF_LAMB = {
    "by default": {},
    "decay": dict(weight_decay_rate=0.02),
    "a high rate": dict(learning_rate=0.3),
    "other betas": dict(beta_1=0.5, beta_2=0.75),
    "no first moment": dict(beta_1=0.0, weight_decay_rate=0.02),
    "no second moment": dict(beta_2=0.0, epsilon=0.5),
    "epsilon": dict(epsilon=0.125),
    "heavy decay": dict(weight_decay_rate=2.0),
    "excluded": EXCLUDED,
    "excluded, decay": dict(weight_decay_rate=0.02, **EXCLUDED),
    "excluded from decay alone": dict(
        weight_decay_rate=0.02, exclude_from_layer_adaptation=["nothing"], **EXCLUDED
    ),
    "excluded from adaptation alone": dict(
        weight_decay_rate=0.02, exclude_from_layer_adaptation=["kernel", "gamma"]
    ),
    "inverse time decay": dict(decay=0.1, weight_decay_rate=0.02),
}


# In the Model Garden an empty list is none: a pattern in vain excludes nothing there.
@pytest.mark.filterwarnings("ignore:A pattern matches no variable.*'nothing'")
@pytest.mark.parametrize("settings", OF_LAMB.values(), ids=OF_LAMB)
def test_lamb_matches_model_garden(settings, theirs, check):
    settings = {"learning_rate": 0.05, **settings}
    check(LAMB(**settings), by_model_garden(theirs(LAMB), settings))


of_lars = [
    pytest.mark.parametrize("excluded", [None, ["bn", "bias"]], ids=["all", "some"]),
    pytest.mark.parametrize("decay", [0.0, 0.02]),
    pytest.mark.parametrize("nesterov", [False, True]),
]


@pytest.mark.exhaustive
@of_lars[0]
@of_lars[1]
@of_lars[2]
@pytest.mark.parametrize("classic", [True, False], ids=["classic", "popular"])
def test_lars_matches_model_garden(classic, nesterov, decay, excluded, theirs, check):
    settings = dict(
        learning_rate=0.5,
        momentum=0.9,
        weight_decay_rate=decay,
        eeta=0.01,
        nesterov=nesterov,
        classic_momentum=classic,
        exclude_from_weight_decay=excluded,
    )
    check(LARS(**settings), by_model_garden(theirs(LARS), settings))


def test_lars_with_decay_argument_matches_model_garden(theirs, check):
    settings = dict(learning_rate=0.5, eeta=0.01, decay=0.1)
    check(LARS(**settings), by_model_garden(theirs(LARS), settings))


@pytest.mark.parametrize(
    "cls, settings, rate",
    [
        (LARS, dict(eeta=0.01, classic_momentum=True), 0.8),
        (LARS, dict(eeta=0.01, classic_momentum=False), 0.8),
        (LAMB, {}, 0.1),
    ],
    ids=["LARS, classic", "LARS, popular", "LAMB"],
)
def test_optimizer_with_schedule_matches_model_garden(
    cls, settings, rate, theirs, check
):
    rates = dict(
        initial_learning_rate=rate, decay_steps=40, end_learning_rate=0.01, power=2.0
    )
    settings = dict(weight_decay_rate=0.01, **settings)
    schedule = keras.optimizers.schedules.PolynomialDecay(**rates)
    ours = cls(schedule, **settings)
    check(ours, by_model_garden(theirs(cls), settings, rates))


@pytest.mark.exhaustive
@of_lars[0]
@of_lars[1]
@of_lars[2]
def test_lars_matches_optax(nesterov, decay, excluded, check):
    ours = LARS(
        learning_rate=0.5,
        momentum=0.9,
        weight_decay_rate=decay,
        eeta=0.01,
        nesterov=nesterov,
        exclude_from_weight_decay=excluded,
    )
    mask = {
        path: not any(pattern in path for pattern in excluded or []) for path in SHAPES
    }
    settings = dict(weight_decay=decay, momentum=0.9, nesterov=nesterov)
    settings |= dict(weight_decay_mask=mask, trust_ratio_mask=mask)
    check(ours, by_optax("lars", 0.5, trust_coefficient=0.01, **settings))


def test_lamb_matches_optax(check):
    # 1 - beta has no rounding error in float32, which optax does not share.
    b1, b2 = 1 - 2**-3, 1 - 2**-7
    ours = LAMB(0.05, b1, b2, weight_decay_rate=0.02)
    check(ours, by_optax("lamb", 0.05, b1=b1, b2=b2, eps=1e-6, weight_decay=0.02))


@pytest.mark.parametrize("decay", [pytest.param(0.0, marks=pytest.mark.full), 0.02])
def test_novograd_without_epsilon_matches_optax(decay, check):
    # At its first step no norm may be 0: without epsilon optax would divide by it.
    shapes = {"kernel": (3, 3, 2, 4), "bias": (4,), "dense": (4, 3), "scale": ()}
    problem = {"shapes": shapes, "zero_at": 1}
    ours = NovoGrad(0.02, beta_1=0.9, beta_2=0.75, epsilon=0.0, weight_decay_rate=decay)
    settings = dict(b1=0.9, b2=0.75, eps=0.0, weight_decay=decay)
    check(ours, by_optax("novograd", 0.02, **settings, **problem), **problem)


NUMBERS = dict(learning_rate=0.5, weight_decay_rate=0.125, name="mine", decay=2.0)
SETTINGS = {
    "LARS": {
        "by default": {},
        "all numbers": dict(
            momentum=0.75, eeta=0.25, nesterov=True, classic_momentum=False, **NUMBERS
        ),
        "clipnorm": dict(clipnorm=2.0),
        "clipvalue": dict(clipvalue=2.0),
        "global_clipnorm": dict(global_clipnorm=2.0),
    },
    "LAMB": {
        "by default": {},
        "all numbers": dict(beta_1=0.75, beta_2=0.5, epsilon=0.25, **NUMBERS),
        "clipnorm": dict(clipnorm=2.0),
        "global_clipnorm": dict(global_clipnorm=2.0),
    },
}
# For each class the names under which tf.keras registers it, and its modules.
REGISTERED = {"LARS": "LARS", "LAMB": "Addons>LAMB"}
MODULES = {
    "LARS": [None, "official.modeling.optimization.lars"],
    "LAMB": [
        None,
        "official.modeling.optimization.lamb",
        "tensorflow_addons.optimizers.lamb",
    ],
}


@pytest.mark.parametrize(
    "cls, settings",
    [
        pytest.param(cls, settings, id=f"{cls.__name__}, {name}")
        for cls in (LARS, LAMB)
        for name, settings in SETTINGS[cls.__name__].items()
    ],
)
def test_config_of_model_garden_loads(cls, settings, original, theirs):
    def run():
        import tf_keras

        original_cls = theirs(cls)()
        config = original_cls(**settings).get_config()
        return config, tf_keras.utils.get_registered_name(original_cls)

    config, name = original(run)
    expected, class_name = cls(**settings).get_config(), cls.__name__
    assert cls.from_config(config).get_config() == expected
    assert name == REGISTERED[class_name]
    addresses = [{"class_name": each} for each in (class_name, name)]
    addresses += [
        {"class_name": class_name, "module": module, "registered_name": name}
        for module in MODULES[class_name]
    ]
    for address in [*addresses, {"class_name": class_name, "module": None}]:
        read = keras_lso.deserialize({**address, "config": config})
        assert type(read) is cls
        assert read.get_config() == expected


def test_config_of_tensorflow_addons_lamb_loads():
    """Its later versions have `weight_decay` in place of `weight_decay_rate`.

    This is what `get_config` of version 0.23 returns.
    """
    config = {
        "name": "LAMB",
        "learning_rate": 0.5,
        "weight_decay": 0.125,
        "decay": 2.0,
        "beta_1": 0.75,
        "beta_2": 0.5,
        "epsilon": 0.25,
    }
    wrapped = {"class_name": "Addons>LAMB", "config": config}
    ours = keras_lso.deserialize(json.loads(json.dumps(wrapped)))
    assert ours.weight_decay_rate == 0.125
    assert ours.weight_decay is None
    assert config["weight_decay"] == 0.125
    expected = LAMB(0.5, 0.75, 0.5, 0.25, 0.125, decay=2.0).get_config()
    assert ours.get_config() == expected


SCHEDULES = {
    "ExponentialDecay": dict(
        initial_learning_rate=0.5, decay_steps=4, decay_rate=0.25, staircase=True
    ),
    "PiecewiseConstantDecay": dict(boundaries=[2, 4], values=[0.5, 0.25, 0.125]),
    "PolynomialDecay": dict(
        initial_learning_rate=0.5, decay_steps=8, end_learning_rate=0.1, power=2.0
    ),
    "InverseTimeDecay": dict(initial_learning_rate=0.5, decay_steps=2, decay_rate=3.0),
    "CosineDecay": dict(initial_learning_rate=0.5, decay_steps=8, alpha=0.25),
    "CosineDecayRestarts": dict(initial_learning_rate=0.5, first_decay_steps=3),
}


@pytest.mark.parametrize("name", [None, "mine"])
@pytest.mark.parametrize("schedule, settings", SCHEDULES.items(), ids=SCHEDULES)
def test_lars_config_with_tf_keras_schedule_loads(
    schedule, settings, name, original, theirs
):
    def run():
        import tf_keras

        decay = getattr(tf_keras.optimizers.schedules, schedule)(**settings, name=name)
        config = theirs(LARS)()(learning_rate=decay).get_config()
        return config, [float(decay(step)) for step in range(6)]

    config, expected = original(run)
    assert isinstance(config["learning_rate"], dict)
    wrapped = {"class_name": "LARS", "config": config}
    for ours in (
        LARS.from_config(json.loads(json.dumps(config))),
        keras_lso.deserialize(json.loads(json.dumps(wrapped))),
    ):
        rates = []
        w = keras.Variable([3.0, 4.0], name="w")
        for _ in range(6):
            rates.append(float(ours.learning_rate))
            ours.apply([ops.zeros(2)], [w])
        # The same formula in another order.
        np.testing.assert_allclose(rates, expected, rtol=1e-6)
