"""The wrapper survives long runs of overflows, and leaves no trace without them.

1. A long run of overflows: training goes on, and the scale keeps to its minimum.
2. A long run of zero gradients: training goes on, and the scale to its maximum.
3. A skipped step changes nothing, bit for bit.
4. Scale, counters and skips are those of Keras's own class; without an overflow
   the weights are those of the inner optimizer alone, bitwise on the generic path.
"""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
import testing.kernels

INF = float("inf")

# 2**-14 and 2**24, the bounds that a LossScaleOptimizer has by default.
LOWEST, HIGHEST = 2.0**-14, 2.0**24


@pytest.fixture
def survive(make_model, data, fit, make_recorder):
    """`survive(growth_steps, x, y, **options)`: the recorded steps and their scales.

    Of 480 batches of one sample the first 400 change no weight. The others train.
    """

    def run(growth_steps, x, y, **options):
        model = make_model("mixed_float16")
        optimizer = keras_lso.LossScaleOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.5), dynamic_growth_steps=growth_steps
        )
        model.compile(optimizer, loss="mse")
        start = model.get_weights()
        before = model.evaluate(*data, verbose=0)
        recorder = make_recorder()
        fit(model, x, y, batch_size=1, callbacks=[recorder], **options)
        assert recorder.weights_are_finite
        for weight, old in zip(recorder.steps[399].weights, start, strict=True):
            assert weight.tobytes() == old.tobytes()
        assert model.evaluate(*data, verbose=0) < 0.5 * before
        return recorder.steps, recorder.column("scale")

    return run


@pytest.fixture
def samples(data):
    return [np.concatenate([array] * 15) for array in data]


def test_training_recovers_after_400_consecutive_overflows(survive, samples):
    x, y = samples
    x[:400] = INF
    steps, scales = survive(4, x, y)
    assert min(scales) == LOWEST
    # From 2**15 it is there after 29 halvings, and stays.
    assert set(scales[28:400]) == {LOWEST}
    # Every finite step counts, and the scale recovers.
    assert steps[399].skipped == steps[479].skipped == 400
    assert scales[479] == LOWEST * 2.0 ** (80 // 4)


def test_training_recovers_after_400_growth_periods_of_zero_gradients(survive, samples):
    sample_weight = np.repeat(np.float32([0.0, 1.0]), [400, 80])
    steps, scales = survive(1, *samples, sample_weight=sample_weight)
    assert max(scales) == HIGHEST
    # From 2**15 it is there after 9 doublings, and stays.
    assert set(scales[8:400]) == {HIGHEST}
    assert steps[399].skipped == 0
    # Now float16 overflows for real, the scale comes down, and training goes on.
    assert 1 <= steps[479].skipped <= 60
    assert min(scales[400:]) < HIGHEST


SKIPPING = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "AdamW": lambda: keras.optimizers.AdamW(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5),
    "accumulation and clipping": lambda: keras.optimizers.Adam(
        0.1, gradient_accumulation_steps=2, global_clipnorm=1.0
    ),
    "EMA that overwrites": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_overwrite_frequency=1, weight_decay=0.5
    ),
}

GRAPH, XLA, EAGER = (
    {"jit_compile": False},
    {"jit_compile": True},
    {"run_eagerly": True},
)
COMPILE = {
    "tensorflow": {"graph": GRAPH, "XLA": XLA, "eager": EAGER},
    "jax": {"XLA": XLA, "eager": EAGER},
    # `torch.compile` takes half a minute; test_fit.py has a test of it.
    "torch": {"eager": EAGER},
}[keras.backend.backend()]

# -0.0 turns into 0.0 when anything is added to it, and a subnormal number into
# 0.0 by any arithmetic at all under XLA.
FRAGILE = np.array([-0.0, 0.0, 1e-40, -1e-40, 1.0, -3.0, 1e30, -0.0], "float32")


def make_fragile(variables):
    """Fills the tensors among the variables with values that break easily."""
    for variable in variables:
        if len(variable.shape) > 0:
            size = int(np.prod(variable.shape))
            value = np.resize(FRAGILE, size).reshape(variable.shape)
            variable.assign(value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("compile_options", COMPILE)
@pytest.mark.parametrize("inner", SKIPPING)
def test_skipped_train_step_changes_no_variable(
    inner, compile_options, make_model, data, bits
):
    x, y = (array[:8] for array in data)
    model = make_model("float32")
    optimizer = keras_lso.LossScaleOptimizer(SKIPPING[inner]())
    model.compile(optimizer, loss="mse", **COMPILE[compile_options])
    optimizer.build(model.trainable_variables)
    state = [*model.trainable_variables, *optimizer.inner_optimizer.variables]
    make_fragile(state)
    before = bits(state)
    # Not by `fit`, which ends with the averages in place of the weights.
    model.train_on_batch(np.full_like(x, INF), y)
    assert bits(state) == before
    assert int(optimizer.skipped_steps) == 1


@pytest.mark.parametrize("compile_options", COMPILE)
def test_scale_counter_and_skips_match_keras_wrapper(
    compile_options, make_model, data, fit, make_recorder, assert_close
):
    # The same batch fifteen times; three are given an infinite weight.
    x, y = (np.concatenate([array[:8]] * 15) for array in data)
    sample_weight = np.ones((15, 8), "float32")
    sample_weight[[0, 1, 11], 3] = INF

    recorders = []
    for cls in (keras.optimizers.LossScaleOptimizer, keras_lso.LossScaleOptimizer):
        model = make_model("float32")
        optimizer = cls(
            keras.optimizers.SGD(0.1), initial_scale=1024.0, dynamic_growth_steps=2
        )
        model.compile(optimizer, loss="mse", **COMPILE[compile_options])
        recorders.append(make_recorder())
        fit(model, x, y, sample_weight=sample_weight.ravel(), callbacks=recorders[-1:])

    theirs, ours = recorders
    assert len(ours.steps) == 15
    for name in ("scale", "counter", "skipped"):
        assert ours.column(name) == theirs.column(name)
    assert ours.steps[-1].skipped == 3
    # It went both ways, and stayed inside the bounds.
    assert (min(ours.column("scale")), max(ours.column("scale"))) == (256, 4096)
    # All steps of a weight at once: a bias begins at zero, and its gradient is a sum of
    # errors of both signs, which is rounded alike however small the bias still is.
    courses = [
        [np.stack(course) for course in zip(*recorder.column("weights"), strict=True)]
        for recorder in (ours, theirs)
    ]
    assert_close(*courses)


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    # Momentum makes ten of the rate. With 0.1 the training itself makes five, on one
    # bias a hundred, of what its weights differ by at first; with 0.01 less than one.
    "SGD with Nesterov": lambda: keras.optimizers.SGD(
        0.01, momentum=0.9, nesterov=True
    ),
    "Adam": lambda: keras.optimizers.Adam(),
    "AdamW": lambda: keras.optimizers.AdamW(),
}

STEPS = 50


def train_by_apply(optimizer):
    """Returns the weights after 50 calls of `apply` on gradients given beforehand."""
    random = np.random.default_rng(0)
    # In the second one is nothing but the steps themselves.
    start = np.stack([random.normal(size=6), np.zeros(6)]).astype("float32")
    variables = [keras.Variable(row) for row in start]
    for _ in range(STEPS):
        scale = float(optimizer.scale_loss(1.0))
        gradients = random.normal(size=(2, 6)).astype("float32") * np.float32(scale)
        optimizer.apply([ops.array(g) for g in gradients], variables)
    return [np.array(v.numpy()) for v in variables]


def train_by_fit(optimizer, jit_compile="auto"):
    """Returns the weights after 50 batches of `fit`."""
    random = np.random.default_rng(0)
    x = random.normal(size=(8 * STEPS, 4)).astype("float32")
    y = x @ random.normal(size=(4, 1)).astype("float32")
    first, second = (keras.initializers.GlorotUniform(seed) for seed in (1, 2))
    hidden = keras.layers.Dense(8, "tanh", kernel_initializer=first)
    output = keras.layers.Dense(1, kernel_initializer=second)
    model = keras.Sequential([keras.Input((4,)), hidden, output])
    model.compile(optimizer, loss="mse", jit_compile=jit_compile)
    # TensorFlow would trace the step twice: with its variables, and without.
    optimizer.build(model.trainable_variables)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return [np.array(v.numpy()) for v in model.trainable_variables]


def train_by_fit_under_xla(optimizer):
    return train_by_fit(optimizer, jit_compile=True)


TRAIN = {"apply": train_by_apply, "fit": train_by_fit}
if "graph" in COMPILE:
    # Elsewhere `fit` is always under XLA, or never.
    TRAIN["fit under XLA"] = train_by_fit_under_xla


@functools.cache
def weights_alone(how, name):
    """Returns what the inner optimizer makes of them; the tests only read it."""
    weights = TRAIN[how](OPTIMIZERS[name]())
    assert all(weight.any() for weight in weights)
    return weights


def weights_wrapped(how, name):
    # It grows every ten steps: to 2**20.
    wrapper = keras_lso.LossScaleOptimizer(OPTIMIZERS[name](), dynamic_growth_steps=10)
    weights = TRAIN[how](wrapper)
    assert float(wrapper.loss_scale) == 2.0**20
    assert int(wrapper.iterations) == STEPS
    return weights


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", TRAIN)
def test_weights_on_generic_path_are_bitwise_equal_to_inner_optimizer(how, name):
    with testing.kernels.off():
        wrapped = weights_wrapped(how, name)
    for expected, actual in zip(weights_alone(how, name), wrapped, strict=True):
        np.testing.assert_array_equal(actual, expected)
        assert actual.tobytes() == expected.tobytes()
