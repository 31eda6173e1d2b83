"""What `record_steps` keeps of each step, and `read_record` returns."""

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from testing.beside_keras import SHAPES
from testing.step_records import COLUMNS, assert_alike
from testing.trained_optimizers import saved

# The schedule counts micro-batches, on purpose; a copy has not the record's variables.
pytestmark = [
    pytest.mark.filterwarnings("ignore:With `gradient_accumulation_steps="),
    pytest.mark.filterwarnings("ignore:Skipping variable loading"),
]

K = keras.optimizers
# One pass, and steps that the inner optimizer takes by itself.
MAKES = {"adam": K.Adam, "lars": keras_lso.LARS, "adadelta": K.Adadelta}
SCHEDULE = K.schedules.ExponentialDecay(0.01, 3, 0.5)
# Additions and a root in float32, of 20,000 numbers.
ROUNDING = {"rtol": 4e-6, "atol": 0}


class Model:
    """The rows of steps under a dynamic loss scale, in NumPy's float64."""

    def __init__(self, window=1, scale=8.0, growth=2):
        self.window, self.scale, self.growth = window, scale, growth
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
            outcome = "accumulated" if self.taken % self.window else "applied"
        else:
            self.scale, self.good, outcome = scale / 2, 0, "overflow"
        self.rows.append((len(self.rows) + 1, outcome, scale, norm, rate, np.nan))

    def record(self):
        return dict(zip(COLUMNS, map(np.array, zip(*self.rows, strict=True))))  # noqa: B905


def gradients(count, overflows=(2, 5)):
    """Gradients of steps, a list of lists of arrays, of which some overflow."""
    random = np.random.default_rng(3)
    found = [[random.normal(size=s).astype("float32") for s in SHAPES] for _ in SHAPES]
    # Few, since they are large: each step has them at a size of its own.
    steps = [[g * np.float32(i + 1) for g in found[i % 3]] for i in range(count)]
    for at in overflows:
        steps[at][1] = np.full_like(steps[at][1], np.inf)
    return steps


def make(inner=None, record=512, shapes=SHAPES, **arguments):
    arguments = {"initial_scale": 8.0, "dynamic_growth_steps": 2} | arguments
    if "loss_scale" in arguments:
        del arguments["initial_scale"], arguments["dynamic_growth_steps"]
    inner = K.Adam(SCHEDULE) if inner is None else inner
    optimizer = keras_lso.LossScaleOptimizer(inner, **arguments)
    variables = [keras.Variable(np.ones(s, "float32")) for s in shapes]
    optimizer.build(variables)
    if record:
        optimizer.record_steps(record)
    return optimizer, variables


def apply(optimizer, variables, grads, **told):
    scale = float(optimizer.loss_scale) if told.get("scaled", True) else 1.0
    tensors = [ops.convert_to_tensor(g * np.float32(scale)) for g in grads]
    optimizer.apply(tensors, variables, **({"scaled": True} | told))


def small(optimizer, variables, values):
    """Takes a step of each value, which is the norm of its gradient."""
    for value in values:
        apply(optimizer, variables, [np.array([value, 0.0], "float32")])


def make_small(*inner, **arguments):
    return make(*inner, shapes=[(2,)], **arguments)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "told",
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
def test_recorded_rows_match_numpy_model(inner, told, way):
    optimizer, variables = make(inner(SCHEDULE, **told))
    model = Model(told.get("gradient_accumulation_steps", 1))
    for grads in gradients(9):
        apply(optimizer, variables, grads)
        model.step(grads)
    assert_alike(optimizer.read_record(), model.record(), **ROUNDING)


@pytest.mark.parametrize("name", ["adam", "adadelta"])
@pytest.mark.exhaustive
def test_recorded_rows_of_compiled_steps_match_numpy_model(name, compiled):
    optimizer, variables = make(MAKES[name](SCHEDULE), shapes=SHAPES[:2])
    model = Model()
    run = compiled(
        lambda *grads: optimizer.apply(list(grads), variables, scaled=True),
        [*variables, *optimizer.variables],
    )
    for grads in gradients(6, overflows=[3]):
        scale = np.float32(model.scale)
        run(*(ops.convert_to_tensor(g * scale) for g in grads[:2]))
        model.step(grads[:2])
    assert_alike(optimizer.read_record(), model.record(), **ROUNDING)


@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow", reason="TensorFlow has no stateless_apply"
)
def test_stateless_apply_returns_recorded_rows():
    optimizer, variables = make()
    model, state = Model(), [v.value for v in optimizer.variables]
    weights = [v.value for v in variables]
    for grads in gradients(4, overflows=[2]):
        scaled = [ops.convert_to_tensor(g * np.float32(model.scale)) for g in grads]
        weights, state = optimizer.stateless_apply(state, scaled, weights, scaled=True)
        model.step(grads)
    assert len(optimizer.read_record()["step"]) == 0
    for variable, value in zip(optimizer.variables, state, strict=True):
        variable.assign(value)
    found = optimizer.read_record()
    for name in ("outcome", "loss_scale"):
        assert found[name].tolist() == model.record()[name].tolist()


@pytest.mark.parametrize("name", ["adam", "adadelta"])
def test_recorded_norm_is_unscaled_for_scaled_and_unscaled_gradients(name):
    optimizer, variables = make(MAKES[name](SCHEDULE))
    [grads] = gradients(1, overflows=())
    apply(optimizer, variables, grads, scaled=False)
    apply(optimizer, variables, grads)
    norms = optimizer.read_record()["gradient_norm"]
    expected = np.sqrt(sum((g.astype("float64") ** 2).sum() for g in grads))
    np.testing.assert_allclose(norms, [expected] * 2, **ROUNDING)


def test_recorded_norm_of_float16_gradients_does_not_overflow():
    optimizer, variables = make_small()
    grads = [ops.convert_to_tensor(np.full((2,), 6e4, "float16"))]
    optimizer.apply(grads, variables, scaled=True)
    [norm] = optimizer.read_record()["gradient_norm"]
    # 6e4 is a float16, and the loss scale 8.
    np.testing.assert_allclose(norm, 6e4 / 8 * np.sqrt(2), rtol=1e-6)


def test_variable_without_gradient_adds_nothing_to_recorded_norm():
    optimizer, variables = make(shapes=[(2,), (2,)])
    grad = ops.convert_to_tensor(np.array([24.0, 32.0], "float32"))
    with pytest.warns(UserWarning, match="do not exist"):
        optimizer.apply([grad, None], variables, scaled=True)
    assert optimizer.read_record()["gradient_norm"].tolist() == [5.0]


def test_recorded_norm_adds_up_duplicate_rows_of_sparse_gradient(sparse_gradient):
    """Rows that occur twice are one row of the tensor."""
    optimizer, variables = make(shapes=[(4, 2)])
    grad = sparse_gradient(np.full((2, 2), 8.0, "float32"), [1, 1], (4, 2))
    optimizer.apply([grad], variables, scaled=True)
    [norm] = optimizer.read_record()["gradient_norm"]
    np.testing.assert_allclose(norm, np.sqrt(2 * 2.0**2), rtol=1e-6)


@pytest.mark.parametrize("inner", [K.Adam, K.Adadelta])
def test_largest_gradient_is_recorded_for_log_max_policy(inner):
    policy = keras_lso.loss_scales.LogMaxLossScale()
    optimizer, variables = make(inner(SCHEDULE), loss_scale=policy)
    steps = gradients(3, overflows=())
    scales = []
    for grads in steps:
        scales.append(float(optimizer.loss_scale))
        apply(optimizer, variables, grads)
    record = optimizer.read_record()
    largest = [max(np.abs(g).max() for g in grads) for grads in steps]
    # The loss scale is no power of two.
    np.testing.assert_allclose(record["largest_gradient"], largest, rtol=1e-6)
    assert record["loss_scale"].tolist() == scales


def test_fixed_scale_and_absent_scale_are_recorded():
    for optimizer, scale in (
        (keras_lso.LossScaleOptimizer(K.SGD(0.5), False, 16.0), 16.0),
        (keras_lso.GuardedOptimizer(K.SGD(0.5)), 1.0),
    ):
        variables = [keras.Variable([1.0, 1.0])]
        optimizer.record_steps()
        small(optimizer, variables, [3.0, np.inf])
        record = optimizer.read_record()
        assert record["outcome"].tolist() == ["applied", "overflow"]
        assert record["loss_scale"].tolist() == [scale] * 2
        assert record["learning_rate"].tolist() == [0.5] * 2
        assert record["gradient_norm"][0] == 3.0


@pytest.mark.parametrize("inner", [K.Adam, K.Adadelta])
@pytest.mark.exhaustive
def test_record_distinguishes_spike_overflow_and_non_finite_rate(inner, way):
    guard = keras_lso.SpikeGuard(window=8, warmup=4, max_norm=10.0)
    optimizer, variables = make_small(inner(0.5), spike_guard=guard)
    small(optimizer, variables, [1.0, 50.0, np.inf, 2.0])
    optimizer.learning_rate = np.nan
    with pytest.warns(UserWarning, match="The learning rate is nan"):
        small(optimizer, variables, [1.0, np.nan])
        optimizer.finalize_variable_values(variables)
    optimizer.learning_rate = 0.25
    small(optimizer, variables, [1.0])
    record = optimizer.read_record()
    outcomes = "applied spike overflow applied rate overflow applied"
    assert record["outcome"].tolist() == outcomes.split()
    assert record["gradient_norm"][[0, 1, 3, 4, 6]].tolist() == [1, 50, 2, 1, 1]
    rates = [0.5] * 4 + [np.nan] * 2 + [0.25]
    np.testing.assert_array_equal(record["learning_rate"], np.float32(rates))


@pytest.mark.filterwarnings("ignore:`momentum` of the inner optimizer is nan")
def test_non_finite_momentum_is_recorded_with_outcome_rate():
    inner = K.SGD(0.5, momentum=0.9)
    optimizer, variables = make_small(inner)
    inner.momentum = np.nan
    small(optimizer, variables, [2.0])
    record = optimizer.read_record()
    assert record["outcome"].tolist() == ["rate"]
    assert record["gradient_norm"].tolist() == [2.0]
    assert record["learning_rate"].tolist() == [0.5]


@pytest.mark.parametrize("inner", [K.Adam, K.Adadelta])
def test_window_with_spike_is_recorded_as_spike_at_last_micro_batch(inner):
    guard = keras_lso.SpikeGuard(window=8, warmup=4, max_norm=4.0)
    made = inner(0.5, gradient_accumulation_steps=3)
    optimizer, variables = make_small(made, spike_guard=guard)
    small(optimizer, variables, [1.0, 2.0, 3.0, 1.0, 20.0, 1.0, 1.0, 1.0, 1.0])
    record = optimizer.read_record()
    assert record["outcome"].tolist() == (
        ["accumulated", "accumulated", "applied"]
        + ["accumulated", "accumulated", "spike"]
        + ["accumulated", "accumulated", "applied"]
    )
    assert record["step"].tolist() == list(range(1, 10))
    # Of each micro-batch, not of the window.
    assert record["gradient_norm"].tolist() == [1, 2, 3, 1, 20, 1, 1, 1, 1]


def test_read_record_returns_each_step_once():
    optimizer, variables = make_small()
    assert len(optimizer.read_record()["step"]) == 0
    small(optimizer, variables, [1.0, 2.0])
    assert optimizer.read_record()["gradient_norm"].tolist() == [1, 2]
    empty = optimizer.read_record()
    assert {name: len(column) for name, column in empty.items()} == dict.fromkeys(
        COLUMNS, 0
    )
    small(optimizer, variables, [3.0])
    record = optimizer.read_record()
    assert record["gradient_norm"].tolist() == [3]
    assert record["step"].tolist() == [3]


def test_record_holds_last_steps_up_to_length():
    optimizer, variables = make_small(record=4)
    small(optimizer, variables, [1.0, 2.0, 3.0])
    assert optimizer.read_record()["step"].tolist() == [1, 2, 3]
    # Across the end of the ring, as many as it holds, and more.
    small(optimizer, variables, [4.0, 5.0, 6.0, 7.0])
    record = optimizer.read_record()
    assert record["gradient_norm"].tolist() == record["step"].tolist() == [4, 5, 6, 7]
    small(optimizer, variables, [8.0, 9.0, 10.0, 11.0, 12.0, 13.0])
    record = optimizer.read_record()
    assert record["gradient_norm"].tolist() == record["step"].tolist()
    assert record["step"].tolist() == [10, 11, 12, 13]
    assert optimizer._counters.record.missed == 2
    optimizer.read_record()
    assert optimizer._counters.record.missed == 0


def test_step_numbers_include_steps_before_recording():
    optimizer, variables = make_small(record=0)
    small(optimizer, variables, [1.0, np.inf])
    optimizer.record_steps()
    small(optimizer, variables, [1.0, np.inf])
    assert optimizer.read_record()["step"].tolist() == [3, 4]


def test_step_numbers_continue_from_loaded_state():
    optimizer, variables = make_small(record=4)
    small(optimizer, variables, [1.0, np.inf, 2.0])
    store = saved(optimizer)
    small(optimizer, variables, [1.0] * 7)
    optimizer.load_own_variables(store)
    # What nobody has read yet is not lost.
    small(optimizer, variables, [5.0, 6.0])
    record = optimizer.read_record()
    assert record["step"].tolist() == [7, 8, 9, 10, 4, 5]
    assert record["gradient_norm"].tolist() == [1, 1, 1, 1, 5, 6]
    optimizer.load_own_variables(store)
    assert len(optimizer.read_record()["step"]) == 0


def test_assigned_iterations_do_not_renumber_recorded_steps():
    """As to restart a schedule: a record has each number once."""
    optimizer, variables = make_small(K.Adam(SCHEDULE))
    small(optimizer, variables, [1.0])
    optimizer.iterations.assign(0)
    small(optimizer, variables, [1.0])
    record = optimizer.read_record()
    assert record["step"].tolist() == [1, 2]
    assert record["learning_rate"].tolist() == [np.float32(0.01)] * 2


@pytest.mark.parametrize("records", [False, True])
def test_state_loads_whether_or_not_steps_are_recorded(records):
    optimizer, variables = make_small(record=4 * records)
    small(optimizer, variables, [1.0, np.inf])
    other, others = make_small(record=4 * (not records))
    other.load_own_variables(saved(optimizer))
    assert int(other.iterations) == int(other.skipped_steps) == 1
    small(other, others, [1.0])
    if not records:
        assert other.read_record()["step"].tolist() == [3]


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))],
    ids=["deepcopy", "pickle"],
)
def test_copied_optimizer_records_only_after_record_steps(duplicate):
    """Keras copies the config of an optimizer, which does not have the record."""
    optimizer, variables = make_small()
    small(optimizer, variables, [1.0])
    copied = duplicate(optimizer)
    with pytest.raises(ValueError, match="only after `optimizer.record_steps"):
        copied.read_record()
    copied.record_steps()
    small(copied, [keras.Variable([1.0, 1.0])], [7.0])
    assert copied.read_record()["gradient_norm"].tolist() == [7]
    assert optimizer.read_record()["gradient_norm"].tolist() == [1]


@pytest.mark.parametrize("length", [0, -1, 2.5, "many", True, 2**31])
def test_record_steps_rejects_invalid_length(length):
    optimizer, _ = make_small(record=0)
    with pytest.raises(ValueError, match="`length` must"):
        optimizer.record_steps(length)


def test_second_record_steps_rejects_larger_length():
    optimizer, _ = make_small(record=4)
    before = len(optimizer.variables)
    optimizer.record_steps(3)
    optimizer.record_steps(4)
    with pytest.raises(ValueError, match=r"the last 4 of them.*length=5"):
        optimizer.record_steps(5)
    assert len(optimizer.variables) == before
