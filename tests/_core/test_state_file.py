"""A `LossScaleOptimizer` saves, loads and rejects the values of its variables."""

import keras
import numpy as np
import pytest

from keras_lso import LossScaleOptimizer
from keras_lso.loss_scales import DynamicLossScale
from testing.trained_optimizers import new_run, number, saved, trained


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_variables_follow_keras_order_and_end_with_own_variables(hysteresis):
    policy = DynamicLossScale(8.0, hysteresis=hysteresis)
    optimizer = new_run(loss_scale=policy).optimizer
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


def test_variables_match_keras_class_in_names_shapes_and_dtypes():
    run = new_run()
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5))
    theirs.build(run.weights)
    assert [(v.name, v.shape, v.dtype) for v in run.optimizer.variables[:-1]] == [
        (v.name, v.shape, v.dtype) for v in theirs.variables
    ]


def test_variables_other_than_slots_exist_before_build():
    # A checkpoint that is restored before the first step finds its variables.
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    before = [v.name for v in optimizer.variables]
    optimizer.build([keras.Variable(1.0, name="w")])
    after = [v.name for v in optimizer.variables]
    assert before == [name for name in after if name != "w_momentum"]
    assert len(after) == len(before) + 1


@pytest.mark.parametrize("is_built", [False, True])
def test_scale_and_counters_have_initial_values_before_first_step(is_built):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8)
    if is_built:
        optimizer.build([keras.Variable(1.0)])
    assert number(optimizer.loss_scale) == number(optimizer.dynamic_scale) == 8
    assert number(optimizer.dynamic_counter) == number(optimizer.step_counter) == 0
    assert number(optimizer.iterations) == number(optimizer.skipped_steps) == 0
    assert bool(optimizer.last_step_applied)
    optimizer.check_stalled(patience=1)


@pytest.mark.filterwarnings("error::UserWarning")
def test_unbuilt_optimizer_loads_state_of_unbuilt_keras_optimizer():
    of_keras, ours = (
        cls(keras.optimizers.Adam(0.1))
        for cls in (keras.optimizers.LossScaleOptimizer, LossScaleOptimizer)
    )
    of_keras.inner_optimizer.learning_rate = 0.25
    ours.load_own_variables(saved(of_keras))
    assert number(ours.learning_rate) == 0.25
    assert number(ours.loss_scale) == 2.0**15
    # It also loads our own, whose scale is among the variables.
    other = LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=8.0)
    other.load_own_variables(saved(ours))
    assert number(other.learning_rate) == 0.25
    assert number(other.loss_scale) == 2.0**15
    other.build(new_run().weights)
    assert number(other.loss_scale) == 2.0**15


def test_own_iteration_variable_counts_skipped_steps():
    variables = trained().optimizer.variables
    assert number(variables[0]) == 1
    assert number(variables[4]) == 3
    assert number(variables[-1][0]) == 0


@pytest.mark.parametrize("steps", [0, 5000])
def test_assigned_iterations_keep_count_of_skipped_steps(steps):
    run, other = trained(), new_run()
    run.optimizer.iterations.assign(steps)
    assert run.skipped == 1
    other.optimizer.load_own_variables(saved(run.optimizer))
    assert other.skipped == 1
    assert number(other.optimizer.iterations) == steps
    other.overflow()
    other.step()
    assert other.skipped == 2
    assert number(other.optimizer.iterations) == steps + 1


def test_largest_iteration_count_round_trips():
    run, other = trained(), new_run()
    run.optimizer.iterations.assign(2**31 - 1)
    other.optimizer.load_own_variables(saved(run.optimizer))
    assert number(other.optimizer.iterations) == 2**31 - 1


ARGUMENTS = {
    "default": dict,
    "fixed": lambda: {"dynamic": False},
    "hysteresis": lambda: {"loss_scale": DynamicLossScale(8.0, hysteresis=3)},
    "narrow slots": lambda: {"slot_dtype": "bfloat16"},
}


@pytest.fixture(params=ARGUMENTS.values(), ids=ARGUMENTS)
def arguments(request):
    """Returns a function that returns arguments, with a new policy each time."""
    return request.param


def test_store_holds_every_variable_except_consecutive_skips(arguments, snapshot):
    optimizer = trained(**arguments()).optimizer
    store = saved(optimizer)
    assert list(store) == [str(i) for i in range(len(optimizer.variables) - 1)]
    first, *rest = store.values()
    # Of all steps, the skipped one included.
    assert first == 4
    assert [v.tobytes() for v in rest] == snapshot(optimizer.variables[1:-1])


def test_loading_state_ends_stall():
    run = new_run(dynamic=False)
    store = saved(run.optimizer)
    for _ in range(3):
        run.overflow()
    run.optimizer.load_own_variables(store)
    run.optimizer.check_stalled(patience=1)
    assert number(run.optimizer.last_step_applied) is True


def keras_own(weights):
    """A trained optimizer of Keras's own class, with a state of its own."""
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.5), initial_scale=64.0
    )
    optimizer.build(weights)
    values = [v.numpy() for v in trained().optimizer.variables[:-1]]
    values[0] = np.zeros_like(values[0])  # Keras does not count in it
    values[2] = np.asarray(2, values[2].dtype)
    values[3] = np.asarray(32.0, "float32")
    for variable, value in zip(optimizer.variables, values, strict=True):
        variable.assign(value)
    return optimizer


def rounded(variables, others):
    """The bits of variables in the dtypes of others, which round to the nearest."""
    pairs = zip(variables, others, strict=True)
    return [np.asarray(v.numpy()).astype(o.dtype).tobytes() for v, o in pairs]


def test_state_of_keras_class_is_loaded(arguments, snapshot):
    theirs = keras_own(new_run().weights)
    policy = arguments()
    ours = trained(**policy).optimizer
    ours.load_own_variables(saved(theirs))
    inner = ours.inner_optimizer.variables
    assert snapshot(inner) == rounded(theirs.inner_optimizer.variables, inner)
    assert number(ours.skipped_steps) == 0
    assert number(ours.iterations) == 3
    if ours.dynamic:
        assert number(ours.loss_scale) == 32.0
        assert number(ours.dynamic_counter) == 2
    else:
        assert number(ours.loss_scale) == 8.0
    if "loss_scale" in policy:
        # A count that Keras's file does not hold restarts.
        assert number(ours.loss_scale_policy.overflows_left) == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "scale, restored",
    [
        (np.nan, 8.0),  # the initial one
        (np.inf, 64.0),
        (-np.inf, 2.0),
        (0.0, 2.0),
        (-3.0, 2.0),
        (1e30, 64.0),
        (64.0, 64.0),
        (5.0, 5.0),
    ],
)
@pytest.mark.parametrize("load", ["load_own_variables", "set_weights"])
def test_loaded_scale_is_clamped_to_bounds_or_reset_if_nan(scale, restored, load):
    arguments = {"min_scale": 2.0, "max_scale": 64.0}
    store = saved(trained(**arguments).optimizer)
    store["3"] = np.asarray(scale, "float32")
    other = new_run(**arguments).optimizer
    getattr(other, load)(store if load == "load_own_variables" else store.values())
    assert number(other.loss_scale) == restored
    # The rest is loaded unchanged.
    assert number(other.iterations) == 3
    assert number(other.dynamic_counter) == 2


@pytest.mark.parametrize(
    "own, inner, skipped", [(0, 3, 0), (2, 3, 0), (3, 3, 0), (9, 3, 6)]
)
def test_loaded_count_of_skipped_steps_is_never_negative(own, inner, skipped):
    store = saved(trained().optimizer)
    store["0"] = np.asarray(own, store["0"].dtype)
    store["4"] = np.asarray(inner, store["4"].dtype)
    other = new_run().optimizer
    other.load_own_variables(store)
    assert number(other.skipped_steps) == skipped


def test_dir_lists_inner_optimizer_after_saving_but_not_after_loading():
    # Keras saves what `dir` lists. Its own class saves the inner optimizer twice.
    optimizer = new_run().optimizer
    inner = optimizer.inner_optimizer
    store = saved(optimizer)
    assert "inner_optimizer" in dir(optimizer)
    optimizer.load_own_variables(store)
    assert "inner_optimizer" not in dir(optimizer)
    assert optimizer.inner_optimizer is inner
    saved(optimizer)
    assert "inner_optimizer" in dir(optimizer)
