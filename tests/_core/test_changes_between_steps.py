"""Whatever changes between two steps, the next step is that of a fresh `Step`.

A `Step` remembers by which rule which variables are updated, in which groups, and on
PyTorch which of them together: no tensor, and no number. Each test takes steps, changes
something, and takes more. A twin with a new `Step` each time ends with the same bits.
"""

import copy
import itertools

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso._core.step import Step

BACKEND = keras.backend.backend()
ON_TORCH = pytest.mark.skipif(
    BACKEND != "torch", reason="Only PyTorch's variables change their tensors in place"
)
SGD, Adam, AdamW = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW
RMSprop = keras.optimizers.RMSprop
SHAPES = [(2, 2), (3,), (3,)]
SCALE = 8.0


class Twin:
    """An optimizer, its variables, and whether it has a new `Step` each time."""

    def __init__(self, make, is_fresh=False, dtype="float32", **arguments):
        random = np.random.default_rng(0)
        self.is_fresh = is_fresh
        self.random = np.random.default_rng(1)
        self.variables = [
            keras.Variable(random.normal(size=s), dtype=dtype, name=f"v{i}")
            for i, s in enumerate(SHAPES)
        ]
        self.optimizer = keras_lso.LossScaleOptimizer(
            make(), initial_scale=SCALE, **arguments
        )
        self.inner = self.optimizer.inner_optimizer

    def gradients(self, dtype="float32"):
        values = [self.random.normal(size=s) * SCALE for s in SHAPES]
        return [ops.convert_to_tensor(v.astype(dtype)) for v in values]

    def apply(self, grads, variables=None):
        optimizer = self.optimizer
        if self.is_fresh and optimizer.built:
            optimizer._step = Step(optimizer, optimizer._masters)
        optimizer.apply(grads, self.variables if variables is None else variables)

    def steps(self, count=3):
        for _ in range(count):
            self.apply(self.gradients())

    def state(self):
        both = [*self.variables, *self.optimizer.variables]
        return [(v.path, np.array(ops.convert_to_numpy(v)).tobytes()) for v in both]


def assert_steps_like_fresh(
    change, make=lambda: SGD(0.5, momentum=0.9), before=3, **arguments
):
    """Compares the twins, after steps before and after a change.

    `change` is called with the twin, and may return the twin to go on with.
    """
    ends = []
    for is_fresh in (True, False):
        twin = Twin(make, is_fresh, **arguments)
        twin.steps(before)
        twin = change(twin) or twin
        twin.steps()
        ends.append([part[1] for part in twin.state()])
    assert ends[0] == ends[1]


INNER = {
    "momentum": lambda: SGD(0.5, momentum=0.9),
    "decaying": lambda: SGD(0.5, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda: AdamW(0.5),
    "its own step": lambda: keras.optimizers.Adadelta(0.5),
    "clipped": lambda: SGD(0.5, clipnorm=1.0),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numeric_hyperparameters_are_read_at_each_step(dtype):
    def change(twin):
        twin.inner.learning_rate = 0.125
        twin.inner.momentum = 0.5
        twin.inner.nesterov = True
        twin.steps(2)
        twin.inner.weight_decay = 0.25

    assert_steps_like_fresh(
        change, lambda: SGD(0.5, momentum=0.9, weight_decay=0.5), dtype=dtype
    )


def one_is_missing(twin):
    grads = twin.gradients()
    twin.apply([None, *grads[1:]])
    twin.apply([grads[0], None, grads[2]])


def other_dtypes(twin):
    twin.apply(twin.gradients("float16"))
    twin.apply([*twin.gradients("float16")[:2], twin.gradients()[2]])


def arrays_and_integers(twin):
    grads = twin.gradients()
    twin.apply([np.ones((2, 2), "float32"), [1, 2, 3], grads[2]])
    twin.apply([*grads[:2], ops.ones((3,), "int32")])


def another_order(twin):
    # The last two have one shape.
    w, a, b = twin.variables
    twin.apply(twin.gradients(), [w, b, a])
    twin.apply(twin.gradients()[::-1], [b, a, w])


def fewer_variables(twin):
    twin.apply(twin.gradients()[:2], twin.variables[:2])


def one_is_transposed(twin):
    # The same shape, and on PyTorch another order in memory.
    grads = twin.gradients()
    twin.apply([ops.transpose(grads[0]), *grads[1:]])


def the_variables_themselves(twin):
    # They are written while they are read.
    twin.apply([v.value for v in twin.variables])


CHANGES_OF_ARGUMENTS = [
    one_is_missing,
    other_dtypes,
    arrays_and_integers,
    another_order,
    fewer_variables,
    one_is_transposed,
    the_variables_themselves,
]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("change", CHANGES_OF_ARGUMENTS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("make", [INNER["AdamW"], INNER["its own step"]])
def test_changed_arguments_step_like_fresh_optimizer(change, make):
    assert_steps_like_fresh(change, make)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_more_patterns_of_missing_gradients_than_are_kept(monkeypatch):
    monkeypatch.setattr("keras_lso._core.step._MOST_UPDATES", 3)

    def change(twin):
        for missing in 2 * list(itertools.product([False, True], [False, True])):
            first, second, third = twin.gradients()
            pairs = zip(missing, (first, second), strict=True)
            grads = [None if is_missing else g for is_missing, g in pairs]
            twin.apply([*grads, third])
            assert len(twin.optimizer._step._updates) <= 3

    assert_steps_like_fresh(change)


def sets(name, value, of="inner"):
    def change(twin):
        setattr(getattr(twin, of), name, value)

    return change


def averages(twin):
    twin.inner.gradient_accumulation_steps = None
    twin.steps(2)


CHANGES_OF_THE_OPTIMIZER = {
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
        averages,
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


def test_toggled_use_ema_steps_like_fresh_optimizer():
    def change(twin):
        twin.inner.use_ema = not twin.inner.use_ema
        twin.steps(2)

    assert_steps_like_fresh(change, lambda: SGD(0.5, momentum=0.9, use_ema=True))


def set_a_constraint(twin):
    twin.variables[0].constraint = keras.constraints.NonNeg()


def overwrite_one(twin):
    twin.variables[2].overwrite_with_gradient = True


def swap_the_values(twin):
    for v in twin.variables:
        v._value = backend_variable(ops.convert_to_numpy(v) * 2)


def backend_variable(values):
    if BACKEND == "torch":
        import torch

        return torch.nn.Parameter(torch.tensor(values))
    return ops.convert_to_tensor(values)


CHANGES_OF_VARIABLES = [set_a_constraint]
if BACKEND != "tensorflow":  # Its variables hold one `tf.Variable` for ever.
    CHANGES_OF_VARIABLES.append(swap_the_values)


@pytest.mark.parametrize("change", CHANGES_OF_VARIABLES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_changed_variables_step_like_fresh_optimizer(change, dtype):
    assert_steps_like_fresh(change, dtype=dtype)


@pytest.mark.parametrize("change", CHANGES_OF_VARIABLES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.exhaustive
def test_variables_changed_within_window_step_like_fresh_optimizer(change, averages):
    """Two micro-batches before its end; the averages move with each of them.

    In the second window: until the first update the averages are the weights.
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
    """As `module.to(...)` does: the parameters stay, and their memory is another's."""

    def change(twin):
        for v in twin.variables:
            v.value.data = move(v.value.data)

    assert_steps_like_fresh(change, make)


def test_deepcopy_steps_its_own_variables():
    def change(twin):
        twin.optimizer, twin.variables = copy.deepcopy((twin.optimizer, twin.variables))
        twin.inner = twin.optimizer.inner_optimizer
        before = [ops.convert_to_numpy(v).copy() for v in twin.variables]
        twin.steps(1)
        for v, old in zip(twin.variables, before, strict=True):
            assert not np.array_equal(ops.convert_to_numpy(v), old)

    if BACKEND == "tensorflow":
        pytest.skip("TensorFlow does not copy the optimizer: its lock is no object")
    assert_steps_like_fresh(change)
