"""`copy.deepcopy` and `pickle` of every object of the public API.

keras-tuner, scikit-learn's `clone` and joblib copy what they are given. Keras itself
copies an optimizer by its config, without its state unless that has no slots.
"""

import copy
import pickle
import sys

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import callbacks, loss_scales
from keras_lso.compat import open_seq2seq
from keras_lso.compat.v1.mixed_precision import MixedPrecisionLossScaleOptimizer
from keras_lso.loss_scales.searching import SearchingLossScale
from keras_lso.mixed_precision import experimental
from testing.events import events_in

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = X[:, :1]

pytestmark = [
    # Keras warns that a copy lacks the slots, and NumPy of the reports' casts.
    pytest.mark.filterwarnings("ignore:Skipping variable loading"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
    pytest.mark.filterwarnings(
        "ignore:.*experimental.LossScaleOptimizer is deprecated"
    ),
]
both_ways = pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],
    ids=["deepcopy", "pickle"],
)


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def scaling(**arguments):
    return keras_lso.LossScaleOptimizer(sgd(), **arguments)


def new_model(optimizer=None):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    options = {"run_eagerly": BACKEND != "jax", "loss": "mean_squared_error"}
    model.compile(optimizer or scaling(), **options)
    return model


def fit(*given, **options):
    return new_model(*given).fit(X, Y, batch_size=4, verbose=0, **options)


OPTIMIZERS = {
    "LossScaleOptimizer": scaling,
    "narrow slots": lambda: scaling(slot_dtype="bfloat16"),
    "slots in 8 bits": lambda: scaling(slot_dtype="int8"),
    "with the scale searched": lambda: scaling(initial_scale="auto"),
    "LARC": lambda: keras_lso.LARC(sgd()),
    "LossScaleOptimizer of LARC": lambda: keras_lso.LossScaleOptimizer(
        keras_lso.LARC(sgd())
    ),
    "LARS": lambda: keras_lso.LARS(0.1, exclude_from_weight_decay=["bias"]),
    "LAMB": lambda: keras_lso.LAMB(0.1),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.1),
    "with a schedule": lambda: keras_lso.LARS(open_seq2seq.FixedLR(0.1)),
    "experimental": lambda: experimental.LossScaleOptimizer(sgd(), "dynamic"),
    "TF1": lambda: MixedPrecisionLossScaleOptimizer(sgd(), 8.0),
    "OpenSeq2Seq": lambda: open_seq2seq.MixedPrecisionOptimizerWrapper(sgd(), 8.0),
}


@both_ways
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copied_optimizer_has_same_config_and_no_state(name, duplicate):
    shape = (64, 64) if name == "slots in 8 bits" else (2,)
    optimizer = OPTIMIZERS[name]()
    weight = keras.Variable(np.ones(shape), dtype="float32", name="bias")
    for when in ("new", "built", "in the middle of training"):
        if when == "built":
            optimizer.build([weight])
        elif when == "in the middle of training":
            optimizer.apply([ops.ones(shape)], [weight])
        before = np.array(weight.numpy())
        copied = duplicate(optimizer)
        assert copied.get_config() == optimizer.get_config()
        assert not copied.built
        # It shares nothing with the original.
        other = keras.Variable(np.ones(shape), dtype="float32")
        copied.apply([ops.ones(shape)], [other])
        assert not np.any(other.numpy() == 1.0)
        np.testing.assert_array_equal(weight.numpy(), before)


POLICIES = {
    "dynamic": lambda: loss_scales.DynamicLossScale(64.0, 3, hysteresis=2),
    "searching": lambda: SearchingLossScale(64.0),
    "fixed": lambda: loss_scales.FixedLossScale(64.0),
    "log max": loss_scales.LogMaxLossScale,
}


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],
    ids=["copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("name", POLICIES)
def test_copied_policy_keeps_state_and_serves_other_optimizer(name, duplicate):
    policy = POLICIES[name]()
    keras_lso.LossScaleOptimizer(sgd(), loss_scale=policy)
    policy.build()
    policy.step(ops.convert_to_tensor(False), amax=ops.ones(()))
    before = [np.array(v.numpy()) for v in policy.variables]
    copied = duplicate(policy)
    assert [np.array(v.numpy()) for v in copied.variables] == before
    optimizer = keras_lso.LossScaleOptimizer(sgd(), loss_scale=copied)
    optimizer.apply([ops.full((1,), np.nan)], [keras.Variable([1.0])])
    assert int(optimizer.skipped_steps) == 1
    assert [np.array(v.numpy()) for v in policy.variables] == before


def steps_in(folder):
    return [step for step, _ in events_in(folder)["loss_scale"]]


@both_ways
def test_copied_monitor_writes_separate_event_file(duplicate, tmp_path):
    monitor = callbacks.LossScaleMonitor(log_dir=tmp_path / "a", patience=3)
    fit(callbacks=[monitor])
    copied = duplicate(monitor)
    assert (copied.log_dir, copied.patience) == (tmp_path / "a", 3)
    copied.log_dir = tmp_path / "b"
    fit(callbacks=[copied], epochs=2)
    assert steps_in(tmp_path / "b") == [2, 3, 4]
    assert steps_in(tmp_path / "a") == [2]


class Copying(keras.callbacks.Callback):
    """Copies another callback while it writes."""

    def __init__(self, other, duplicate):
        super().__init__()
        self.other, self.duplicate = other, duplicate

    def on_epoch_end(self, epoch, logs=None):
        self.copied = self.duplicate(self.other)


@both_ways
@pytest.mark.parametrize("when", ["new", "after a fit", "in the middle of training"])
def test_copied_step_record_works_independently(when, duplicate, tmp_path):
    record = callbacks.StepRecord(tmp_path / "a.jsonl", tmp_path / "a", every=2)
    copying = Copying(record, duplicate)
    copying.on_epoch_end(0)
    if when != "new":
        others = [copying] if when == "in the middle of training" else []
        fit(callbacks=[record, *others], epochs=2)
    if when == "after a fit":
        copying.on_epoch_end(0)
    copied = copying.copied
    assert (copied.path, copied.log_dir) == (tmp_path / "a.jsonl", tmp_path / "a")
    assert copied.every == 2
    copied.log_dir = tmp_path / "b"
    history = fit(callbacks=[copied], epochs=2).history
    assert [r["step"] for r in history["step_record"]] == [[1, 2], [3, 4]]
    # The lines of both, and an event file each.
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert len(lines) == 2 * (1 if when == "new" else 2)
    assert steps_in(tmp_path / "b") == [2, 4]
    assert (tmp_path / "a").exists() is (when != "new")


SWAPS = {
    callbacks.SwapEMAWeights: lambda: keras_lso.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, use_ema=True)
    )
}
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
    SWAPS[callbacks.SwapScheduleFreeWeights] = lambda: keras_lso.LossScaleOptimizer(
        keras.optimizers.ScheduleFreeAdamW(0.1)
    )


def test_callback_constructor_raises_without_tensorboard(tmp_path, monkeypatch):
    module = "tensorboard.summary.writer.record_writer"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        callbacks.LossScaleMonitor(log_dir=tmp_path)
    callbacks.LossScaleMonitor()
    with pytest.raises(ImportError, match="pip install tensorboard"):
        callbacks.StepRecord(log_dir=tmp_path)
    callbacks.StepRecord(tmp_path / "a.jsonl")


@both_ways
@pytest.mark.parametrize("cls", SWAPS)
def test_copied_swap_callback_works_in_fit(cls, duplicate):
    callback = cls(swap_on_epoch=True)
    fit(SWAPS[cls](), callbacks=[callback])
    copied = duplicate(callback)
    assert copied.swap_on_epoch
    fit(SWAPS[cls](), callbacks=[copied], validation_data=(X, Y))


@both_ways
def test_copied_report_prints_same_text(duplicate):
    model = new_model()
    for report in (
        keras_lso.underflow_report(model, X, Y),
        keras_lso.float16_report(model, X, Y),
    ):
        assert str(duplicate(report)) == str(report)


@both_ways
@pytest.mark.parametrize("algorithm", ["Backoff", "LogMax"])
def test_copied_scaler_has_same_scale_and_separate_policy(algorithm, duplicate):
    scaler = open_seq2seq.AutomaticLossScaler(algorithm)
    copied = duplicate(scaler)
    assert float(copied.loss_scale) == float(scaler.loss_scale)
    assert copied.policy is not scaler.policy
    open_seq2seq.MixedPrecisionOptimizerWrapper(sgd(), copied)
