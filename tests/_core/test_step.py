"""A step after any change is like one of a new `Step`.

A `Step` remembers by which rule it updates which variables, in which groups, and on
PyTorch which of them together, but no tensor and no number. Each test takes steps,
changes something, and takes more. A twin that has a new `Step` each time ends with the
same bits.
"""

import copy
import itertools

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso._core.step import Step
from testing.harness import BACKEND, Harness, array

ON_TORCH = pytest.mark.skipif(
    BACKEND != "torch", reason="Only PyTorch's variables change their tensors in place"
)
SGD, Adam, AdamW = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW
RMSprop = keras.optimizers.RMSprop
SHAPES = [(2, 2), (3,), (3,)]


class Fresh(Harness):
    """A harness with a new `Step` each time."""

    def apply(self, *arguments):
        optimizer = self.optimizer
        optimizer._step = Step(optimizer, optimizer._masters)
        super().apply(*arguments)


def assert_steps_like_fresh(
    change, make=lambda: SGD(0.5, momentum=0.9), before=3, dtype="float32"
):
    """Compares harnesses after steps before and after `change(harness)`."""
    ends = []
    for cls in (Fresh, Harness):
        optimizer = keras_lso.LossScaleOptimizer(make(), initial_scale=8.0)
        run = cls(optimizer, SHAPES, dtype).steps(before)
        change(run)
        ends.append(run.steps(3).bits())
    assert ends[0] == ends[1]


INNER = {
    "momentum": lambda: SGD(0.5, momentum=0.9),
    "decaying": lambda: SGD(0.5, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda: AdamW(0.5),
    "its own step": lambda: keras.optimizers.Adadelta(0.5),
    "clipped": lambda: SGD(0.5, clipnorm=1.0),
}


def missing_gradients(run):
    first, second, third = run.gradients()
    run.step([None, second, third])
    run.step([first, None, third])


def other_dtypes(run):
    run.step(dtype="float16")
    tensors = run.scaled(run.gradients())
    run.apply([*run.scaled(run.gradients()[:2], "float16"), tensors[2]])


def arrays_and_integers(run):
    tensors = run.scaled(run.gradients())
    run.apply([np.ones((2, 2), "float32"), [1, 2, 3], tensors[2]])
    run.apply([*tensors[:2], ops.ones((3,), "int32")])


def another_order(run):
    # The last two have one shape.
    w, a, b = run.weights
    for variables, order in ([w, b, a], 1), ([b, a, w], -1):
        run.apply(run.scaled(run.gradients())[::order], variables)


def fewer_variables(run):
    run.step(run.gradients()[:2])


def transposed_gradient(run):
    # The same shape, and on PyTorch another order in memory.
    first, *others = run.scaled(run.gradients())
    run.apply([ops.transpose(first), *others])


def variables_as_gradients(run):
    # They are written while they are read.
    run.apply([v.value for v in run.weights])


CHANGES_OF_ARGUMENTS = [
    missing_gradients,
    other_dtypes,
    arrays_and_integers,
    another_order,
    fewer_variables,
    transposed_gradient,
    variables_as_gradients,
]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("change", CHANGES_OF_ARGUMENTS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("make", [INNER["AdamW"], INNER["its own step"]])
def test_changed_arguments_step_like_fresh_optimizer(change, make):
    assert_steps_like_fresh(change, make)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_updates_are_kept_for_last_patterns_of_missing_gradients(monkeypatch):
    monkeypatch.setattr("keras_lso._core.step._MOST_UPDATES", 3)

    def change(run):
        for missing in 2 * list(itertools.product([False, True], [False, True])):
            first, second, third = run.gradients()
            pairs = zip(missing, (first, second), strict=True)
            run.step([*(None if is_missing else g for is_missing, g in pairs), third])
            assert len(run.optimizer._step._updates) <= 3

    assert_steps_like_fresh(change)


def sets(name, value, of="inner"):
    def change(run):
        setattr(getattr(run, of), name, value)

    return change


def stop_accumulating(run):
    run.inner.gradient_accumulation_steps = None
    run.steps(2)


CHANGES_OF_THE_OPTIMIZER = {
    "another rate": (sets("learning_rate", 0.125), INNER["momentum"]),
    "another momentum": (sets("momentum", 0.5), INNER["momentum"]),
    "nesterov": (sets("nesterov", True), INNER["momentum"]),
    "another decay": (sets("weight_decay", 0.25), INNER["decaying"]),
    "no averages": (sets("use_ema", False), lambda: SGD(0.5, use_ema=True)),
    "no momentum": (sets("momentum", 0.0), INNER["momentum"]),
    "a centered square": (sets("centered", False), lambda: RMSprop(0.5, centered=True)),
    "no decay": (sets("weight_decay", None), lambda: AdamW(0.5, weight_decay=0.1)),
    "a decay": (sets("weight_decay", 0.1), lambda: SGD(0.5, momentum=0.9)),
    "a norm to clip at": (sets("clipnorm", 0.01), INNER["momentum"]),
    "a value to clip at": (sets("clipvalue", 0.01), INNER["AdamW"]),
    "a global norm": (sets("global_clipnorm", 0.01, "optimizer"), INNER["AdamW"]),
    "no norm": (sets("clipnorm", None), INNER["clipped"]),
    # With a rule that takes norms, clipping leaves the step to Keras.
    "a norm for LARS": (sets("clipnorm", 0.01), lambda: keras_lso.LARS(0.5)),
    "a value for LARS": (sets("clipvalue", 0.01), lambda: keras_lso.LARS(0.5)),
    "no accumulation": (
        stop_accumulating,
        lambda: SGD(0.5, momentum=0.9, gradient_accumulation_steps=2),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "change, make", CHANGES_OF_THE_OPTIMIZER.values(), ids=CHANGES_OF_THE_OPTIMIZER
)
def test_changed_hyperparameters_step_like_fresh_optimizer(change, make, dtype):
    assert_steps_like_fresh(change, make, dtype=dtype)


def set_a_constraint(run):
    run.weights[0].constraint = keras.constraints.NonNeg()


def overwrite_one(run):
    run.weights[2].overwrite_with_gradient = True


def swap_values(run):
    for v in run.weights:
        v._value = backend_variable(array(v) * 2)


def backend_variable(values):
    if BACKEND == "torch":
        import torch

        return torch.nn.Parameter(torch.tensor(values))
    return ops.convert_to_tensor(values)


CHANGES_OF_VARIABLES = [set_a_constraint]
if BACKEND != "tensorflow":  # A variable keeps the same `tf.Variable`.
    CHANGES_OF_VARIABLES.append(swap_values)


@pytest.mark.parametrize("change", CHANGES_OF_VARIABLES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_changed_variables_step_like_fresh_optimizer(change, dtype):
    assert_steps_like_fresh(change, dtype=dtype)


@pytest.mark.parametrize("change", CHANGES_OF_VARIABLES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.exhaustive
def test_variables_changed_between_micro_batches_step_like_fresh_optimizer(
    change, averages
):
    """Two micro-batches before its end; the averages move with each of them.

    In the second accumulation: until the first update the averages are the weights.
    """

    def make():
        return AdamW(0.5, gradient_accumulation_steps=5, use_ema=averages)

    assert_steps_like_fresh(change, make, before=8)


def test_variable_marked_as_overwritten_steps_like_fresh_optimizer():
    assert_steps_like_fresh(overwrite_one)


def another_dtype(tensor):
    return tensor.double()


def transposed(tensor):
    # The same memory, read in another order.
    return tensor.t() if tensor.dim() == 2 else tensor


@ON_TORCH
@pytest.mark.parametrize("move", [another_dtype, transposed])
@pytest.mark.parametrize("make", [INNER["decaying"], INNER["AdamW"]])
def test_moved_tensor_data_steps_like_fresh_optimizer(move, make):
    """As `module.to(...)` does: the parameters stay, in other memory."""

    def change(run):
        for v in run.weights:
            v.value.data = move(v.value.data)

    assert_steps_like_fresh(change, make)


def test_deepcopy_steps_its_own_variables():
    def change(run):
        run.optimizer, run.weights = copy.deepcopy((run.optimizer, run.weights))
        run.inner = run.optimizer.inner_optimizer
        before = run.values()
        run.steps(1)
        for value, old in zip(run.values(), before, strict=True):
            assert not np.array_equal(value, old)

    if BACKEND == "tensorflow":
        pytest.skip("TensorFlow does not copy the optimizer: its lock is no object")
    assert_steps_like_fresh(change)
