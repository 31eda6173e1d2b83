"""Slots in 8 bits, which have scales, in files, lists and trees of the state."""

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import GuardedOptimizer, LossScaleOptimizer, SpikeGuard
from testing.harness import Harness, array, bits
from testing.trained_optimizers import saved

K = keras.optimizers
# The first has slots in 8 bits, the others in bfloat16.
SHAPES = [(64, 64), (3, 5), (7,)]
# The inner optimizer, the dtype of the weights, and arguments of the wrapper.
RUNS = {
    "Adam": (lambda: K.Adam(0.01), "float32", {}),
    "masters": (lambda: K.AdamW(0.01), "float16", {"master_weights": "float32"}),
    "24 bits": (lambda: K.Adam(0.01), "bfloat16", {"master_weights": "remainder8"}),
    "stochastic": (lambda: K.Adam(0.01), "bfloat16", {"master_weights": "stochastic"}),
    "averages": (
        lambda: K.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
        "bfloat16",
        {"master_weights": "remainder"},
    ),
    "accumulation": (
        lambda: K.SGD(0.01, momentum=0.9, gradient_accumulation_steps=2, clipvalue=0.5),
        "float32",
        {},
    ),
    "norms": (lambda: keras_lso.LAMB(0.01, global_clipnorm=0.5), "float32", {}),
    "guard": (
        lambda: K.Nadam(0.01, clipnorm=0.5),
        "float32",
        {"spike_guard": SpikeGuard(2.0, 4, 2)},
    ),
}
each_run = pytest.mark.parametrize("run", RUNS)


def new(run, compiled=None, slot_dtype="int8"):
    make, dtype, options = RUNS[run]
    options = {"initial_scale": 8.0, "slot_dtype": slot_dtype, **options}
    optimizer = LossScaleOptimizer(make(), **options)
    return Harness(optimizer, SHAPES, dtype, compiled, overflow_every=3)


def put(harness, other):
    """Puts a harness where another is, by the file of its optimizer."""
    for weight, value in zip(harness.weights, other.weights, strict=True):
        weight.assign(value)
    harness.optimizer.load_own_variables(saved(other.optimizer))
    harness.random.bit_generator.state = other.random.bit_generator.state
    harness.drawn = other.drawn


def kept(harness):
    """The bits of what a file restores."""
    return bits([*harness.weights, *harness.optimizer._in_memory])


def codes_of(optimizer):
    return [v for v in optimizer.inner_optimizer.variables if v.dtype.endswith("int8")]


@each_run
def test_run_that_is_resumed_at_each_step_is_that_without_a_stop(run, compiled_once):
    whole, resumed = new(run, compiled_once), new(run, compiled_once)
    assert codes_of(whole.optimizer)
    for _ in range(6):
        put(resumed, whole)
        if run != "guard":  # A file does not hold the whole history.
            assert kept(resumed) == kept(whole)
        whole.step()
        resumed.step()
        assert bits(resumed.weights) == bits(whole.weights)
    assert whole.skipped == 2


@each_run
def test_list_of_all_variables_is_set_back(run, compiled_once):
    whole, other = new(run, compiled_once).steps(4), new(run, compiled_once).steps(1)
    other.optimizer.set_weights([array(v) for v in whole.optimizer.variables])
    assert bits(other.optimizer._in_memory) == bits(whole.optimizer._in_memory)


@each_run
def test_weights_of_an_optimizer_hold_the_scales(run, compiled_once):
    whole, other = new(run, compiled_once).steps(4), new(run, compiled_once).steps(1)
    other.optimizer.set_weights(whole.optimizer.get_weights())
    of_other, of_whole = (
        [*h.optimizer.inner_optimizer.variables, *h.optimizer._masters.scales]
        for h in (other, whole)
    )
    rates = [i for i, v in enumerate(of_whole) if v.name == "learning_rate"]
    for i, (a, b) in enumerate(zip(of_other, of_whole, strict=True)):
        assert i in rates or a.value is None or bits([a]) == bits([b]), a.path


@each_run
def test_file_is_that_of_float32_slots(run, compiled_once):
    """Each entry is where one of float32 slots has its own."""
    store, narrow = (
        saved(new(run, compiled_once, dtype).optimizer) for dtype in (None, "int8")
    )
    assert {n: v.shape for n, v in store.items()} == {
        n: v.shape for n, v in narrow.items()
    }
    codes = [n for n, v in narrow.items() if v.dtype.name in ("int8", "uint8")]
    assert not codes


def carried(store, to, back):
    """Returns the file of an optimizer that read another's file, and read it back."""
    for optimizer in (to, back):
        optimizer.build([keras.Variable(np.zeros(s, "float32")) for s in SHAPES])
        optimizer.load_own_variables(store)
        store = saved(optimizer)
    return store


WRAPPERS = {
    "float32 slots": lambda: LossScaleOptimizer(K.Adam(0.01)),
    "GuardedOptimizer": lambda: GuardedOptimizer(K.Adam(0.01)),
    "Keras's wrapper": lambda: K.LossScaleOptimizer(K.Adam(0.01)),
}


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_numbers_go_to_float32_slots_and_back_to_the_bit(make):
    run = new("Adam").steps(4)
    back = LossScaleOptimizer(K.Adam(0.01), slot_dtype="int8")
    carried(saved(run.optimizer), make(), back)
    of_slots = len(run.optimizer.inner_optimizer.variables)
    ours, theirs = (
        [*o.inner_optimizer.variables[:of_slots], *o._masters.scales]
        for o in (run.optimizer, back)
    )
    assert bits(theirs) == bits(ours)


def test_numbers_of_bare_optimizer_are_rounded_and_go_back():
    bare = Harness(K.Adam(0.01), SHAPES).steps(3).optimizer
    ours = LossScaleOptimizer(K.Adam(0.01), slot_dtype="int8")
    store, other = saved(bare), LossScaleOptimizer(K.Adam(0.01), slot_dtype="int8")
    found = carried(store, ours, other)
    assert bits(other._in_memory) == bits(ours._in_memory)
    # The inner optimizer's come after four of the wrapper.
    for name, value in store.items():
        number = found[str(int(name) + 4)].astype("float32")
        largest = np.abs(value).max()
        np.testing.assert_allclose(number, value, rtol=0, atol=largest * 2.0**-5)


def test_inner_optimizer_saves_and_loads_numbers():
    # Keras saves it beside the wrapper, and its own wrapper then loads it.
    run = new("Adam").steps(4)
    bare, other = K.Adam(0.01), new("Adam")
    store = saved(run.inner)
    assert carried(store, bare, K.Adam(0.01)).keys() == store.keys()
    for name, value in saved(bare).items():
        np.testing.assert_array_equal(value, store[name].astype(value.dtype))
    other.inner.load_own_variables(saved(bare))
    assert bits(other.inner.variables) == bits(run.inner.variables)
    assert bits(other.optimizer._masters.scales) == bits(run.optimizer._masters.scales)
    before = bits(other.optimizer.variables)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        other.inner.load_own_variables({"0": np.int32(1)})
    store["1"] = np.zeros(3)
    with pytest.raises(ValueError, match="Nothing was assigned"):
        other.inner.load_own_variables(store)
    assert bits(other.optimizer.variables) == before


@pytest.mark.parametrize("order", [("bfloat16", "int8"), ("int8", "bfloat16")])
def test_other_narrow_slots_take_the_nearest_numbers(order):
    run, other = (new("Adam", slot_dtype=dtype) for dtype in order)
    put(other, run.steps(4))
    for a, b in zip(
        saved(other.optimizer).values(), saved(run.optimizer).values(), strict=True
    ):
        a, b = a.astype("float32"), b.astype("float32")
        # Half of a level is at most 4 / 127 / 2 of the largest.
        np.testing.assert_allclose(a, b, rtol=0, atol=np.abs(b).max() * 2.0**-6)


def test_paths_of_variables_differ():
    layers = [keras.layers.Dense(64, name=name) for name in ("a", "b")]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(GuardedOptimizer(K.Adam(0.01), slot_dtype="int8"), "mse")
    model.optimizer.build(model.trainable_variables)
    assert len(codes_of(model.optimizer)) == 4
    paths = [v.path for v in model.optimizer.variables]
    assert len(set(paths)) == len(paths)
    tree = model.get_state_tree(value_format="numpy_array")["optimizer_variables"]
    assert len(keras.tree.flatten(tree)) == len(paths)
    before = [array(v) for v in model.optimizer.variables]
    for variable in model.optimizer.variables:
        variable.assign(np.zeros(variable.shape))
    model.set_state_tree({"optimizer_variables": tree})
    assert bits(model.optimizer.variables) == [value.tobytes() for value in before]


def test_slots_that_overflow_stay_numbers(compiled_once):
    run = new("Adam", compiled_once).steps(1)
    # Their squares are inf in float32.
    grads = run.gradients()
    grads[0][:2] *= np.float32(1e25)
    for _ in range(2):
        run.step(grads)
    run.steps(2)
    assert all(np.isfinite(array(v)).all() for v in run.optimizer.variables)
    assert all(np.isfinite(value).all() for value in run.values())


def test_masters_restart_and_slots_stay():
    run, bare = new("24 bits").steps(4), K.Adam(0.01)
    bare.build([keras.Variable(np.zeros(s, "float32")) for s in SHAPES])
    numbers = saved(run.optimizer)
    count = len(bare.variables)
    bare.load_own_variables({str(i): numbers[str(4 + i)] for i in range(count)})
    slots = bits(run.optimizer.inner_optimizer.variables[:count])
    scales = bits(run.optimizer._masters.scales)
    run.optimizer.load_own_variables(saved(bare))
    assert bits(run.optimizer.inner_optimizer.variables[:count]) == slots
    assert bits(run.optimizer._masters.scales) == scales
    remainders = run.optimizer._masters.variables[: len(SHAPES)]
    assert not any(array(v).any() for v in remainders)
