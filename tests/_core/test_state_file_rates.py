"""States of runs with a constant rate load into optimizers with a schedule, and back.

A constant rate is a variable after the count of steps, so its file has one more entry.
"""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_lso
from keras_lso import GuardedOptimizer, LossScaleOptimizer, SpikeGuard
from keras_lso.compat.open_seq2seq import FixedLR
from keras_lso.loss_scales import DynamicLossScale
from testing.harness import bits
from testing.trained_optimizers import filled, innermost, named_slots, number, saved

K = keras.optimizers
SHAPES = [(3, 2), (2,), (2,)]

INNER = {
    "Adam": K.Adam,
    "SGD": K.SGD,
    "Nadam": K.Nadam,
    "Adafactor": K.Adafactor,
    "averaging": lambda rate: K.Adam(rate, use_ema=True),
    "accumulating": lambda rate: K.SGD(rate, gradient_accumulation_steps=2),
    "LAMB": keras_lso.LAMB,
    "LARS": keras_lso.LARS,
    "NovoGrad": keras_lso.NovoGrad,
    "LARC": lambda rate: keras_lso.LARC(K.Nadam(rate)),
}
WRAPPERS = {
    "Keras": K.LossScaleOptimizer,
    "scaled": LossScaleOptimizer,
    "hysteresis": lambda inner: LossScaleOptimizer(
        inner, loss_scale=DynamicLossScale(hysteresis=3)
    ),
    "guarded": lambda inner: LossScaleOptimizer(
        inner, spike_guard=SpikeGuard(window=16, warmup=8)
    ),
    "without a scale": GuardedOptimizer,
    "nobody": lambda inner: inner,
}
directions = pytest.mark.parametrize("to_schedule", [True, False])


def rate_for(is_schedule, rate):
    return FixedLR(rate) if is_schedule else rate


# LARC needs unscaled gradients. If all weights are scalars, the product of Nadam is
# shaped like them, and like a rate.
CASES = [
    *((i, w, SHAPES) for i in INNER for w in WRAPPERS if (i, w) != ("LARC", "Keras")),
    *(("Nadam", w, [(), ()]) for w in ("Keras", "scaled", "guarded", "nobody")),
    *((i, "bare", SHAPES) for i in ("LARS", "NovoGrad", "LARC")),
]


@directions
@pytest.mark.parametrize("inner, writer, shapes", CASES)
def test_state_loads_with_schedule_in_place_of_constant_and_reverse(
    inner, writer, shapes, to_schedule
):
    make, wrap = INNER[inner], WRAPPERS.get(writer, WRAPPERS["nobody"])
    written = filled(wrap(make(rate_for(not to_schedule, 0.25))), shapes)
    if writer in ("Keras", "nobody"):
        wrap = LossScaleOptimizer
    ours = filled(wrap(make(rate_for(to_schedule, 0.125))), shapes, start=50)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours.load_own_variables(saved(written))
    assert named_slots(ours) == named_slots(written)
    # The rate of its argument.
    assert number(ops.convert_to_tensor(ours.learning_rate)) == 0.125
    nadam = innermost(ours)
    if isinstance(nadam, K.Nadam) and writer != "Keras":
        assert number(nadam._u_product) == number(innermost(written)._u_product)


@pytest.mark.skipif(
    not hasattr(K, "MultiOptimizer"), reason="Keras 3.12 has no MultiOptimizer"
)
@pytest.mark.parametrize(
    "before, after", [("nn", "ss"), ("sn", "ns"), ("ss", "nn"), ("ns", "nn")]
)
def test_each_member_of_multi_optimizer_may_change_its_kind_of_rate(before, after):
    def made(kinds, start):
        rates = [rate_for(kind == "s", 0.25) for kind in kinds]
        # By a function, for variables without names.
        first, second = K.Adam(rates[0]), K.SGD(rates[1], momentum=0.5)
        inner = K.MultiOptimizer(lambda v: first if len(v.shape) == 2 else second)
        optimizer = LossScaleOptimizer(inner)
        optimizer.build([keras.Variable(np.ones(s, "float32")) for s in SHAPES])
        members = [(m, v) for m in inner.optimizers for v in m.variables]
        others = [v for member, v in members if v is not member._learning_rate]
        for i, variable in enumerate(others, start):
            variable.assign(np.full(variable.shape, i))
        return optimizer, others

    (written, values), (ours, loaded) = made(before, 1), made(after, 50)
    ours.load_own_variables(saved(written))
    assert bits(loaded) == bits(values)


X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")


def trained(model, count):
    for i in range(count):
        model.train_on_batch(X[i % 3 * 8 :][:8], X[:8, :1])


def make_model(rate, wrap, policy):
    keras.utils.set_random_seed(0)
    dense = [layers.Dense(3, "tanh", dtype=policy), layers.Dense(1, dtype=policy)]
    model = keras.Sequential([keras.Input((4,)), *dense])
    model.compile(wrap(K.Adam(rate)), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


RUNS = {
    "scaled": (LossScaleOptimizer, "mixed_float16"),
    **{
        f"{kind} masters": (
            lambda inner, kind=kind: GuardedOptimizer(
                inner, master_weights=kind, spike_guard=SpikeGuard(window=16, warmup=8)
            ),
            "bfloat16",
        )
        for kind in ("auto", "remainder", "remainder8", "stochastic", False)
    },
}


@directions
@pytest.mark.parametrize("run", RUNS)
def test_run_that_changes_its_kind_of_rate_equals_uninterrupted_run(
    run, to_schedule, tmp_path, snapshot
):
    wrap, policy = RUNS[run]
    run = make_model(rate_for(not to_schedule, 0.25), wrap, policy)
    trained(run, 12)
    run.save_weights(tmp_path / "run.weights.h5")
    resumed = make_model(rate_for(to_schedule, 0.25), wrap, policy)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Skipping variable loading")
        resumed.load_weights(tmp_path / "run.weights.h5")
    for model in (run, resumed):
        trained(model, 6)
    assert snapshot(resumed.weights) == snapshot(run.weights)
    steps = number(run.optimizer.iterations)
    assert number(resumed.optimizer.iterations) == steps > 12


def message_of(written, ours):
    with pytest.warns(UserWarning, match="Skipping variable loading") as caught:
        ours.load_own_variables(saved(written))
    return next(m for w in caught if "Skipping" in (m := str(w.message)))


def test_warning_says_to_build_before_loading():
    written = of_16_bits(K.Adam())
    message = message_of(written, LossScaleOptimizer(K.Adam()))
    assert "`optimizer.build(model.trainable_variables)` before `load" in message


def of_16_bits(inner, **arguments):
    optimizer = LossScaleOptimizer(inner, **arguments)
    optimizer.build(
        [keras.Variable(np.ones(s, "float32"), dtype="bfloat16") for s in SHAPES]
    )
    return optimizer


MORE_SLOTS = {
    "amsgrad": (K.Adam, {"amsgrad": True}),
    "momentum": (K.SGD, {"momentum": 0.5}),
    "averages": (K.Adam, {"use_ema": True}),
    "accumulators": (K.SGD, {"gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("is_schedule", [False, True])
@pytest.mark.parametrize("slots", MORE_SLOTS)
def test_warning_names_what_file_and_optimizer_have_more(slots, is_schedule):
    cls, arguments = MORE_SLOTS[slots]
    fewer = of_16_bits(cls(0.5))
    more = of_16_bits(cls(rate_for(is_schedule, 0.5), **arguments))
    slots, rate = "1 of shape (3, 2), 2 of shape (2,).", " 1 of shape ()." * is_schedule
    message = message_of(more, fewer)
    assert message.endswith(f"variables. Only in the file: {slots}") or is_schedule
    assert f"Only in the file: {slots}" in message
    assert message.endswith(rate or slots)
    assert "master" not in message
    # The values of masters are no slots.
    before = bits(more.inner_optimizer.variables)
    message = message_of(fewer, more)
    assert f"Only in the optimizer: {slots}" in message
    assert "master" not in message
    assert bits(more.inner_optimizer.variables) == before


@pytest.mark.parametrize("slots", [None, *MORE_SLOTS])
def test_warning_blames_masters_only_if_file_has_those_of_weights(slots):
    cls, arguments = MORE_SLOTS.get(slots, (K.SGD, {}))
    ours = of_16_bits(cls(0.5, **arguments), master_weights=False)
    # With `slots`, the two states have as many variables.
    message = message_of(of_16_bits(cls(0.5)), ours)
    assert "masters of the weights" in message
    if slots is not None:
        plain = of_16_bits(cls(0.5), master_weights=False)
        assert "master" not in message_of(ours, plain)


def test_warning_about_many_shapes_counts_the_rest():
    def made(inner):
        shapes = [(n, n) for n in range(1, 8)]
        return filled(LossScaleOptimizer(inner), shapes)

    message = message_of(made(K.SGD(0.5, momentum=0.5)), made(K.SGD(0.5)))
    assert message.endswith("1 of shape (3, 3), 1 of shape (4, 4), 7 in all.")


def test_warning_names_both_inner_optimizers(tmp_path):
    path = tmp_path / "model.weights.h5"
    models = []
    for inner in (K.Adam(name="adam"), K.SGD(name="sgd")):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras_lso.LossScaleOptimizer(inner), loss="mse")
        model.optimizer.build(model.trainable_variables)
        models.append(model)
    models[0].save_weights(path)
    words = "The inner optimizer is 'adam' in the file, and 'sgd' here"
    with pytest.warns(UserWarning, match=words):
        models[1].load_weights(path)
