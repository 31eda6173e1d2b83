"""A captured step does what the step does, and is replayed only where it would.

Shown without a GPU, by a stand-in for CUDA graphs: `testing/cuda_graphs.py`.
"""

import contextlib
import copy
import functools
import gc
import pickle
import warnings
import weakref
from unittest import mock

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import loss_scales, schedules

if keras.backend.backend() != "torch":
    pytest.skip("Only PyTorch's steps are captured", allow_module_level=True)

torch = pytest.importorskip("torch")

from keras_lso._backend.torch import captured  # noqa: E402
from keras_lso._keras_internals import rules  # noqa: E402
from testing.cuda_graphs import capturing_steps  # noqa: E402

SGD, Adam, AdamW = (keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW)
cosine = keras.optimizers.schedules.CosineDecay
SCALE = 2.0**10
SHAPES = [(100, 30), (30,), (7, 5), (1,), (3, 3, 4, 8), (64, 64)]
FLOAT16, BFLOAT16 = {"dtype": "float16"}, {"dtype": "bfloat16"}
# The inner optimizer, and arguments of `make`.
RECIPES = {
    "SGD": (lambda: SGD(0.1), {}),
    "momentum": (lambda: SGD(0.1, momentum=0.9), {}),
    "nesterov": (lambda: SGD(0.1, momentum=0.9, nesterov=True), {}),
    "Adam": (lambda: Adam(0.1), {}),
    "AdamW": (lambda: AdamW(0.1, weight_decay=0.1), {}),
    "clipped": (lambda: AdamW(0.1, global_clipnorm=1.0), {}),
    "schedule": (lambda: Adam(cosine(1e-3, 1000, warmup_target=0.1)), {}),
    "Lion": (lambda: keras.optimizers.Lion(0.1), {}),
    "Nadam": (lambda: keras.optimizers.Nadam(0.1), {}),
    "LARS": (lambda: keras_lso.LARS(0.1, weight_decay_rate=0.1), {}),
    "LAMB": (lambda: keras_lso.LAMB(0.1, weight_decay_rate=0.1), {}),
    "NovoGrad": (lambda: keras_lso.NovoGrad(0.1), {}),
    "of 3": (lambda: Adam(0.1, gradient_accumulation_steps=3), {}),
    "averaged": (lambda: Adam(0.1, use_ema=True, ema_overwrite_frequency=4), {}),
    "averaged, float16": (
        lambda: SGD(0.1, use_ema=True, ema_overwrite_frequency=4),
        FLOAT16,
    ),
    "float16": (lambda: Adam(0.1), FLOAT16),
    "LARS, float16": (lambda: keras_lso.LARS(0.1, weight_decay_rate=0.1), FLOAT16),
    "remainder": (lambda: Adam(0.1), {**BFLOAT16, "master_weights": "remainder"}),
    "remainder8": (lambda: Adam(0.1), {**BFLOAT16, "master_weights": "remainder8"}),
    "stochastic": (lambda: Adam(0.1), {**BFLOAT16, "master_weights": "stochastic"}),
    "slots": (lambda: Adam(0.1), {"slot_dtype": "bfloat16"}),
    "int8": (lambda: Adam(0.1), {"slot_dtype": "int8"}),
    "24 bits": (
        lambda: Adam(0.1),
        {**BFLOAT16, "master_weights": "remainder8", "slot_dtype": "int8"},
    ),
    "LogMax": (lambda: Adam(0.1), {"loss_scale": loss_scales.LogMaxLossScale}),
    "hysteresis": (
        lambda: Adam(0.1),
        {"loss_scale": lambda: loss_scales.DynamicLossScale(SCALE, hysteresis=2)},
    ),
    "guard": (
        lambda: SGD(0.1),
        {"spike_guard": lambda: keras_lso.SpikeGuard(window=4, warmup=2)},
    ),
}


def make(inner, dtype="float32", records=False, **options):
    random = np.random.default_rng(0)
    variables = [keras.Variable(random.normal(size=s), dtype=dtype) for s in SHAPES]
    if "loss_scale" not in options:
        options["initial_scale"] = SCALE
    options = {name: v() if callable(v) else v for name, v in options.items()}
    optimizer = keras_lso.LossScaleOptimizer(inner(), **options)
    optimizer.build(variables)
    if records:
        optimizer.record_steps()
        optimizer.record_overflows()
    return optimizer, variables


def gradients(step, dtype="float32"):
    random = np.random.default_rng(step)
    values = [torch.tensor(random.normal(size=s) * SCALE) for s in SHAPES]
    return [v.to(getattr(torch, dtype)) for v in values]


def bits(optimizer, variables):
    tensors = [v.value.detach() for v in (*variables, *optimizer.variables)]
    return [t.reshape(-1).view(torch.uint8).tolist() for t in tensors]


def apply(optimizer, grads, variables, **options):
    with torch.no_grad():
        optimizer.apply(grads, variables, **{"scaled": True, **options})


def run(recipe, before=None, *, is_on, count=12, given=None):
    """Returns the bits after each step, and the captures of the steps.

    `before` takes the optimizer, its variables, the number of the step from 0, and the
    gradients. It may change them, and return arguments of `apply`. `given` are tensors
    to pass the gradients in.
    """
    inner, options = recipe
    after = []
    with capturing_steps(is_on=is_on) as captures:
        optimizer, variables = make(inner, **options)
        for step in range(count):
            grads = gradients(step, options.get("dtype", "float32"))
            if given is not None:
                torch._foreach_copy_(given, grads)
                grads = given
            how = before(optimizer, variables, step, grads) if before else None
            apply(optimizer, grads, variables, **(how or {}))
            after.append(bits(optimizer, variables))
    return after, captures


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_replays_equal_eager_steps_bit_for_bit(recipe, in_place):
    inner, options = recipe
    recipe = inner, {**options, "records": True}

    def before(optimizer, variables, step, grads):
        if step in (4, 5, 9):
            grads[2].mul_(np.inf)
        rate = optimizer.inner_optimizer._learning_rate
        if step == 6 and isinstance(rate, keras.Variable):
            optimizer.learning_rate = 0.05
        if step == 8:
            variables[1].assign(np.full(SHAPES[1], 0.5))

    dtype = options.get("dtype", "float32")
    given = gradients(0, dtype) if in_place else None
    expected, _ = run(recipe, before, is_on=False)
    actual, captures = run(recipe, before, is_on=True, given=given)
    assert actual == expected
    [graph] = captures.graphs
    assert graph.reads(given or []) == in_place
    # Once others have written a weight with a float32 master, a step compares them.
    assert graph.replays == 9 - (dtype == "float16")


# --- What a graph depends on ----------------------------------------------------------


class UserOptimizer(SGD):
    """An optimizer that may read anything from Python."""


class UserLossScale(loss_scales.DynamicLossScale):
    """A policy that may read anything from Python."""


class UserSchedule(cosine):
    """A schedule that may read anything from Python."""


def piecewise(kind=list):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay
    return SGD(schedule([100, 200], kind([0.1, 0.2, 0.3])))


def warmup(schedule=cosine):
    return SGD(schedules.LinearWarmup(schedule(0.1, 1000), 2))


def rate_of(optimizer):
    return optimizer.inner_optimizer._learning_rate


def replace_weight(optimizer, variables):
    tensor = variables[0].value
    tensor.data = tensor.data.clone()


def transpose_weight(optimizer, variables):
    tensor = variables[0].value
    tensor.data = tensor.data.T.contiguous().T


def restart_slots(optimizer, variables):
    for slot in optimizer.inner_optimizer._momentums:
        slot.value.data = slot.value.data * 0.5


def excluding():
    optimizer = AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["none of these"])
    optimizer._exclude_from_weight_decay = set()
    return optimizer


def exclude_first(optimizer, variables):
    inner = optimizer.inner_optimizer
    inner._exclude_from_weight_decay.add(inner._var_key(variables[0]))
    inner._exclude_from_weight_decay_cache.clear()


def stop_record(optimizer, variables):
    optimizer._counters.stop_recording_overflows()


# What is done before the sixth step, and the inner optimizer and arguments of `make`.
CHANGES = {
    "number": (lambda o, _: setattr(o, "momentum", 0.8), *RECIPES["momentum"]),
    "limit": (lambda o, _: setattr(o, "global_clipnorm", 0.5), *RECIPES["clipped"]),
    "another limit": (lambda o, _: setattr(o, "clipvalue", 1.0), *RECIPES["SGD"]),
    "schedule": (
        lambda o, _: setattr(o, "learning_rate", cosine(0.2, 1000)),
        *RECIPES["schedule"],
    ),
    "number of a schedule": (
        lambda o, _: setattr(rate_of(o), "alpha", 0.5),
        *RECIPES["schedule"],
    ),
    "number of a nested schedule": (
        lambda o, _: setattr(rate_of(o).schedule_or_rate, "alpha", 0.5),
        warmup,
        {},
    ),
    "list of a schedule": (
        lambda o, _: rate_of(o).values.__setitem__(0, 0.2),
        piecewise,
        {},
    ),
    "list of NumPy's numbers": (
        lambda o, _: rate_of(o).values.__setitem__(0, np.float32(0.2)),
        lambda: piecewise(lambda rates: list(np.float32(rates))),
        {},
    ),
    "array of a schedule": (
        lambda o, _: rate_of(o).values.__setitem__(0, 0.2),
        lambda: piecewise(np.array),
        {},
    ),
    "user's attribute": (
        lambda o, _: setattr(o, "notes", ["a", {"b": 1}]),
        *RECIPES["SGD"],
    ),
    "number of the policy": (
        lambda o, _: setattr(o.loss_scale_policy, "increment_period", 3),
        *RECIPES["SGD"],
    ),
    "number of the guard": (
        lambda o, _: setattr(o.spike_guard, "threshold", 1e-3),
        *RECIPES["guard"],
    ),
    "record": (lambda o, _: o.record_steps(), *RECIPES["SGD"]),
    "record of overflows": (lambda o, _: o.record_overflows(), *RECIPES["SGD"]),
    "end of a record": (stop_record, lambda: SGD(0.1), {"records": True}),
    "exclusion": (exclude_first, excluding, {}),
    "memory of a weight": (replace_weight, *RECIPES["momentum"]),
    "layout of a weight": (transpose_weight, *RECIPES["momentum"]),
    "memory of slots": (restart_slots, *RECIPES["Adam"]),
}


@pytest.mark.filterwarnings("ignore:A pattern matches no variable")
@pytest.mark.parametrize("change, inner, options", CHANGES.values(), ids=CHANGES)
def test_change_is_seen_by_the_next_step(change, inner, options):
    def before(optimizer, variables, step, grads):
        if step == 5:
            change(optimizer, variables)

    recipe = inner, options
    expected, _ = run(recipe, before, is_on=False)
    actual, captures = run(recipe, before, is_on=True)
    assert actual == expected
    assert captures.replays >= 2


@pytest.mark.parametrize(
    "change, undo",
    [
        (lambda: torch.set_default_dtype(torch.float64), torch.set_default_dtype),
        (lambda: keras.config.set_floatx("float64"), keras.config.set_floatx),
    ],
    ids=["PyTorch", "Keras"],
)
def test_another_default_dtype_is_seen(change, undo):
    def before(optimizer, variables, step, grads):
        if step == 5:
            change()

    results = []
    default = "float32" if undo is keras.config.set_floatx else torch.float32
    for is_on in (False, True):
        try:
            results.append(run(RECIPES["schedule"], before, is_on=is_on))
        finally:
            undo(default)
    (expected, _), (actual, captures) = results
    assert actual == expected
    assert len(captures.graphs) == 2


def test_mode_of_larc_around_the_optimizer_is_seen():
    def train(is_on):
        with capturing_steps(is_on=is_on) as captures:
            inner, variables = make(lambda: SGD(0.1, gradient_accumulation_steps=2))
            larc = keras_lso.LARC(inner, mode="scale")
            larc.build(variables)
            for step in range(9):
                if step == 8:
                    # The rate of an early micro-batch counts in this mode alone.
                    larc.mode, larc.learning_rate = "clip", np.nan
                apply(larc, gradients(step), variables)
        return bits(inner, variables), captures

    (expected, _), (actual, captures) = train(False), train(True)
    assert actual == expected
    assert captures.replays == 5


def test_arguments_of_apply_are_seen():
    def before(optimizer, variables, step, grads):
        return {"scaled": step % 2 == 0, "update_scale": step % 3 == 0}

    expected, _ = run(RECIPES["momentum"], before, is_on=False, count=36)
    actual, captures = run(RECIPES["momentum"], before, is_on=True, count=36)
    assert actual == expected
    # Each of four combinations is captured, and the most that are kept.
    assert len(captures.graphs) == captured._MOST_GRAPHS == 4
    assert captures.replays == 36 - 4 * 3


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("missing", [0, 3])
def test_gradients_that_come_and_go_are_seen(missing):
    def before(optimizer, variables, step, grads):
        if step % 2:
            grads[missing] = None

    expected, _ = run(RECIPES["Adam"], before, is_on=False)
    actual, captures = run(RECIPES["Adam"], before, is_on=True)
    assert actual == expected
    assert captures.replays == 12 - 2 * 3


def forms_of_one_memory(form):
    """Two gradients of one shape in the same memory."""
    memory = torch.linspace(0.1, 1.0, 1800)
    square = torch.view_as_complex(memory.view(30, 30, 2))
    # The negative bit: the memory has the negatives of the numbers.
    return {
        "layout": (square.real, square.real.T),
        "negative bit": (square.imag, square.conj().imag),
        "dtype": (memory[:1], memory.view(torch.bfloat16)[:1]),
    }[form]


@pytest.mark.parametrize("form", ["layout", "negative bit", "dtype"])
def test_other_form_of_the_same_memory_is_seen(form):
    def train(is_on):
        first, second = forms_of_one_memory(form)
        with capturing_steps(is_on=is_on) as captures:
            variable = keras.Variable(np.ones(first.shape), dtype="float32")
            optimizer = keras_lso.GuardedOptimizer(SGD(0.1, momentum=0.9))
            optimizer.build([variable])
            for step in range(16):
                # The first form is captured in place.
                grad = second if step > 5 and step % 2 else first
                apply(optimizer, [grad], [variable])
        return variable.numpy().tobytes(), captures

    (expected, _), (actual, captures) = train(False), train(True)
    assert actual == expected
    assert captures.replays


@pytest.mark.parametrize("what", ["weight", "slot"])
def test_other_layout_in_the_same_memory_is_seen(what):
    def train(is_on):
        with capturing_steps(is_on=is_on) as captures:
            variable = keras.Variable(np.ones((30, 30)), dtype="float32")
            optimizer = keras_lso.GuardedOptimizer(SGD(0.1, momentum=0.9))
            optimizer.build([variable])
            slot = optimizer.inner_optimizer.momentums[0]
            for step in range(8):
                if step == 6:
                    tensor = variable.value if what == "weight" else slot.value
                    tensor.data = tensor.data.T
                grad = torch.randn(
                    30, 30, generator=torch.Generator().manual_seed(step)
                )
                apply(optimizer, [grad], [variable])
        return [v.numpy().tobytes() for v in (variable, slot)], captures

    (expected, _), (actual, captures) = train(False), train(True)
    assert actual == expected
    assert captures.replays == 3


def test_replay_raises_versions_as_autograd_relies_on():
    with capturing_steps() as captures:
        optimizer, variables = make(lambda: SGD(0.1))
        for step in range(4):
            apply(optimizer, gradients(step), variables)
        weight = variables[0].value
        loss = (weight * weight).sum()
        apply(optimizer, gradients(4), variables)
        assert captures.replays == 2
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_masters_of_another_optimizer_see_a_replay():
    def train(is_on):
        with capturing_steps(is_on=is_on) as captures:
            first, variables = make(lambda: SGD(0.1), dtype="float16")
            second = keras_lso.LossScaleOptimizer(SGD(0.1), initial_scale=SCALE)
            second.build(variables)
            for step in range(12):
                grads = gradients(step, "float16")
                apply(second if step > 7 and step % 2 else first, grads, variables)
            return bits(first, variables), captures.replays

    (expected, _), (actual, replays) = train(False), train(True)
    assert actual == expected
    # From step 9 on each finds weights that the other has written.
    assert replays == 6


def test_captured_step_does_not_compare_masters():
    [(_, captured), (_, eager)] = [
        run(RECIPES["float16"], is_on=True, count=count) for count in (5, 3)
    ]
    names = [k.overloadpacket.__name__ for k, *_ in captured.graphs[0].operations]
    assert "where" not in names
    assert eager.graphs


def test_schedules_of_a_graph_are_kept():
    # Another in the same memory would have the same identity.
    schedule = schedules.JoinedSchedules([0.1, 0.1], [100])
    with capturing_steps() as captures:
        optimizer, variables = make(lambda: SGD(schedule))
        schedule.schedules[0] = cosine(0.1, 1000)
        for step in range(4):
            apply(optimizer, gradients(step), variables)
    assert captures.replays
    first = weakref.ref(schedule.schedules[0])
    schedule.schedules[0] = 0.1
    gc.collect()
    assert first() is not None


# --- What is not captured -------------------------------------------------------------


def in_scope(optimizer, grads, variables):
    values = [v.value.detach() for v in variables]
    state = [v.value.detach() for v in optimizer.variables]
    new, state = optimizer.stateless_apply(state, grads, values, scaled=True)
    for v, value in zip(
        [*variables, *optimizer.variables], [*new, *state], strict=True
    ):
        v.assign(value)


def inference(optimizer, grads, variables):
    with torch.inference_mode():
        optimizer.apply(grads, variables, scaled=True)


NOT_CAPTURED = {
    "user's optimizer": (lambda: UserOptimizer(0.1), {}, apply),
    "user's policy": (lambda: SGD(0.1), {"loss_scale": UserLossScale}, apply),
    "user's schedule": (lambda: SGD(UserSchedule(0.1, 1000)), {}, apply),
    "user's nested schedule": (lambda: warmup(UserSchedule), {}, apply),
    "optimizer without a rule": (lambda: keras.optimizers.Adadelta(0.1), {}, apply),
    "stateless_apply": (lambda: SGD(0.1), {}, in_scope),
    "inference mode": (lambda: SGD(0.1), {}, inference),
}


@pytest.mark.parametrize(
    "inner, options, step", NOT_CAPTURED.values(), ids=NOT_CAPTURED
)
def test_other_steps_are_not_captured(inner, options, step):
    with capturing_steps() as captures:
        optimizer, variables = make(inner, **options)
        for i in range(6):
            step(optimizer, gradients(i), variables)
    assert not captures.graphs
    assert int(optimizer.iterations) == 6


@pytest.mark.filterwarnings("ignore:`momentum` of SGD")
@pytest.mark.parametrize(
    "name, value",
    [
        ("_learning_rate", lambda: 0.1),
        ("momentum", torch.tensor(0.5)),
        ("momentum", float("nan")),
    ],
)
def test_value_that_may_change_unseen_is_not_captured(name, value):
    with capturing_steps() as captures:
        optimizer, variables = make(lambda: SGD(0.1, momentum=0.5))
        vars(optimizer.inner_optimizer)[name] = value
        for step in range(6):
            with contextlib.suppress(TypeError):  # The kernel takes no tensor.
                apply(optimizer, gradients(step), variables)
    assert not captures.graphs


def test_rule_of_user_is_not_captured(monkeypatch):
    class UserRule(rules.SGD):
        """A rule that may read anything from Python."""

    monkeypatch.setitem(rules._rules, SGD, [UserRule])
    rules._rules_of.cache_clear()
    try:
        _, captures = run(RECIPES["SGD"], is_on=True, count=6)
    finally:
        rules._rules_of.cache_clear()
    assert not captures.graphs


def test_failed_capture_warns_once_and_changes_nothing():
    recipe = RECIPES["float16"]
    expected, _ = run(recipe, is_on=False)
    inner, options = recipe
    after, failed = [], []

    def capture(step, device, pool):
        captures(step, device, pool)
        failed.append(step)
        raise RuntimeError("no memory")

    with (
        capturing_steps() as captures,
        mock.patch.object(captured, "capture", capture),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        optimizer, variables = make(inner, **options)
        for step in range(12):
            apply(optimizer, gradients(step, "float16"), variables)
            after.append(bits(optimizer, variables))
    assert after == expected
    assert len(failed) == 1
    [warning] = [w for w in caught if "CUDA graph" in str(w.message)]
    assert "no memory" in str(warning.message)


def test_gradients_that_move_are_copied_from_then_on():
    with capturing_steps() as captures:
        optimizer, variables = make(lambda: SGD(0.1))
        in_place = []
        for seed in range(2):
            grads = gradients(seed)
            for _ in range(6):
                apply(optimizer, grads, variables)
            in_place.append(captures.graphs[-1].reads(grads))
    assert [graph.replays for graph in captures.graphs] == [3, 3]
    assert in_place == [True, False]


class Current(contextlib.AbstractContextManager):
    """`torch.cuda.device` or `torch.cuda.stream`, of which `now` has the values."""

    now: dict[str, str] = {}

    def __init__(self, kind, value):
        self.kind, self.value = kind, value

    def __enter__(self):
        self.before = self.now[self.kind]
        self.now[self.kind] = self.value

    def __exit__(self, *_):
        self.now[self.kind] = self.before


@pytest.fixture
def current(monkeypatch):
    """The device and the stream that are current, without a GPU."""
    cuda = torch.cuda
    for kind in ("device", "stream"):
        monkeypatch.setattr(cuda, kind, functools.partial(Current, kind))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(cuda, name, lambda: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(cuda, "Stream", lambda device="default": f"of {device}")
    monkeypatch.setattr(cuda, "CUDAGraph", mock.MagicMock())
    monkeypatch.setattr(cuda.graph, "default_capture_stream", None)
    monkeypatch.setattr(captured, "_stream_on", captured._stream_on.__wrapped__)
    now = {"device": "cuda:0", "stream": "default"}
    monkeypatch.setattr(Current, "now", now)
    return now


def test_capture_is_on_a_stream_of_its_device(current):
    streams = []
    for device in ("cuda:0", "cuda:1"):
        captured.capture(lambda: streams.append(current["stream"]), device, None)
    assert streams == ["of cuda:0", "of cuda:1"]


def test_capture_that_ends_with_an_error_leaves_its_stream(current):
    graph = torch.cuda.CUDAGraph.return_value
    graph.capture_end.side_effect = RuntimeError("invalidated")
    with pytest.raises(RuntimeError, match="invalidated"):
        captured.capture(lambda: None, "cuda:1", None)
    assert current == {"device": "cuda:0", "stream": "default"}


def test_oldest_graph_makes_room():
    most = captured._MOST_GRAPHS
    numbers = [0.1 * (1 + i) for i in range(most + 1)]

    def before(optimizer, variables, step, grads):
        # Each is captured; then again the last ones, and the first.
        i = step // 3 if step < 3 * len(numbers) else -1 - step % (most + 1)
        optimizer.momentum = numbers[i]

    count = 3 * len(numbers) + most + 1
    expected, _ = run(RECIPES["momentum"], before, is_on=False, count=count)
    actual, captures = run(RECIPES["momentum"], before, is_on=True, count=count)
    assert actual == expected
    assert [graph.replays for graph in captures.graphs] == [0] + [1] * most


# --- Copies, and training loops -------------------------------------------------------


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize("make_copy", [copy.deepcopy, through_pickle])
def test_copy_captures_steps_of_its_own(make_copy):
    def train(is_on):
        with capturing_steps(is_on=is_on) as captures:
            pair = make(lambda: Adam(0.1))
            for step in range(5):
                apply(pair[0], gradients(step), pair[1])
            twin = make_copy(pair)
            twin[0].build(twin[1])
            for step in range(5):
                apply(twin[0], gradients(step), twin[1])
                apply(pair[0], gradients(step + 5), pair[1])
        return bits(*pair), bits(*twin), captures

    *expected, _ = train(False)
    *actual, captures = train(True)
    assert actual == expected
    # Keras sets an attribute of the original to save it: it is captured anew.
    assert [graph.replays for graph in captures.graphs] == [2, 2, 2]


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "float16"])
def test_fit_replays_its_steps(policy):
    def train(is_on):
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy(policy)
        with capturing_steps(is_on=is_on) as captures:
            model = keras.Sequential(
                [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.2)]
                + [keras.layers.Dense(1)]
            )
            optimizer = keras_lso.LossScaleOptimizer(Adam(0.01), initial_scale=SCALE)
            model.compile(optimizer, "mse")
            x = np.random.default_rng(0).normal(size=(36, 8)).astype("float32")
            x[9] = np.inf
            # Four batches of eight and one of four.
            model.fit(x, x[:, :1], batch_size=8, epochs=4, shuffle=False, verbose=0)
            assert int(optimizer.skipped_steps) == 4
            return bits(optimizer, model.variables), captures.replays

    try:
        (expected, _), (actual, replays) = train(False), train(True)
    finally:
        keras.config.set_dtype_policy("float32")
    assert actual == expected
    assert replays >= 20 - 3 - 3
