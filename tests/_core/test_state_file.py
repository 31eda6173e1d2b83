"""The state of a `LossScaleOptimizer`: counters, variables, what is saved."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_lso import LossScaleOptimizer
from keras_lso.loss_scales import DynamicLossScale


def new_weights():
    return [keras.Variable([1.0, 2.0]), keras.Variable(3.0)]


def new_optimizer(weights, **arguments):
    inner = keras.optimizers.Adam(0.5)
    arguments.setdefault("initial_scale", 8.0)
    if "loss_scale" in arguments:
        del arguments["initial_scale"]
    optimizer = LossScaleOptimizer(inner, **arguments)
    optimizer.build(weights)
    return optimizer


def step(optimizer, finite=True, **arguments):
    bad = 0.0 if finite else np.inf
    grads = [ops.convert_to_tensor([8.0, bad]), ops.convert_to_tensor(-4.0)]
    optimizer.apply(grads, **arguments)


def trained(**arguments):
    """Three applied steps and one that was skipped, the second."""
    optimizer = new_optimizer(new_weights(), **arguments)
    for finite in [True, False, True, True]:
        step(optimizer, finite)
    return optimizer


def saved(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return store


def number(tensor):
    return ops.convert_to_numpy(tensor).item()


# --- Counters ----------------------------------------------------------------


def test_before_the_first_step_nothing_was_skipped():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    for _ in range(2):
        assert number(optimizer.skipped_steps) == 0
        assert number(optimizer.last_step_applied) is True
        assert number(optimizer.dynamic_counter) == 0
        assert number(optimizer.iterations) == 0
        optimizer.check_stalled(patience=1)
        optimizer.build(new_weights())


def test_applied_and_skipped_steps_are_counted(compiled):
    optimizer = new_optimizer(new_weights())
    run = compiled(
        lambda *grads: optimizer.apply(list(grads)),
        [*optimizer._trainable_variables, *optimizer.variables],
    )
    counts = []
    for bad in [0.0, np.inf, np.nan, 0.0, 0.0, -np.inf]:
        run(ops.convert_to_tensor([1.0, bad]), ops.convert_to_tensor(1.0))
        counts.append(
            (
                number(optimizer.iterations),
                number(optimizer.skipped_steps),
                number(optimizer.last_step_applied),
                number(optimizer.dynamic_counter),
                number(optimizer.loss_scale),
            )
        )
    assert counts == [
        (1, 0, True, 1, 8.0),
        (1, 1, False, 0, 4.0),
        (1, 2, False, 0, 2.0),
        (2, 2, True, 1, 2.0),
        (3, 2, True, 2, 2.0),
        (3, 3, False, 0, 1.0),
    ]


def test_what_a_user_asks_comes_as_scalar_tensors():
    optimizer = trained()
    expected = {
        "loss_scale": "float",
        "skipped_steps": "int",
        "last_step_applied": "bool",
        "dynamic_counter": "int",
    }
    for name, kind in expected.items():
        value = getattr(optimizer, name)
        assert ops.is_tensor(value), name
        assert tuple(value.shape) == (), name
        dtype = keras.backend.standardize_dtype(value.dtype)
        assert dtype.startswith(kind), name


def test_what_was_read_stays_what_it_was():
    # On PyTorch a variable's tensor changes in place.
    optimizer = trained()
    names = ["loss_scale", "skipped_steps", "last_step_applied", "dynamic_counter"]
    read = [getattr(optimizer, name) for name in names]
    before = [number(value) for value in read]
    step(optimizer, finite=False)
    assert [number(value) for value in read] == before
    assert before != [number(getattr(optimizer, name)) for name in names]


def test_a_micro_batch_counts_as_a_step():
    weights = new_weights()
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer.build(weights)
    for finite in [True, False, False, True]:
        step(optimizer, finite)
    # The window waited for the second finite micro-batch.
    assert number(optimizer.iterations) == 1
    assert number(optimizer.skipped_steps) == 2
    np.testing.assert_array_equal(ops.convert_to_numpy(weights[0])[1], 2.0)
    # (8 / 8 + 8 / 2) / 2, the scale being halved twice in between.
    np.testing.assert_array_equal(ops.convert_to_numpy(weights[0])[0], 1.0 - 2.5)


def test_what_describes_a_dynamic_scale_is_none_for_a_fixed_one():
    fixed = new_optimizer(new_weights(), dynamic=False)
    assert fixed.dynamic is False
    assert fixed.dynamic_counter is None
    assert fixed.dynamic_growth_steps is None
    assert fixed.initial_scale == 8.0
    dynamic = new_optimizer(new_weights(), dynamic_growth_steps=5)
    assert dynamic.dynamic is True
    assert dynamic.dynamic_growth_steps == 5
    assert dynamic.initial_scale == 8.0


# --- Has it stalled? ----------------------------------------------------------


def test_training_has_stalled_after_as_many_skips_at_the_lowest_scale():
    optimizer = new_optimizer(new_weights(), min_scale=2.0)
    # 8 -> 4 -> 2: none of these two was at the lowest scale.
    for _ in range(2):
        step(optimizer, finite=False)
        optimizer.check_stalled(patience=1)
    for skips in range(1, 6):
        step(optimizer, finite=False)
        optimizer.check_stalled(patience=skips + 1)
        for patience in range(1, skips + 1):
            with pytest.raises(FloatingPointError, match=f"last {skips} steps"):
                optimizer.check_stalled(patience=patience)


def test_the_default_patience_is_fifty():
    optimizer = new_optimizer(new_weights(), dynamic=False)
    for _ in range(49):
        step(optimizer, finite=False)
    optimizer.check_stalled()
    step(optimizer, finite=False)
    with pytest.raises(FloatingPointError, match=r"lowest loss scale there is \(8.0\)"):
        optimizer.check_stalled()


def test_one_applied_step_ends_a_stall():
    optimizer = new_optimizer(new_weights(), dynamic=False)
    for _ in range(3):
        step(optimizer, finite=False)
    step(optimizer, finite=True)
    step(optimizer, finite=False)
    optimizer.check_stalled(patience=2)
    with pytest.raises(FloatingPointError, match="last 1 steps"):
        optimizer.check_stalled(patience=1)


def test_skips_above_the_lowest_scale_are_no_stall():
    optimizer = new_optimizer(new_weights(), min_scale=2.0)
    for _ in range(9):
        step(optimizer, finite=False, update_scale=False)
    optimizer.check_stalled(patience=1)
    assert number(optimizer.skipped_steps) == 9


def test_skips_at_the_lowest_scale_count_without_an_update_of_the_scale():
    optimizer = new_optimizer(new_weights(), min_scale=8.0)
    for _ in range(3):
        step(optimizer, finite=False, update_scale=False)
    optimizer.check_stalled(patience=4)
    with pytest.raises(FloatingPointError, match="last 3 steps"):
        optimizer.check_stalled(patience=3)


def test_a_lowest_scale_that_float32_rounds_is_recognised():
    for lowest in (0.1, 0.7):  # rounded up and down
        optimizer = new_optimizer(new_weights(), initial_scale=lowest, min_scale=lowest)
        step(optimizer, finite=False)
        with pytest.raises(FloatingPointError, match="last 1 steps"):
            optimizer.check_stalled(patience=1)


def test_a_stall_is_recognised_when_compiled(compiled):
    optimizer = new_optimizer(new_weights(), min_scale=4.0)
    run = compiled(
        lambda *grads: optimizer.apply(list(grads)),
        [*optimizer._trainable_variables, *optimizer.variables],
    )
    for bad in [np.nan, np.nan, np.inf]:
        run(ops.convert_to_tensor([1.0, bad]), ops.convert_to_tensor(1.0))
    optimizer.check_stalled(patience=3)
    with pytest.raises(FloatingPointError, match="last 2 steps"):
        optimizer.check_stalled(patience=2)


# --- Variables ----------------------------------------------------------------


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_the_variables_come_in_keras_order_and_then_ours(hysteresis):
    policy = DynamicLossScale(8.0, hysteresis=hysteresis)
    optimizer = new_optimizer(new_weights(), loss_scale=policy)
    inner = optimizer.inner_optimizer.variables
    names = [v.name for v in optimizer.variables]
    own = ["iteration", "learning_rate", "step_counter", "dynamic_scale"]
    extra = ["overflows_left"] if hysteresis > 1 else []
    assert names == [*own, *[v.name for v in inner], *extra, "consecutive_skips"]
    assert [id(v) for v in optimizer.variables[4 : 4 + len(inner)]] == list(
        map(id, inner)
    )
    assert optimizer.variables[2] is optimizer.step_counter
    assert optimizer.variables[3] is optimizer.dynamic_scale


def test_keras_own_class_has_the_same_variables_in_the_same_order():
    weights = new_weights()
    ours = new_optimizer(weights)
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5))
    theirs.build(weights)
    assert [(v.name, v.shape, v.dtype) for v in ours.variables[:-1]] == [
        (v.name, v.shape, v.dtype) for v in theirs.variables
    ]


def test_all_but_the_slots_is_there_before_it_is_built():
    # What is restored before the first step finds its variables.
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    before = [v.name for v in optimizer.variables]
    optimizer.build([keras.Variable(1.0, name="w")])
    after = [v.name for v in optimizer.variables]
    assert before == [name for name in after if name != "w_momentum"]
    assert len(after) == len(before) + 1


@pytest.mark.parametrize("is_built", [False, True])
def test_what_is_read_before_the_first_step_is_where_it_starts(is_built):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8)
    if is_built:
        optimizer.build([keras.Variable(1.0)])
    assert number(optimizer.loss_scale) == number(optimizer.dynamic_scale) == 8
    assert number(optimizer.dynamic_counter) == number(optimizer.step_counter) == 0
    assert number(optimizer.iterations) == number(optimizer.skipped_steps) == 0
    assert bool(optimizer.last_step_applied)
    optimizer.check_stalled(patience=1)


@pytest.mark.one_backend
@pytest.mark.filterwarnings("error::UserWarning")
def test_the_state_of_an_optimizer_that_was_never_built_is_read():
    of_keras, ours = (
        cls(keras.optimizers.Adam(0.1))
        for cls in (keras.optimizers.LossScaleOptimizer, LossScaleOptimizer)
    )
    of_keras.inner_optimizer.learning_rate = 0.25
    ours.load_own_variables(saved(of_keras))
    assert number(ours.learning_rate) == 0.25
    assert number(ours.loss_scale) == 2.0**15
    # And our own, whose scale is among its variables.
    other = LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=8.0)
    other.load_own_variables(saved(ours))
    assert number(other.learning_rate) == 0.25
    assert number(other.loss_scale) == 2.0**15


def test_the_own_iteration_counts_skipped_steps():
    optimizer = trained()
    assert number(optimizer.variables[0]) == 1
    assert number(optimizer.variables[4]) == 3
    assert number(optimizer.variables[-1][0]) == 0


@pytest.mark.parametrize("steps", [0, 5000])
def test_a_restarted_schedule_skips_no_steps(steps):
    optimizer = trained()
    optimizer.iterations.assign(steps)
    assert number(optimizer.skipped_steps) == 1
    other = new_optimizer(new_weights())
    other.load_own_variables(saved(optimizer))
    assert number(other.skipped_steps) == 1
    assert number(other.iterations) == steps
    step(other, finite=False)
    step(other, finite=True)
    assert number(other.skipped_steps) == 2
    assert number(other.iterations) == steps + 1


def test_the_last_step_that_can_be_counted_is_saved():
    optimizer = trained()
    optimizer.iterations.assign(2**31 - 1)
    other = new_optimizer(new_weights())
    other.load_own_variables(saved(optimizer))
    assert number(other.iterations) == 2**31 - 1


# --- Saving and loading -------------------------------------------------------

ARGUMENTS = {
    "default": dict,
    "fixed": lambda: {"dynamic": False},
    "hysteresis": lambda: {"loss_scale": DynamicLossScale(8.0, hysteresis=3)},
}


@pytest.fixture(params=ARGUMENTS.values(), ids=ARGUMENTS)
def arguments(request):
    """Calling it gives constructor arguments, a policy of their own among them."""
    return request.param


def test_the_store_holds_all_variables_but_the_count_of_skips(arguments, snapshot):
    optimizer = trained(**arguments())
    store = saved(optimizer)
    assert list(store) == [str(i) for i in range(len(optimizer.variables) - 1)]
    first, *rest = store.values()
    # Of all steps, the skipped one included.
    assert first == 4
    assert [v.tobytes() for v in rest] == snapshot(optimizer.variables[1:-1])


def test_what_was_saved_is_loaded(arguments, snapshot):
    optimizer = trained(**arguments())
    other = new_optimizer(new_weights(), **arguments())
    other.load_own_variables(saved(optimizer))
    assert snapshot(other.variables) == snapshot(optimizer.variables)
    assert number(other.skipped_steps) == 1
    assert number(other.iterations) == 3


def test_a_loaded_optimizer_goes_on_like_the_one_that_was_saved(arguments, snapshot):
    optimizer = trained(**arguments())
    other = new_optimizer(new_weights(), **arguments())
    other.load_own_variables(saved(optimizer))
    for mine, theirs in zip(
        other._trainable_variables, optimizer._trainable_variables, strict=True
    ):
        mine.assign(theirs)
    for finite in [True, False, False, True, False, True]:
        for each in (optimizer, other):
            step(each, finite)
    assert snapshot(other.variables) == snapshot(optimizer.variables)
    assert snapshot(other._trainable_variables) == snapshot(
        optimizer._trainable_variables
    )


def test_loading_ends_a_stall():
    optimizer = new_optimizer(new_weights(), dynamic=False)
    store = saved(optimizer)
    for _ in range(3):
        step(optimizer, finite=False)
    optimizer.load_own_variables(store)
    optimizer.check_stalled(patience=1)
    assert number(optimizer.last_step_applied) is True


def keras_own(weights):
    """A trained optimizer of Keras's own class, with a state of its own."""
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.5), initial_scale=64.0
    )
    optimizer.build(weights)
    values = [v.numpy() for v in trained().variables[:-1]]
    values[0] = np.zeros_like(values[0])  # Keras leaves it there
    values[2] = np.asarray(2, values[2].dtype)
    values[3] = np.asarray(32.0, "float32")
    for variable, value in zip(optimizer.variables, values, strict=True):
        variable.assign(value)
    return optimizer


def test_the_layout_of_keras_own_class_is_loaded(arguments, snapshot):
    theirs = keras_own(new_weights())
    policy = arguments()
    ours = trained(**policy)
    ours.load_own_variables(saved(theirs))
    inner = ours.inner_optimizer.variables
    assert snapshot(inner) == snapshot(theirs.inner_optimizer.variables)
    assert number(ours.skipped_steps) == 0
    assert number(ours.iterations) == 3
    if ours.dynamic:
        assert number(ours.loss_scale) == 32.0
        assert number(ours.dynamic_counter) == 2
    else:
        assert number(ours.loss_scale) == 8.0
    if "loss_scale" in policy:
        # What Keras's file does not hold starts afresh.
        assert number(ours.loss_scale_policy.overflows_left) == 3


def test_keras_own_class_loads_ours(snapshot):
    ours = trained()
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5))
    theirs.build(new_weights())
    theirs.load_own_variables(saved(ours))
    assert snapshot(theirs.variables[1:]) == snapshot(ours.variables[1:-1])
    assert number(theirs.dynamic_scale) == 4.0


def test_the_state_of_the_bare_inner_optimizer_is_loaded(arguments, snapshot):
    weights = new_weights()
    bare = keras.optimizers.Adam(0.5)
    for _ in range(5):
        bare.apply([ops.ones(2), ops.ones(())], weights)
    ours = trained(**arguments())
    ours.load_own_variables(saved(bare))
    assert snapshot(ours.inner_optimizer.variables) == snapshot(bare.variables)
    assert number(ours.iterations) == 5
    # The scale starts afresh.
    assert number(ours.loss_scale) == 8.0
    assert number(ours.step_counter) == 0
    assert number(ours.skipped_steps) == 0
    assert number(ours.last_step_applied) is True


# --- Which layout is it? ------------------------------------------------------
# Keras's class builds the inner optimizer with tracking off, and does not save what
# that sets as attributes: one scalar of Nadam, two for each vector of Adafactor. With
# two vectors its file is as long as that of the bare optimizer.

SHAPES = {
    "a matrix": [(3, 2)],
    "a vector": [(3,)],
    "two vectors": [(3,), (3,)],
    "two scalars": [(), ()],
    "two layers": [(3, 2), (2,), (2, 2), (2,)],
    "two vectors first": [(2,), (2,), (3, 2), (2, 2)],
}
INNER = {
    "Adam": keras.optimizers.Adam,
    "Nadam": keras.optimizers.Nadam,
    "Adafactor": keras.optimizers.Adafactor,
    "Adafactor with a schedule": lambda: keras.optimizers.Adafactor(
        keras.optimizers.schedules.ExponentialDecay(0.5, 9, 0.5)
    ),
    "Adafactor, averaging": lambda: keras.optimizers.Adafactor(use_ema=True),
}
WRAPPERS = {
    "nobody": lambda inner: inner,
    "Keras": keras.optimizers.LossScaleOptimizer,
    "us": LossScaleOptimizer,
}
every_inner = pytest.mark.parametrize("inner", INNER)


def filled(optimizer, shapes):
    """An optimizer that is built, and has another number in each of its variables."""
    optimizer.build([keras.Variable(np.ones(shape, "float32")) for shape in shapes])
    for i, variable in enumerate(optimizer.variables):
        variable.assign(np.full(variable.shape, i + 1))
    return optimizer


def named_values(optimizer):
    """Those of the innermost variables that were added by name, which all save."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return [v.numpy().tobytes() for v in optimizer.variables if "/" in v.path]


@pytest.mark.in_turn
@pytest.mark.parametrize("writer", WRAPPERS)
@pytest.mark.parametrize("shapes", SHAPES)
@every_inner
def test_a_layout_is_told_by_more_than_its_length(inner, shapes, writer):
    shapes = SHAPES[shapes]
    written = filled(WRAPPERS[writer](INNER[inner]()), shapes)
    ours = LossScaleOptimizer(INNER[inner](), initial_scale=8.0)
    ours.build([keras.Variable(np.ones(shape, "float32")) for shape in shapes])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours.load_own_variables(saved(written))
    assert named_values(ours) == named_values(written)
    if writer == "nobody":
        assert number(ours.loss_scale) == 8.0
        assert number(ours.step_counter) == 0
    else:
        assert number(ours.loss_scale) == 4.0
        assert number(ours.step_counter) == 3


@pytest.mark.parametrize("steps", [0, 3, 2000])
def test_the_momenta_that_keras_does_not_save_are_multiplied_up(steps):
    theirs = filled(keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam()), [()])
    theirs.inner_optimizer.iterations.assign(steps)
    ours = filled(LossScaleOptimizer(keras.optimizers.Nadam()), [()])
    ours.load_own_variables(saved(theirs))
    momenta = 0.9 * (1 - 0.5 * 0.96 ** np.arange(1.0, steps + 1))
    # It is a product in float32.
    np.testing.assert_allclose(
        number(ours.inner_optimizer._u_product), np.prod(momenta), rtol=1e-6, atol=1e-37
    )


def test_a_product_of_momenta_that_was_saved_is_not_multiplied_up():
    ours = filled(LossScaleOptimizer(keras.optimizers.Nadam()), [()])
    # Not what `beta_1` would make of it now.
    ours.inner_optimizer._u_product.assign(0.625)
    again = filled(LossScaleOptimizer(keras.optimizers.Nadam()), [()])
    again.load_own_variables(saved(ours))
    assert number(again.inner_optimizer._u_product) == 0.625


def test_a_refused_file_leaves_the_product_of_momenta_alone(snapshot):
    theirs = filled(keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam()), [()])
    ours = filled(LossScaleOptimizer(keras.optimizers.Nadam()), [()])
    before = snapshot(ours.variables)
    store = {**saved(theirs), "7": np.ones(2, "float32")}
    with pytest.raises(ValueError, match="has shape"):
        ours.load_own_variables(store)
    assert snapshot(ours.variables) == before


@pytest.mark.one_backend
def test_slots_of_scalars_are_not_taken_for_the_state_of_an_unbuilt_wrapper(snapshot):
    unbuilt = LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.5))
    before = snapshot(unbuilt.variables)
    bare = keras.optimizers.SGD(0.25, momentum=0.5)
    filled(bare, [()] * (len(saved(unbuilt)) - 2))
    with pytest.warns(UserWarning, match="has not been built yet"):
        unbuilt.load_own_variables(saved(bare))
    assert snapshot(unbuilt.variables) == before


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "scale, restored",
    [
        (np.nan, 8.0),  # the initial one
        (np.inf, 64.0),
        (-np.inf, 2.0),
        (0.0, 2.0),
        (1e30, 64.0),
        (16.0, 16.0),
    ],
)
@pytest.mark.parametrize("load", ["load_own_variables", "set_weights"])
def test_a_loaded_scale_is_kept_within_the_bounds(scale, restored, load):
    arguments = {"min_scale": 2.0, "max_scale": 64.0}
    store = saved(trained(**arguments))
    store["3"] = np.asarray(scale, "float32")
    other = new_optimizer(new_weights(), **arguments)
    getattr(other, load)(store if load == "load_own_variables" else store.values())
    assert number(other.loss_scale) == restored
    # All else is loaded as it was.
    assert number(other.iterations) == 3
    assert number(other.dynamic_counter) == 2


@pytest.mark.parametrize(
    "own, inner, skipped", [(0, 3, 0), (2, 3, 0), (3, 3, 0), (9, 3, 6)]
)
def test_no_fewer_steps_were_taken_than_applied(own, inner, skipped):
    store = saved(trained())
    store["0"] = np.asarray(own, store["0"].dtype)
    store["4"] = np.asarray(inner, store["4"].dtype)
    other = new_optimizer(new_weights())
    other.load_own_variables(store)
    assert number(other.skipped_steps) == skipped


@pytest.mark.parametrize("position", [0, 3, 6, 9])
@pytest.mark.parametrize("load", ["load_own_variables", "set_weights"])
def test_a_wrong_shape_is_refused_and_nothing_is_loaded(position, load, snapshot):
    optimizer = trained()
    before = snapshot(optimizer.variables)
    store = saved(new_optimizer(new_weights()))
    store[str(position)] = np.zeros((5, 5), "float32")
    path = optimizer.variables[position].path
    with pytest.raises(ValueError, match=f"'{path}' has shape .* shape \\(5, 5\\)"):
        getattr(optimizer, load)(
            store if load == "load_own_variables" else store.values()
        )
    assert snapshot(optimizer.variables) == before
    assert number(optimizer.skipped_steps) == 1


def test_a_store_with_a_gap_is_refused_and_nothing_is_loaded(snapshot):
    optimizer = trained()
    before = snapshot(optimizer.variables)
    store = saved(new_optimizer(new_weights()))
    store["twelve"] = store.pop("6")
    with pytest.raises(ValueError, match=r"Not there: \['6'\]"):
        optimizer.load_own_variables(store)
    assert snapshot(optimizer.variables) == before


def test_another_number_of_variables_is_passed_over_with_a_warning(snapshot):
    optimizer = trained()
    before = snapshot(optimizer.variables)
    store = saved(optimizer)
    del store["9"]
    with pytest.warns(UserWarning, match="has 10 variables .* has 9 variables"):
        optimizer.load_own_variables(store)
    assert snapshot(optimizer.variables) == before


def test_an_optimizer_that_was_not_built_says_so_when_loading():
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.5))
    with pytest.warns(UserWarning, match="has not been built yet"):
        optimizer.load_own_variables(saved(trained()))
    assert not optimizer.built


def test_the_state_of_an_optimizer_that_was_not_built_is_loaded():
    unbuilt = LossScaleOptimizer(keras.optimizers.Adam(0.5))
    unbuilt.learning_rate = 0.25
    other = LossScaleOptimizer(keras.optimizers.Adam(0.5))
    other.load_own_variables(saved(unbuilt))
    assert number(other.learning_rate) == 0.25
    other.build(new_weights())
    assert number(other.loss_scale) == 2.0**15


def test_weights_are_set_in_the_order_of_the_variables(arguments, snapshot):
    optimizer = trained(**arguments())
    values = [v.numpy() for v in optimizer.variables]
    for weights in (values, values[:-1]):  # the last one is not part of the state
        other = new_optimizer(new_weights(), **arguments())
        other.set_weights(weights)
        assert snapshot(other.variables) == snapshot(optimizer.variables)


def test_keras_finds_the_inner_optimizer_when_saving_but_not_when_loading():
    # Keras saves what `dir` lists. Its own class saves the inner optimizer twice.
    optimizer = new_optimizer(new_weights())
    inner = optimizer.inner_optimizer
    store = saved(optimizer)
    assert "inner_optimizer" in dir(optimizer)
    optimizer.load_own_variables(store)
    assert "inner_optimizer" not in dir(optimizer)
    assert optimizer.inner_optimizer is inner
    saved(optimizer)
    assert "inner_optimizer" in dir(optimizer)


def test_loading_what_was_saved_warns_of_nothing():
    optimizer = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer.load_own_variables(saved(optimizer))


def test_an_overflow_without_an_update_counts_at_the_next_update(compiled):
    weight = keras.Variable(np.array([1.0], "float32"))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=1024.0)
    optimizer.build([weight])
    variables = [weight, *optimizer.variables]

    def apply(update_scale):
        return compiled(
            lambda grad: optimizer.apply([grad], [weight], update_scale=update_scale),
            variables,
        )

    first, last = apply(False), apply(True)
    scales = []
    for values in [(np.inf, 0.0), (0.0, 0.0), (0.0, np.inf), (np.nan, np.nan)]:
        for step, value in zip((first, last), values, strict=True):
            step(ops.convert_to_tensor(np.array([value], "float32")))
        scales.append(float(optimizer.loss_scale))
    assert scales == [512.0, 512.0, 256.0, 128.0]
    assert int(optimizer.skipped_steps) == 4
