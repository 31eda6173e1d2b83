"""A custom loop under a `tf.distribute` strategy, for workers and their reference."""

import functools

import keras
import numpy as np
import tensorflow as tf

import keras_lso
from integration_tests.distributed import problem
from testing import tiers

# By name: the optimizer of `problem.OPTIMIZERS`, and the options of the loop.
CASES = {
    **{name: (name, {}) for name in problem.OPTIMIZERS},
    problem.SPIKES: (problem.SPIKES, {}),
    "reduced": ("momentum", {"says": {"skip_gradients_aggregation": True}}),
    "reduced, older": ("Adam", {"says": {"experimental_aggregate_gradients": False}}),
    "float16": ("momentum", {"dtype": "float16"}),
    "remainder": ("Adam", {"dtype": "bfloat16", "masters": "remainder"}),
    "stochastic": ("Adam", {"dtype": "bfloat16", "masters": "stochastic"}),
    "slots": ("Adam", {"slots": "bfloat16"}),
    "int8": ("Adam", {"slots": "int8"}),
    "24 bits": (
        "Adam",
        {"dtype": "bfloat16", "masters": "remainder8", "slots": "int8"},
    ),
}
PATTERNS_OF = {
    **dict.fromkeys(CASES, ("random",)),
    "momentum": problem.PATTERNS,
    "LARC": ("random", "first"),
    "reduced": ("random", "first"),
    problem.SPIKES: (problem.SPIKES,),
}
if not tiers.is_full():
    # LARC has LARS's norms; "reduced" is "reduced, older" by another word.
    PATTERNS_OF |= {"momentum": ("random", "last"), "LARS": (), "reduced, older": ()}
CASES = {name: case for name, case in CASES.items() if PATTERNS_OF[name]}
# TensorFlow broadcasts no bfloat16 between processes.
OF_ONE_PROCESS = ("remainder", "stochastic", "slots", "int8", "24 bits")


def initial_weights(slots):
    """Returns those of `problem`, with one that is large enough for slots in 8 bits."""
    large = np.random.default_rng(0).normal(scale=0.5, size=(64, 64))
    return problem.initial_weights() + [large.astype("float32")] * (slots == "int8")


class Loop:
    """Trains the network of `problem`, each replica on a batch of its own."""

    def __init__(self, case, strategy=None):
        self.strategy = strategy or tf.distribute.get_strategy()
        name, unusual = CASES[case]
        self.says = unusual.get("says", {}) if strategy else {}
        dtype = unusual.get("dtype", "float32")
        # TensorFlow has no mean of integers, as remainders are.
        aggregation = "mean" if dtype != "bfloat16" else "none"
        with self.strategy.scope():
            self.weights = [
                keras.Variable(w, dtype=dtype, aggregation=aggregation)
                for w in initial_weights(unusual.get("slots"))
            ]
            kinds = unusual.get("masters", "auto"), unusual.get("slots")
            self.optimizer = _make_optimizer(name, dtype, *kinds)
            self.optimizer.build(self.weights)
        self.variables = [*self.weights, *self.optimizer.variables]
        self.initial = [v.numpy() for v in self.variables]
        self.step = tf.function(self._step, autograph=False)

    def _step(self, batches):
        return self.strategy.run(self._step_on_replica, args=(batches,))

    def _step_on_replica(self, batches):
        context = tf.distribute.get_replica_context()
        x, y, sample_weights = (b[context.replica_id_in_sync_group] for b in batches)
        with tf.GradientTape() as tape:
            weights = [tf.cast(w, "float32") for w in self.weights]
            predicted = problem.predict(weights[:4], x)
            for large in weights[4:]:
                predicted += tf.reduce_mean(large**2)
            loss = problem.loss_of(y, predicted, sample_weights)
            # The gradients of the replicas are added up.
            loss = self.optimizer.scale_loss(loss / context.num_replicas_in_sync)
        grads = tape.gradient(loss, [w.value for w in self.weights])
        if self.says:
            grads = context.all_reduce(tf.distribute.ReduceOp.SUM, grads)
        pairs = zip(grads, self.weights, strict=True)
        self.optimizer.apply_gradients(pairs, scaled=True, **self.says)
        # The replica's own copies.
        return [tf.convert_to_tensor(v) for v in self.variables]

    def restart(self):
        for variable, value in zip(self.variables, self.initial, strict=True):
            variable.assign(value)

    def count_collectives(self, batches):
        """Returns how often a replica exchanges something in a step."""
        graph = self.step.get_concrete_function(batches).graph.as_graph_def()
        nodes = [
            *graph.node,
            *(n for function in graph.library.function for n in function.node_def),
        ]
        replicas = len(self.strategy.extended.worker_devices)
        return sum(n.op.startswith("Collective") for n in nodes) / replicas

    def record(self, make_batches, steps=range(problem.STEPS)):
        """Returns for each replica of this process its states after every step."""
        recorded = []
        for step in steps:
            states = self.step([tf.constant(b) for b in make_batches(step)])
            local = [self.strategy.experimental_local_results(v) for v in states]
            # A file has no bfloat16.
            arrays = [[np.array(v, _of_file(v)) for v in values] for values in local]
            recorded.append([list(r) for r in zip(*arrays, strict=True)])
        return [list(of_replica) for of_replica in zip(*recorded, strict=True)]


def _of_file(value):
    return "float32" if value.dtype == "bfloat16" else value.dtype.as_numpy_dtype


def _make_optimizer(name, dtype, masters, slots):
    if dtype != "float16":
        return problem.make_optimizer(name, master_weights=masters, slot_dtype=slots)
    # What stays below 65504 in one sum does so in two halves of it.
    return keras_lso.LossScaleOptimizer(
        problem.OPTIMIZERS[name](),
        loss_scale=keras_lso.loss_scales.DynamicLossScale(
            2.0**10, increment_period=3, max_scale=2.0**10
        ),
    )


def batches_of(pattern, participants, step):
    """Returns x, y and weights, stacked: the first axis is the participant."""
    batches = [
        problem.batch_of(pattern, step, p, participants) for p in range(participants)
    ]
    return [np.stack(parts) for parts in zip(*batches, strict=True)]


def whole_batch(pattern, participants, step):
    """Returns the same as one batch of one participant."""
    return [
        part[np.newaxis] for part in problem.whole_batch(pattern, step, participants)
    ]


def reference(case, participants):
    """Yields for each pattern what training without replicas records."""
    loop = Loop(case)
    for pattern in PATTERNS_OF[case]:
        loop.restart()
        batches = functools.partial(whole_batch, pattern, participants)
        [states] = loop.record(batches)
        yield pattern, [np.stack(column) for column in zip(*states, strict=True)]
