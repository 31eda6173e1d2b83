"""The rows that `record_steps` stores for each step and `read_record` returns."""

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.harness import SHAPES, Harness
from testing.keras_versions import multi_optimizer
from testing.step_records import COLUMNS, assert_alike
from testing.trained_optimizers import saved

# The schedule counts micro-batches on purpose; a copy lacks the record's variables.
pytestmark = [
    pytest.mark.filterwarnings("ignore:With `gradient_accumulation_steps="),
    pytest.mark.filterwarnings("ignore:Skipping variable loading"),
]

K = keras.optimizers
# Fused steps, and those that the inner optimizer takes itself.
MAKES = {"adam": K.Adam, "lars": keras_lso.LARS, "adadelta": K.Adadelta}
SCHEDULE = K.schedules.ExponentialDecay(0.01, 3, 0.5)
# Additions and a root in float32, of 20,000 numbers.
ROUNDING = {"rtol": 4e-6, "atol": 0}


class Model:
    """The rows of steps with a dynamic loss scale, in NumPy's float64."""

    def __init__(self, accumulation_steps=1, scale=8.0, growth=2):
        self.accumulation_steps = accumulation_steps
        self.scale, self.growth = scale, growth
        self.taken = self.good = 0
        self.rows = []

    def step(self, grads):
        squares = [(g.astype("float64") ** 2).sum() for g in grads]
        norm, scale = np.sqrt(sum(squares)), self.scale
        rate = float(ops.convert_to_numpy(SCHEDULE(self.taken)))
        if np.isfinite(norm):
            self.taken += 1
            self.good = (self.good + 1) % self.growth
            self.scale *= 1.0 if self.good else 2.0
            outcome = (
                "accumulated" if self.taken % self.accumulation_steps else "applied"
            )
        else:
            self.scale, self.good, outcome = scale / 2, 0, "overflow"
        self.rows.append((len(self.rows) + 1, outcome, scale, norm, rate, np.nan))

    def record(self):
        return dict(zip(COLUMNS, map(np.array, zip(*self.rows, strict=True))))  # noqa: B905


def gradients(count, overflows=(2, 5)):
    """Returns a list of arrays for each step; some steps overflow."""
    random = np.random.default_rng(3)
    drawn = [[random.normal(size=s).astype("float32") for s in SHAPES] for _ in SHAPES]
    # Three random ones, since they are large, in another size for each step.
    steps = [[g * np.float32(i + 1) for g in drawn[i % 3]] for i in range(count)]
    for at in overflows:
        steps[at][1] = np.full_like(steps[at][1], np.inf)
    return steps


def make(inner=None, record=512, shapes=SHAPES, compiled=None, **arguments):
    arguments = {"initial_scale": 8.0, "dynamic_growth_steps": 2} | arguments
    if "loss_scale" in arguments:
        del arguments["initial_scale"], arguments["dynamic_growth_steps"]
    inner = K.Adam(SCHEDULE) if inner is None else inner
    optimizer = keras_lso.LossScaleOptimizer(inner, **arguments)
    if record:
        optimizer.record_steps(record)
    return Harness(optimizer, shapes, compiled=compiled)


def make_small(*inner, **arguments):
    return make(*inner, shapes=[(2,)], **arguments)


def small_steps(run, values):
    """Takes a step for each value, which is the norm of its gradient."""
    for value in values:
        run.step([np.array([value, 0.0], "float32")])


def record_of(run):
    return run.optimizer.read_record()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"global_clipnorm": 0.5},
        {"clipnorm": 0.5},
        {"use_ema": True},
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 3},
        {"gradient_accumulation_steps": 4, "global_clipnorm": 0.5},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("inner", MAKES.values(), ids=MAKES)
def test_recorded_rows_match_numpy_model(inner, options, way):
    run = make(inner(SCHEDULE, **options))
    model = Model(options.get("gradient_accumulation_steps", 1))
    for grads in gradients(9):
        run.step(grads)
        model.step(grads)
    assert_alike(record_of(run), model.record(), **ROUNDING)


@pytest.mark.parametrize("name", ["adam", "adadelta"])
@pytest.mark.exhaustive
def test_recorded_rows_of_compiled_steps_match_numpy_model(name, compiled):
    run = make(MAKES[name](SCHEDULE), shapes=SHAPES[:2], compiled=compiled)
    model = Model()
    for grads in gradients(6, overflows=[3]):
        run.step(grads[:2])
        model.step(grads[:2])
    assert_alike(record_of(run), model.record(), **ROUNDING)


def test_stateless_apply_returns_recorded_rows():
    run, twin = make(), make()
    run.assert_stateless_steps_equal_those_of(twin, gradients(4, overflows=[2]))
    assert len(record_of(run)["step"]) == 0
    assert len(record_of(twin)["step"]) == 4


@pytest.mark.parametrize("name", ["adam", "adadelta"])
def test_recorded_norm_is_unscaled_for_scaled_and_unscaled_gradients(name):
    run = make(MAKES[name](SCHEDULE))
    [grads] = gradients(1, overflows=())
    run.apply([*map(ops.convert_to_tensor, grads)], scaled=False)
    run.step(grads)
    expected = np.sqrt(sum((g.astype("float64") ** 2).sum() for g in grads))
    norms = record_of(run)["gradient_norm"]
    np.testing.assert_allclose(norms, [expected] * 2, **ROUNDING)


def test_recorded_norm_of_float16_gradients_does_not_overflow():
    run = make_small()
    run.apply([ops.full((2,), 6e4, "float16")])
    [norm] = record_of(run)["gradient_norm"]
    # 6e4 is a float16, and the loss scale 8.
    np.testing.assert_allclose(norm, 6e4 / 8 * np.sqrt(2), rtol=1e-6)


def test_variable_without_gradient_adds_nothing_to_recorded_norm():
    run = make(shapes=[(2,), (2,)])
    with pytest.warns(UserWarning, match="do not exist"):
        run.step([np.array([3.0, 4.0], "float32"), None])
    assert record_of(run)["gradient_norm"].tolist() == [5.0]


def test_recorded_norm_adds_up_duplicate_rows_of_sparse_gradient(sparse_gradient):
    run = make(shapes=[(4, 2)])
    run.apply([sparse_gradient(np.full((2, 2), 8.0, "float32"), [1, 1], (4, 2))])
    [norm] = record_of(run)["gradient_norm"]
    np.testing.assert_allclose(norm, np.sqrt(2 * 2.0**2), rtol=1e-6)


@pytest.mark.parametrize("inner", [K.Adam, K.Adadelta])
def test_largest_gradient_is_recorded_for_log_max_policy(inner):
    policy = keras_lso.loss_scales.LogMaxLossScale()
    run, scales = make(inner(SCHEDULE), loss_scale=policy), []
    steps = gradients(3, overflows=())
    for grads in steps:
        scales.append(run.scale)
        run.step(grads)
    record = record_of(run)
    largest = [max(np.abs(g).max() for g in grads) for grads in steps]
    # The loss scale is no power of two.
    np.testing.assert_allclose(record["largest_gradient"], largest, rtol=1e-6)
    assert record["loss_scale"].tolist() == scales


def test_fixed_scale_and_absent_scale_are_recorded():
    for optimizer, scale in (
        (keras_lso.LossScaleOptimizer(K.SGD(0.5), False, 16.0), 16.0),
        (keras_lso.GuardedOptimizer(K.SGD(0.5)), 1.0),
    ):
        optimizer.record_steps()
        small_steps(Harness(optimizer, [(2,)]), [3.0, np.inf])
        record = optimizer.read_record()
        assert record["outcome"].tolist() == ["applied", "overflow"]
        assert record["loss_scale"].tolist() == [scale] * 2
        assert record["learning_rate"].tolist() == [0.5] * 2
        assert record["gradient_norm"][0] == 3.0


@pytest.mark.parametrize("inner", [K.Adam, K.Adadelta])
@pytest.mark.exhaustive
def test_record_distinguishes_spike_overflow_and_non_finite_rate(inner, way):
    guard = keras_lso.SpikeGuard(window=8, warmup=4, max_norm=10.0)
    run = make_small(inner(0.5), spike_guard=guard)
    small_steps(run, [1.0, 50.0, np.inf, 2.0])
    run.optimizer.learning_rate = np.nan
    with pytest.warns(UserWarning, match="The learning rate is nan"):
        small_steps(run, [1.0, np.nan])
        run.optimizer.finalize_variable_values(run.weights)
    run.optimizer.learning_rate = 0.25
    small_steps(run, [1.0])
    record = record_of(run)
    outcomes = "applied spike overflow applied rate overflow applied"
    assert record["outcome"].tolist() == outcomes.split()
    assert record["gradient_norm"][[0, 1, 3, 4, 6]].tolist() == [1, 50, 2, 1, 1]
    rates = [0.5] * 4 + [np.nan] * 2 + [0.25]
    np.testing.assert_array_equal(record["learning_rate"], np.float32(rates))


@pytest.mark.filterwarnings("ignore:`momentum` of SGD is nan")
def test_non_finite_momentum_is_recorded_with_outcome_rate():
    inner = K.SGD(0.5, momentum=0.9)
    run = make_small(inner)
    inner.momentum = np.nan
    small_steps(run, [2.0])
    record = record_of(run)
    assert record["outcome"].tolist() == ["rate"]
    assert record["gradient_norm"].tolist() == [2.0]
    assert record["learning_rate"].tolist() == [0.5]


@pytest.mark.parametrize("inner", [K.Adam, K.Adadelta])
def test_accumulation_with_spike_is_recorded_as_spike_at_last_micro_batch(inner):
    guard = keras_lso.SpikeGuard(window=8, warmup=4, max_norm=4.0)
    made = inner(0.5, gradient_accumulation_steps=3)
    run = make_small(made, spike_guard=guard)
    small_steps(run, [1.0, 2.0, 3.0, 1.0, 20.0, 1.0, 1.0, 1.0, 1.0])
    record = record_of(run)
    assert record["outcome"].tolist() == (
        ["accumulated", "accumulated", "applied"]
        + ["accumulated", "accumulated", "spike"]
        + ["accumulated", "accumulated", "applied"]
    )
    assert record["step"].tolist() == list(range(1, 10))
    # Of each micro-batch, not of their mean.
    assert record["gradient_norm"].tolist() == [1, 2, 3, 1, 20, 1, 1, 1, 1]


def test_members_of_multi_optimizer_are_recorded_once_they_are_known():
    """A function chooses them in `build`, after the record has started."""
    member = K.Adam(SCHEDULE, gradient_accumulation_steps=2)
    run = make_small(multi_optimizer(lambda variable: member))
    small_steps(run, [1.0, 2.0])
    record = record_of(run)
    assert record["outcome"].tolist() == ["accumulated", "applied"]
    np.testing.assert_allclose(record["learning_rate"][0], 0.01)


def test_read_record_returns_each_step_once():
    run = make_small()
    assert len(record_of(run)["step"]) == 0
    small_steps(run, [1.0, 2.0])
    assert record_of(run)["gradient_norm"].tolist() == [1, 2]
    empty = record_of(run)
    assert {name: len(column) for name, column in empty.items()} == dict.fromkeys(
        COLUMNS, 0
    )
    small_steps(run, [3.0])
    record = record_of(run)
    assert record["gradient_norm"].tolist() == [3]
    assert record["step"].tolist() == [3]


def test_record_holds_last_steps_up_to_length():
    run = make_small(record=4)
    small_steps(run, [1.0, 2.0, 3.0])
    assert record_of(run)["step"].tolist() == [1, 2, 3]
    # Across the end of the ring: as many as it holds, then more.
    small_steps(run, [4.0, 5.0, 6.0, 7.0])
    record = record_of(run)
    assert record["gradient_norm"].tolist() == record["step"].tolist() == [4, 5, 6, 7]
    small_steps(run, [8.0, 9.0, 10.0, 11.0, 12.0, 13.0])
    record = record_of(run)
    assert record["gradient_norm"].tolist() == record["step"].tolist()
    assert record["step"].tolist() == [10, 11, 12, 13]
    assert run.optimizer._counters.record.missed == 2
    record_of(run)
    assert run.optimizer._counters.record.missed == 0


def test_step_numbers_include_steps_before_recording():
    run = make_small(record=0)
    small_steps(run, [1.0, np.inf])
    run.optimizer.record_steps()
    small_steps(run, [1.0, np.inf])
    assert record_of(run)["step"].tolist() == [3, 4]


def test_step_numbers_continue_from_loaded_state():
    run = make_small(record=4)
    small_steps(run, [1.0, np.inf, 2.0])
    store = saved(run.optimizer)
    small_steps(run, [1.0] * 7)
    run.optimizer.load_own_variables(store)
    # Rows that were not read yet are not lost.
    small_steps(run, [5.0, 6.0])
    record = record_of(run)
    assert record["step"].tolist() == [7, 8, 9, 10, 4, 5]
    assert record["gradient_norm"].tolist() == [1, 1, 1, 1, 5, 6]
    run.optimizer.load_own_variables(store)
    assert len(record_of(run)["step"]) == 0


def test_assigned_iterations_do_not_renumber_recorded_steps():
    """A user may restart a schedule: a record has each number once."""
    run = make_small(K.Adam(SCHEDULE))
    small_steps(run, [1.0])
    run.optimizer.iterations.assign(0)
    small_steps(run, [1.0])
    record = record_of(run)
    assert record["step"].tolist() == [1, 2]
    assert record["learning_rate"].tolist() == [np.float32(0.01)] * 2


@pytest.mark.parametrize("records", [False, True])
def test_state_loads_whether_or_not_steps_are_recorded(records):
    run = make_small(record=4 * records)
    small_steps(run, [1.0, np.inf])
    other = make_small(record=4 * (not records))
    other.optimizer.load_own_variables(saved(run.optimizer))
    assert int(other.optimizer.iterations) == other.skipped == 1
    small_steps(other, [1.0])
    if not records:
        assert record_of(other)["step"].tolist() == [3]


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))],
    ids=["deepcopy", "pickle"],
)
def test_copied_optimizer_records_only_after_record_steps(duplicate):
    """Keras copies the config of an optimizer, which does not have the record."""
    run = make_small()
    small_steps(run, [1.0])
    copied = duplicate(run.optimizer)
    with pytest.raises(ValueError, match="only after `optimizer.record_steps"):
        copied.read_record()
    copied.record_steps()
    small_steps(Harness(copied, [(2,)]), [7.0])
    assert copied.read_record()["gradient_norm"].tolist() == [7]
    assert record_of(run)["gradient_norm"].tolist() == [1]


@pytest.mark.parametrize("length", [0, -1, 2.5, "many", True, 2**31])
def test_record_steps_rejects_invalid_length(length):
    optimizer = make_small(record=0).optimizer
    with pytest.raises(ValueError, match="`length` must"):
        optimizer.record_steps(length)


def test_second_record_steps_rejects_larger_length():
    optimizer = make_small(record=4).optimizer
    before = len(optimizer.variables)
    optimizer.record_steps(3)
    optimizer.record_steps(4)
    with pytest.raises(ValueError, match=r"the last 4 of them.*length=5"):
        optimizer.record_steps(5)
    assert len(optimizer.variables) == before
