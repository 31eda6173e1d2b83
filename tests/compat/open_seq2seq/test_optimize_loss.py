"""`optimize_loss`: its arguments, its steps and its errors."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LARC
from keras_lso.compat.open_seq2seq import (
    OPTIMIZER_CLS_NAMES,
    MixedPrecisionOptimizerWrapper,
    optimize_loss,
)

RATE = 0.25


def make(loss=None, optimizer="SGD", params=None, rate=RATE, **arguments):
    loss = loss or (lambda: ops.zeros(()))
    decay_fn = None if rate is None else lambda step: rate
    return optimize_loss(loss, optimizer, params, decay_fn, **arguments)


def variable(values=(1.0, 2.0), **arguments):
    return keras.Variable(np.array(values, "float32"), **arguments)


def linear(w):
    """Returns a loss whose gradient is the batch's mean."""
    return lambda x: ops.mean(ops.sum(w * x, axis=-1))


BATCHES = np.random.default_rng(0).normal(size=(12, 5, 2)).astype("float32")


def test_training_op_takes_step_of_optimizer():
    w = variable()
    train_op = make(linear(w), var_list=[w])
    start = w.numpy()
    loss = train_op(BATCHES[0])
    assert keras.backend.standardize_dtype(loss.dtype) == "float32"
    np.testing.assert_allclose(loss, np.mean(BATCHES[0] @ start), rtol=1e-6)
    np.testing.assert_allclose(
        w.numpy(), start - RATE * BATCHES[0].mean(axis=0), rtol=1e-6
    )
    assert int(train_op.global_step.numpy()) == 1


@pytest.mark.parametrize(
    "optimizer, params",
    [
        (keras.optimizers.SGD, {"momentum": 0.5}),
        (keras.optimizers.SGD(9.0, momentum=0.5), None),
    ],
)
def test_optimizer_may_be_class_or_instance(optimizer, params):
    w = variable([0.0])
    train_op = make(lambda x: ops.sum(w * x), optimizer, params)
    for expected in (-0.25, -0.625):
        train_op(np.float32([1.0]))
        assert float(w.numpy()[0]) == expected


def test_trained_variables_come_from_model_loss_or_var_list():
    model = keras.Sequential([keras.layers.Dense(1), keras.layers.Dense(1)])
    other, frozen = variable([1.0]), variable([1.0], trainable=False)

    def loss(x):
        return ops.mean(model(x)) * other[0] * frozen[0]

    # Layers create their variables when they are first called.
    of_model = make(loss, model=model)
    of_model(BATCHES[0])
    assert [id(v) for v in of_model.variables] == [
        id(v) for v in model.trainable_variables
    ]
    of_loss = make(loss)
    of_loss(BATCHES[0])
    expected = [*model.trainable_variables, other]
    assert {id(v) for v in of_loss.variables} == {id(v) for v in expected}
    before = other.numpy()
    make(loss, var_list=[other])(BATCHES[0])
    assert np.any(other.numpy() != before)


def test_assignments_and_random_numbers_of_loss_advance_once_per_call():
    seed = keras.random.SeedGenerator(3)
    calls = keras.Variable(0.0, trainable=False)
    w = variable([0.0])

    def loss(x):
        calls.assign_add(1.0)
        return ops.sum(w * x * keras.random.uniform((1,), seed=seed))

    train_op = make(loss)
    states, weights = [], []
    for _ in range(3):
        train_op(np.float32([1.0]))
        states.append(tuple(ops.convert_to_numpy(seed.state).tolist()))
        weights.append(float(w.numpy()[0]))
    assert float(calls.numpy()) == 3.0
    assert len(set(states)) == 3
    assert len(set(np.diff([0.0, *weights]))) == 3


@pytest.mark.parametrize("loss_scaling", [1024.0, 3, "backoff", "LogMax"])
def test_mixed_step_matches_float32_step_up_to_rounding(loss_scaling):
    wide, narrow = variable(), variable(dtype="float16")
    make(linear(wide), var_list=[wide])(BATCHES[0])
    train_op = make(
        linear(narrow), var_list=[narrow], dtype="mixed", loss_scaling=loss_scaling
    )
    assert isinstance(train_op.optimizer, MixedPrecisionOptimizerWrapper)
    train_op(ops.cast(BATCHES[0], "float16"))
    # Two roundings of the gradient to float16, and one of the weight.
    np.testing.assert_allclose(
        ops.convert_to_numpy(ops.cast(narrow, "float32")), wide.numpy(), rtol=3e-3
    )


def test_gradients_are_clipped_by_their_global_norm():
    a, b = variable([0.0]), variable([0.0])
    train_op = make(
        lambda: 3.0 * a[0] + 4.0 * b[0], clip_gradients=1.0, var_list=[a, b]
    )
    train_op()
    np.testing.assert_allclose(a.numpy(), [-RATE * 0.6], rtol=1e-6)
    np.testing.assert_allclose(b.numpy(), [-RATE * 0.8], rtol=1e-6)


@pytest.mark.parametrize("mode", ["clip", "scale"])
@pytest.mark.parametrize("dtype", ["float32", "mixed"])
def test_larc_params_rescale_gradients_as_larc_does(mode, dtype):
    w, twin = variable([3.0, 4.0]), variable([3.0, 4.0])
    gradient = np.float32([30.0, 40.0])
    train_op = make(
        lambda: ops.sum(w * gradient),
        var_list=[w],
        dtype=dtype,
        loss_scaling=8.0,
        larc_params={"larc_eta": 0.1, "larc_mode": mode},
    )
    train_op()
    larc = LARC(keras.optimizers.SGD(RATE), eta=0.1, mode=mode)
    larc.apply([ops.convert_to_tensor(gradient)], [twin])
    np.testing.assert_allclose(w.numpy(), twin.numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "mixed"])
def test_accumulator_holds_partial_mean_of_gradients_at_every_step(dtype):
    w = variable()
    train_op = make(
        linear(w), var_list=[w], iter_size=3, dtype=dtype, loss_scaling=64.0
    )
    [accumulator] = train_op.accumulators
    start = w.numpy().astype("float64")
    total = np.zeros(2)
    for i, batch in enumerate(BATCHES[:9], start=1):
        train_op(batch)
        total += batch.mean(axis=0, dtype="float64") / 3
        if i % 3 == 0:
            start -= RATE * total
            total[:] = 0
        np.testing.assert_allclose(accumulator.numpy(), total, atol=2e-7)
        np.testing.assert_allclose(w.numpy(), start, atol=1e-6)
    assert int(train_op.global_step.numpy()) == 3


@pytest.mark.parametrize("source", ["call", "variable", "callable"])
def test_skip_update_is_given_by_call_variable_or_callable(source):
    w = variable([0.0])
    flag = keras.Variable(True, dtype="bool", trainable=False)
    given = {"call": None, "variable": flag, "callable": lambda: bool(flag.numpy())}
    train_op = make(lambda x: ops.sum(w * x), iter_size=2, skip_update_ph=given[source])
    updates = []
    for skip in (True, True, False, True, False):
        flag.assign(skip)
        options = {"skip_update": skip} if source == "call" else {}
        train_op(np.float32([1.0]), **options)
        updates.append(float(w.numpy()[0]))
    # Always divided by `iter_size`, as OpenSeq2Seq does.
    one = -RATE / 2
    assert updates == [0.0, 0.0, 3 * one, 3 * one, 5 * one]


def test_overflow_in_one_batch_skips_whole_update():
    w = variable([0.0])
    train_op = make(
        lambda x: ops.sum(w * x), iter_size=2, dtype="mixed", loss_scaling="Backoff"
    )
    for value, expected in [(1.0, 0.0), (np.nan, 0.0), (1.0, 0.0), (3.0, -2 * RATE)]:
        train_op(np.float32([value]))
        assert float(w.numpy()[0]) == expected
    assert float(train_op.optimizer.loss_scale) == 2.0**13


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"optimizer": "Adamm"}, ValueError, "one of 'Adagrad', .*'Adamm'"),
        ({"optimizer": "Momentum"}, ValueError, "must hold 'momentum'"),
        ({"params": {"learning_rate": 1.0}}, ValueError, "Leave 'learning_rate' out"),
        (
            {"optimizer": keras.optimizers.SGD(0.1), "params": {"momentum": 0.9}},
            ValueError,
            "is an instance has its parameters",
        ),
        (
            {"optimizer": keras.optimizers.SGD(0.1, loss_scale_factor=8.0)},
            ValueError,
            "must not scale the loss",
        ),
        (
            {"optimizer": "Adam", "params": {"beta1": 0.9, "beta_1": 0.9}},
            TypeError,
            "`beta1` is TF1's name for `beta_1`",
        ),
        ({"dtype": "int32"}, ValueError, "'mixed' or a float dtype"),
        ({"summaries": ["loss"]}, ValueError, "summaries.0.` must be one of"),
        ({"larc_params": {"larc_mode": "clip"}}, ValueError, "dict with 'larc_eta'"),
        (
            {"clip_gradients": 1.0, "larc_params": {"larc_eta": 0.1}},
            AttributeError,
            "LARC and gradient norm clipping should not be used together",
        ),
        ({"loss_scaling": "Logmix"}, ValueError, "one of 'backoff', 'logmax'"),
        ({"loss_scaling_params": {}}, ValueError, "loss_scaling_params=.."),
        ({"on_horovod": True}, RuntimeError, "average gradients over processes"),
        ({"loss": 3.0}, TypeError, r"def loss\(x, y\): return loss_fn"),
        ({"rate": None, "optimizer": 3}, TypeError, "`optimizer` must be a name"),
    ],
)
def test_optimize_loss_rejects_invalid_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        make(**arguments)
    with pytest.raises(TypeError, match="must be a function of the step"):
        optimize_loss(ops.zeros, "SGD", None, 0.1)


def test_non_scalar_loss_is_rejected():
    w = variable()
    with pytest.raises(ValueError, match=r"a scalar.*shape \(2,\)"):
        make(lambda: w * 2.0, var_list=[w])()
    with pytest.raises(TypeError, match="end without `return`"):
        make(lambda: None, var_list=[w])()
    with pytest.raises(ValueError, match="nothing to train"):
        make(lambda: ops.zeros(()))()


def test_every_optimizer_name_gives_working_optimizer():
    required = {"Momentum": {"momentum": 0.9}, "AdamW": {"weight_decay": 0.1}}
    # Momentum is that of LARS, without its ratios.
    classes = {"Momentum": "LARS", "RMSProp": "RMSprop"}
    names = "Adagrad Adam AdamW Ftrl LARS Momentum NovoGrad RMSProp SGD"
    assert " ".join(OPTIMIZER_CLS_NAMES) == names
    for name in OPTIMIZER_CLS_NAMES:
        w = variable()
        before = w.numpy()
        params = {**required.get(name, {}), "use_locking": True}
        train_op = make(linear(w), name, params)
        train_op(BATCHES[0])
        bases = [cls.__name__ for cls in type(train_op.optimizer).__mro__]
        assert classes.get(name, name) in bases
        assert np.all(np.isfinite(w.numpy())) and np.all(w.numpy() != before)
