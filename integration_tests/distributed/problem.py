"""The training that all engines share, and the comparison of its results.

A participant is a replica, a process or a device that has its own batch. Each engine
trains the same small network on the same batches with the same optimizers. One element
of `weights`, inf in place of 1, makes a participant's gradients overflow.

A worker records the state after every step by `state_of` and writes it by `save`; a
test reads the files by `load` and compares them.
"""

import keras
import numpy as np
from keras import ops

import keras_lso
from testing import tiers

STEPS = 200 if tiers.is_full() else 40
BATCH_SIZE = 4  # of one participant
INPUTS, HIDDEN, OUTPUTS = 3, 4, 2

# Which participants overflow, at a quarter of the steps. "random" is another one each
# time; "always" is a random one at every step, so that no step is applied.
PATTERNS = ("none", "all", "first", "last", "random", "always")
# At the steps of "random" a participant has gradients that are finite, and far too
# large, so that the optimizer "spikes" skips the step.
SPIKES = "spikes"

# At rates that do not make a rounding grow from step to step.
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.5),
    "LARS": lambda: keras_lso.LARS(0.1, eeta=0.05, weight_decay_rate=0.01),
    "LARC": lambda: keras_lso.LARC(keras.optimizers.SGD(0.05, momentum=0.9), eta=0.005),
}


def make_optimizer(name, **options):
    """Returns an optimizer whose scale moves often within 40 steps."""
    inner = OPTIMIZERS["Adam" if name == SPIKES else name]()
    if name == SPIKES:
        options["spike_guard"] = keras_lso.SpikeGuard(20.0, 8, 4, max_norm=50.0)
    return keras_lso.LossScaleOptimizer(
        inner, initial_scale=2.0**10, dynamic_growth_steps=3, **options
    )


def patterns_of(name):
    """Returns the patterns that an optimizer is trained on."""
    return (SPIKES,) if name == SPIKES else PATTERNS


def initial_weights():
    """Returns the arrays of two dense layers, kernel and bias of each."""
    random = np.random.default_rng(0)
    shapes = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, OUTPUTS), (OUTPUTS,)]
    return [random.normal(scale=0.5, size=s).astype("float32") for s in shapes]


def overflowing(pattern, step, participants):
    """Returns the set of the participants that overflow at this step."""
    random = np.random.default_rng([step, 1])
    is_due, chosen = random.random() < 0.25, int(random.integers(participants))
    if pattern == "always":
        return {chosen}
    if not is_due or pattern == "none":
        return set()
    everyone = set(range(participants))
    return {"all": everyone, "first": {0}, "last": {participants - 1}}.get(
        pattern, {chosen}
    )


def batch_of(pattern, step, participant, participants):
    """Returns the batch of one participant at this step: x, y, weights."""
    random = np.random.default_rng([step, participant, 2])
    x = random.normal(size=(BATCH_SIZE, INPUTS)).astype("float32")
    y = np.stack([x.sum(axis=1), np.sin(x[:, 0])], axis=1).astype("float32")
    weights = np.ones((BATCH_SIZE, 1), "float32")
    if participant in overflowing(pattern, step, participants):
        weights[step % BATCH_SIZE] = 1e6 if pattern == SPIKES else np.inf
    return x, y, weights


def whole_batch(pattern, step, participants):
    """Returns the batches of all participants, one after the other."""
    batches = [batch_of(pattern, step, p, participants) for p in range(participants)]
    return tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))


def predict(weights, x):
    """The network: `weights` are tensors or variables."""
    kernel_1, bias_1, kernel_2, bias_2 = map(ops.convert_to_tensor, weights)
    return ops.matmul(ops.tanh(ops.matmul(x, kernel_1) + bias_1), kernel_2) + bias_2


def loss_of(y, predicted, weights):
    """The loss of a batch: the mean over its elements."""
    return ops.mean(weights * ops.square(y - predicted))


def state_of(variables, optimizer):
    """Returns copies of the weights and of the optimizer's variables, as arrays."""
    return [
        np.array(ops.convert_to_numpy(v)) for v in [*variables, *optimizer.variables]
    ]


def save(path, states):
    """Writes lists of arrays, one for each step."""
    columns = [np.stack(column) for column in zip(*states, strict=True)]
    np.savez(path, *columns)


def load(path):
    """Returns a list of arrays whose first axis is the step."""
    with np.load(path) as file:
        return [file[f"arr_{i}"] for i in range(len(file.files))]


def assert_bitwise_equal(columns, expected):
    """Compares the records of two participants."""
    assert len(columns) == len(expected)
    for i, (column, other) in enumerate(zip(columns, expected, strict=True)):
        assert column.dtype == other.dtype, i
        assert column.shape == other.shape, i
        differing = [
            step
            for step, (a, b) in enumerate(zip(column, other, strict=True))
            if a.tobytes() != b.tobytes()
        ]
        assert not differing, f"array {i} differs first after step {differing[0]}"


def joined(first, last, reference):
    """Returns the whole of the halves that two processes hold, and their number.

    Arrays that both hold as a whole must be the same, bit for bit.
    """
    columns, halves = [], 0
    for a, b, whole in zip(first, last, reference, strict=True):
        if a.shape == whole.shape:
            assert_bitwise_equal([a], [b])
            columns.append(a)
            continue
        halves += 1
        axis = int(np.argmax(np.not_equal(a.shape, whole.shape)))
        columns.append(np.concatenate([a, b], axis))
    return columns, halves


def assert_skipped(columns, skipped):
    """Asserts that exactly these steps leave the arrays as they are."""
    steps = list(zip(*columns, strict=True))
    for i, is_skipped in enumerate(skipped):
        pairs = zip(steps[i], steps[i + 1], strict=True)
        assert all(a.tobytes() == b.tobytes() for a, b in pairs) == is_skipped, i


def assert_near(columns, reference, rtol=1e-4, atol=2e-5):
    """Compares records; the default allows 200 steps' roundings of numbers below 4."""
    assert len(columns) == len(reference)
    for i, (column, expected) in enumerate(zip(columns, reference, strict=True)):
        if np.issubdtype(column.dtype, np.integer):
            np.testing.assert_array_equal(column, expected, err_msg=str(i))
            continue
        np.testing.assert_allclose(
            column, expected, rtol=rtol, atol=atol, err_msg=f"array {i}"
        )


def assert_right(columns, pattern, participants, reference):
    """Compares one participant's record with the pattern, and with a reference."""
    weights = columns[: len(initial_weights())]
    assert all(np.isfinite(w).all() for w in weights)
    count, starts = len(weights[0]), initial_weights()
    weights = [[start, *w] for start, w in zip(starts, weights, strict=True)]
    skipped = [bool(overflowing(pattern, i, participants)) for i in range(count)]
    assert_skipped(weights, skipped)
    assert_near(columns, reference)
