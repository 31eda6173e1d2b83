"""`StepRecord` in `fit`: its files and its `History`, compared with NumPy."""

import csv
import gzip
import itertools
import json
import re
import shutil

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso._core.step_record import COLUMNS, RecordFile
from keras_lso.callbacks import StepRecord
from keras_lso.callbacks import step_record as module
from testing.events import events_in
from testing.full_disk import full_disk
from testing.step_records import assert_alike

BACKEND = keras.backend.backend()
if BACKEND == "jax":
    import jax
SCHEDULE = keras.optimizers.schedules.InverseTimeDecay(0.05, 10, 1.0)
SIZE = 2


def make_data(batches, overflows=()):
    random = np.random.default_rng(0)
    x = random.normal(size=(SIZE * batches, 3)).astype("float32")
    y = x @ np.array([[0.5], [-0.75], [0.25]], "float32") + 1.0
    for batch in overflows:
        x[batch * SIZE] = np.inf
    return x, y


def make_model(optimizer=None, **mode):
    """A linear model, whose gradients are known."""
    start = keras.initializers.Constant(0.5)
    layer = keras.layers.Dense(1, kernel_initializer=start)
    model = keras.Sequential([keras.Input((3,)), layer])
    if optimizer is None:
        inner = keras.optimizers.SGD(SCHEDULE)
        optimizer = keras_lso.LossScaleOptimizer(
            inner, initial_scale=64.0, dynamic_growth_steps=40
        )
    model.compile(optimizer, loss="mse", **mode)
    # `fit` makes its variables otherwise, and TensorFlow traces twice.
    optimizer.build(model.trainable_variables)
    return model


def fit(model, data, *callbacks, **options):
    options = {"batch_size": SIZE, "shuffle": False, "verbose": 0} | options
    return model.fit(*data, callbacks=list(callbacks), **options).history


def trained_by_numpy(data, epochs=1):
    """Returns the rows of a training by gradient descent, in float64."""
    weights, scale, good, taken, rows = np.array([0.5] * 3 + [0.0]), 64.0, 0, 0, []
    x, y = (a.astype("float64") for a in data)
    x = np.concatenate([x, np.ones_like(x[:, :1])], axis=1)
    for at in list(range(0, len(x), SIZE)) * epochs:
        of_batch = x[at : at + SIZE]
        with np.errstate(invalid="ignore"):
            error = of_batch @ weights - y[at : at + SIZE, 0]
            gradient = 2 * of_batch.T @ error / SIZE
        norm, rate = np.sqrt((gradient**2).sum()), 0.05 / (1 + taken / 10)
        is_finite = np.isfinite(norm)
        outcome = "applied" if is_finite else "overflow"
        rows.append((len(rows) + 1, outcome, scale, norm, rate, np.nan))
        if is_finite:
            weights, taken, good = weights - rate * gradient, taken + 1, good + 1
            if good == 40:
                scale, good = scale * 2, 0
        else:
            scale, good = scale / 2, 0
    columns = map(np.array, zip(*rows, strict=True))
    return dict(zip(COLUMNS, columns, strict=True))


def joined(records):
    """Returns the epochs of a `History` as one, in arrays."""
    return {
        name: np.concatenate([np.array(r[name], kind) for r in records])
        for name, kind in COLUMNS.items()
    }


def test_step_record_holds_each_step_of_long_epoch_once(tmp_path, monkeypatch):
    """More steps than the ring holds, in two epochs: each is there once."""
    reads, cls = [], keras_lso.LossScaleOptimizer
    read = cls.read_record
    monkeypatch.setattr(cls, "read_record", lambda o: reads.append(1) or read(o))
    data, path = make_data(530, overflows=[5, 300, 511, 512]), tmp_path / "new/a.jsonl"
    logger = keras.callbacks.CSVLogger(tmp_path / "epochs.csv")
    model, recorder = make_model(), StepRecord(path)
    history = fit(model, data, recorder, logger, epochs=2)
    records = history["step_record"]
    assert [len(r["step"]) for r in records] == [530, 530]
    # As a user writes the history to a file.
    written = json.loads(json.dumps(history))["step_record"]
    assert [r["outcome"] for r in written] == [r["outcome"] for r in records]
    # Before training, in each epoch and at its end, and at the end of all.
    assert len(reads) == 1 + 2 * 2 + 1
    found = joined(records)
    # Each step rounds weights of about 1 to 24 bits, and inherits what others rounded.
    assert_alike(found, trained_by_numpy(data, epochs=2), rtol=1e-4, atol=1e-5)
    assert (found["outcome"] == "overflow").sum() == 8
    assert_alike(RecordFile(path).read(), found, rtol=0)
    norms = [np.float32(r["gradient_norm"]) for r in records]
    finite = [of_epoch[np.isfinite(of_epoch)] for of_epoch in norms]
    assert history["gradient_norm_median"] == [np.median(n) for n in finite]
    assert history["gradient_norm_max"] == [n.max() for n in finite]
    with open(tmp_path / "epochs.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(r["gradient_norm_max"]) for r in rows] == history["gradient_norm_max"]
    model.history = None  # A loop without `fit` has neither a history nor logs.
    recorder.on_epoch_end(2)


@pytest.mark.parametrize(
    "mode", [{"jit_compile": True, "steps_per_execution": 4}, {"run_eagerly": True}]
)
@pytest.mark.skipif(BACKEND == "torch", reason="PyTorch's steps are eager")
def test_step_record_is_complete_in_each_mode(mode, monkeypatch):
    monkeypatch.setattr(module, "_LENGTH", 8)
    data = make_data(14, overflows=[2])
    history = fit(make_model(**mode), data, StepRecord(), epochs=2)
    expected = trained_by_numpy(data, epochs=2)
    assert_alike(joined(history["step_record"]), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["steps.jsonl", "steps.json", "logs"])
def test_record_files_hold_numbers_of_history(name, tmp_path):
    policy = keras_lso.loss_scales.LogMaxLossScale()
    inner = keras.optimizers.SGD(SCHEDULE)
    model = make_model(keras_lso.LossScaleOptimizer(inner, loss_scale=policy))
    kind = "log_dir" if name == "logs" else "path"
    data = make_data(5, overflows=[1])
    callback = StepRecord(**{kind: tmp_path / name})
    # The second `fit` appends.
    history = joined(
        [r for _ in "ab" for r in fit(model, data, callback)["step_record"]]
    )
    assert history["step"].tolist() == list(range(1, 11))
    assert (
        history["outcome"].tolist() == (["applied", "overflow"] + ["applied"] * 3) * 2
    )
    is_known = np.isfinite(history["largest_gradient"])
    assert is_known.tolist() == (history["outcome"] == "applied").tolist()
    if kind == "path":
        assert_alike(RecordFile(tmp_path / name).read(), history, rtol=0)
        return
    events = events_in(tmp_path / name)
    skipped = (history["outcome"] != "applied").astype(float)
    assert events.pop("skipped") == list(zip(history["step"], skipped, strict=True))
    assert set(events) == {*COLUMNS} - {"step", "outcome"}
    for tag, found in events.items():
        shown = np.isfinite(history[tag])
        # An event file holds float32.
        columns = history["step"][shown], history[tag][shown].astype("float32")
        assert found == list(zip(*columns, strict=True))


def test_record_with_every_writes_each_nth_and_each_skipped_step(tmp_path):
    data = make_data(10, overflows=[1, 3])
    callback = StepRecord(tmp_path / "a.jsonl", tmp_path / "logs", every=4)
    history = fit(make_model(), data, callback)
    assert RecordFile(tmp_path / "a.jsonl").read()["step"].tolist() == [2, 4, 8]
    assert [s for s, _ in events_in(tmp_path / "logs")["loss_scale"]] == [2, 4, 8]
    # What is in memory is whole.
    assert len(history["step_record"][0]["step"]) == 10


@pytest.mark.parametrize("writes", ["flush", "fit", "fit after flush"])
def test_steps_before_error_in_fit_are_written(writes, tmp_path):
    path = tmp_path / "a.jsonl"
    record = StepRecord(path, tmp_path / "logs")
    stall = keras_lso.callbacks.LossScaleMonitor(patience=3, on_stall="raise")
    model = make_model(keras_lso.GuardedOptimizer(keras.optimizers.SGD(SCHEDULE)))
    with pytest.raises(FloatingPointError, match="Training has stalled"):
        fit(model, make_data(14, overflows=range(4, 14)), record, stall)
    assert not path.read_text()
    if "flush" in writes:
        record.flush()
        record.flush()
    steps = int(model.optimizer.iterations) + int(model.optimizer.skipped_steps)
    expected = list(range(1, steps + 1))
    if "fit" in writes:
        [epoch] = fit(model, make_data(2), record)["step_record"]
        assert epoch["step"] == [steps + 1, steps + 2]
        expected += epoch["step"]
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in found] == expected
    outcomes = [row["outcome"] for row in found[:steps]]
    assert outcomes == ["applied"] * 4 + ["overflow"] * (steps - 4)
    assert [step for step, _ in events_in(tmp_path / "logs")["skipped"]] == expected
    if "fit" in writes:
        # After a `fit` without an error there is nothing left to write.
        fit(model, make_data(1))
        record.flush()
        assert len(path.read_text().splitlines()) == len(found)


@pytest.mark.parametrize("by", ["flush", "fit"])
def test_steps_refused_by_full_disk_are_written_later_in_order(by, tmp_path):
    path, logs, model = tmp_path / "a.jsonl", tmp_path / "logs", make_model()
    record = StepRecord(path, logs)
    fit(model, make_data(4), record)
    # Room for one more line, and a half.
    size = path.stat().st_size * 11 // 8
    with full_disk(size), pytest.warns(UserWarning, match="written: .*large") as caught:
        history = fit(model, make_data(4), record)
        assert history["step_record"][0]["step"] == [5, 6, 7, 8]
        assert RecordFile(path).read()["step"].tolist() == [1, 2, 3, 4, 5]
        assert path.read_bytes().endswith(b"\n")
        fit(model, make_data(3), record, epochs=2)
        record.flush()
    texts = [str(w.message) for w in caught if "could not be written" in str(w.message)]
    # Of each `fit`, not of each attempt, and of `flush`.
    counts = [
        re.search(r"/(a.jsonl|logs)' could .*: (\d+) steps wait", text)
        for text in texts
    ]
    waiting = [("a.jsonl", "3"), ("logs", "4"), ("a.jsonl", "9"), ("logs", "10")]
    assert [found.groups() for found in counts] == waiting + waiting[2:]
    if by == "fit":
        fit(model, make_data(2), record)
    else:
        record.flush()
    expected = list(range(1, 17 if by == "fit" else 15))
    found = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert found == expected
    assert [step for step, _ in events_in(logs)["skipped"]] == expected


def test_removed_folders_of_record_are_made_again(tmp_path):
    folder, model = tmp_path / "runs", make_model()
    removing = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: shutil.rmtree(folder)
    )
    record = StepRecord(folder / "a.jsonl", folder / "logs")
    fit(model, make_data(2), record, removing, epochs=2)
    assert RecordFile(folder / "a.jsonl").read()["step"].tolist() == [3, 4]
    assert [step for step, _ in events_in(folder / "logs")["skipped"]] == [3, 4]


@pytest.mark.skipif(BACKEND != "jax", reason="JAX donates what a step changes")
def test_error_that_deletes_variables_is_raised_and_lost_steps_are_reported(tmp_path):
    calls = itertools.count()

    def fail(x):
        if next(calls) == 4:
            raise ValueError("the disk of the data is gone")
        return x

    class Failing(keras.layers.Layer):
        def call(self, x):
            return x + jax.pure_callback(fail, x, jax.lax.stop_gradient(x))

    record = StepRecord(tmp_path / "a.jsonl")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), Failing()])
    model.compile(keras_lso.GuardedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    with pytest.raises(ValueError, match="the disk of the data is gone"):
        fit(model, make_data(9), record)
    with pytest.warns(UserWarning, match="Up to . steps are missing from the record"):
        record.flush()
    record.flush()
    assert fit(make_model(), make_data(2), record)["step_record"][0]["step"] == [1, 2]


@pytest.mark.parametrize("size", [-7, 60, 3])
def test_unfinished_line_of_record_is_removed(size, tmp_path):
    """As of a process that was killed while it wrote, its first line perhaps."""
    path, model = tmp_path / "a.jsonl", make_model()
    fit(model, make_data(3), StepRecord(path))
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    left = [1, 2] if size < 0 else []
    # As it is, it can be read.
    assert RecordFile(path).read()["step"].tolist() == left
    fit(model, make_data(2), StepRecord(path))
    assert RecordFile(path).read()["step"].tolist() == [*left, 4, 5]
    assert path.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, size) + 1])


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", b'{"epoch": 0}\n'),
        ("a.jsonl", b'{"step": 1, "loss": 0.5}'),
        ("a.jsonl", b"no JSON\n"),
        ("a.jsonl", b'{"step": ' + b"1" * 5000),
        ("a.json", b"[1, 2]\n"),
        ("a.json", b"3\n"),
        ("a.json", "Größe\n".encode("latin-1")),
        ("a.json", gzip.compress(b'{"step": 1}', mtime=0)),
    ],
)
def test_foreign_record_file_is_rejected_before_training(name, content, tmp_path):
    path, model = tmp_path / name, make_model()
    path.write_bytes(content)
    message = (
        rf"The file is not a record of steps, .*{re.escape(name)}', with .* line 1"
    )
    with pytest.raises(ValueError, match=message):
        fit(model, make_data(2), StepRecord(path))
    assert path.read_bytes() == content
    assert int(model.optimizer.iterations) == 0
    with pytest.raises(ValueError, match=message):
        RecordFile(path).read()


@pytest.mark.parametrize("line", [b"\0\0\n", b"\xff\n", b'{"step": 3}\n'])
def test_spoiled_line_of_record_is_named(line, tmp_path):
    path = tmp_path / "a.jsonl"
    fit(make_model(), make_data(2), StepRecord(path))
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(ValueError, match=r"not a record.*a\.jsonl', with .* in line 3"):
        RecordFile(path).read()


def test_record_keeps_last_entry_of_repeated_step(tmp_path):
    path, model = tmp_path / "a.jsonl", make_model()
    fit(model, make_data(4), StepRecord(path))
    model.save(tmp_path / "model.keras")
    fit(model, make_data(4), StepRecord(path))
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    # The data of the second time are others.
    history = fit(loaded, make_data(2, overflows=[1]), StepRecord(path))
    again = history["step_record"][0]
    assert again["step"] == [5, 6]
    assert len(path.read_text().splitlines()) == 10
    found = RecordFile(path).read()
    assert found["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert found["outcome"].tolist() == ["applied"] * 5 + ["overflow"]
    assert found["gradient_norm"][4] == again["gradient_norm"][0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"path": "steps.txt"}, r"`path` must end with '.jsonl'"),
        ({"path": "steps.csv"}, r"`path` must end with '.jsonl'"),
        ({"every": 0}, "`every` must"),
        ({"every": 1.5}, "`every` must"),
    ],
)
def test_step_record_rejects_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        StepRecord(**arguments)


def test_step_record_rejects_other_optimizers(tmp_path):
    path = tmp_path / "a.jsonl"
    model = make_model(keras.optimizers.SGD(0.01))
    with pytest.raises(ValueError, match="StepRecord needs a model that was compiled"):
        fit(model, make_data(2), StepRecord(path))
    own = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    with pytest.raises(ValueError, match="This model has Keras's own, which"):
        fit(make_model(own), make_data(2), StepRecord(path))
    assert not path.exists()


def test_second_record_in_fit_is_an_error_and_another_fit_takes_it(tmp_path):
    model, data = make_model(), make_data(2)
    first, second = StepRecord(tmp_path / "a.jsonl"), StepRecord(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match="pass one `StepRecord` to `fit`"):
        model.fit(*data, callbacks=[first, second], verbose=0)
    fit(model, data, first)
    fit(model, data, second)
    assert first.path.read_text() and second.path.read_text()


class Twice(keras.Sequential):
    """A model that makes two optimizer steps for each batch, on PyTorch."""

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            self.zero_grad()
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            self.optimizer.scale_loss(loss).backward()
            weights = self.trainable_weights
            self.optimizer.apply([w.value.grad for w in weights], weights)
        return {"loss": loss}


@pytest.mark.skipif(BACKEND != "torch", reason="The train step is PyTorch's")
@pytest.mark.parametrize(
    "batches, length, missing",
    # The callback counts batches, and reads before the fifth and the ninth.
    [(2, 4, 0), (4, 4, 4), (9, 4, 8), (9, 8, 0)],
)
def test_lost_steps_warn_once(batches, length, missing, monkeypatch, recwarn):
    monkeypatch.setattr(module, "_LENGTH", 4)
    model = Twice([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, loss="mse")
    if length > 4:
        optimizer.record_steps(length)
    record = joined(fit(model, make_data(batches), StepRecord())["step_record"])
    assert len(record["step"]) == 2 * batches - missing
    messages = [str(w.message) for w in recwarn if "from the record" in str(w.message)]
    assert len(messages) == (missing > 0)
    if missing:
        assert "4 steps before step 5 are missing from the record" in messages[0]
        assert "with a length of 4 times" in messages[0]


@pytest.mark.parametrize("steps, wanted", [(3, 512), (300, 600)])
@pytest.mark.skipif(BACKEND == "torch", reason="PyTorch executes one step at a time")
def test_step_record_rejects_record_shorter_than_execution(steps, wanted, tmp_path):
    model = make_model(steps_per_execution=steps)
    model.optimizer.record_steps(2)
    with pytest.raises(ValueError, match=rf"record_steps\({wanted}\).*length=2"):
        fit(model, make_data(2), StepRecord(tmp_path / "a.jsonl"))
    assert int(model.optimizer.iterations) == 0
    assert not (tmp_path / "a.jsonl").exists()
