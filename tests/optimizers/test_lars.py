"""`LARS`: its arguments, its formula, whom it excludes, configs, and loss scaling.

The reference is the formula in NumPy float64. The Model Garden's and optax's own code
are references in the integration tests.
"""

import inspect
import json

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from keras_lso import LARS, LossScaleOptimizer

# JAX has float64 only where x64 is on; `tensor` skips where it is not.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")

SCALE = 2.0**10
# Float32 rounds by 6e-8; a step is some ten roundings of the largest number in it.
SHARE = 1e-6
PATHS = ["block/conv/kernel", "block/bn/gamma", "block/bn/beta", "dense/bias", "scale"]
SHAPES = [(2, 3, 2), (3,), (3,), (4,), ()]


def tensor(values, dtype="float32"):
    result = ops.convert_to_tensor(np.asarray(values, "float64"), dtype=dtype)
    if keras.backend.standardize_dtype(result.dtype) != dtype:
        pytest.skip(f"This backend has no {dtype} here (JAX: x64 is off)")
    return result


def variable(path, value, dtype="float32"):
    *scopes, name = path.split("/")
    if scopes:
        with keras.name_scope(scopes[0]):
            return variable("/".join([*scopes[1:], name]), value, dtype)
    return keras.Variable(value, dtype=dtype, name=name)


def values_of(variables):
    """In float64, in which every number of a narrower dtype is exact."""
    return [
        np.array(ops.convert_to_numpy(ops.cast(v, _wide(v)))).astype("float64")
        for v in variables
    ]


def _wide(v):
    return "float64" if v.dtype == "float64" else "float32"


def apply(optimizer, grads, variables):
    """Applies unscaled gradients, the way `fit` would."""
    if isinstance(optimizer, LossScaleOptimizer):
        grads = [np.asarray(g) * SCALE for g in grads]
    optimizer.apply([tensor(g) for g in grads], variables)


def stepper(compile_, optimizer, variables):
    """What `apply` does, as `step(grads)`, compiled once for all steps."""
    optimizer.build(variables)

    def step(grads):
        optimizer.apply(grads, variables)

    call = compile_(step, [*variables, *optimizer.variables])
    scale = SCALE if isinstance(optimizer, LossScaleOptimizer) else 1.0
    return lambda grads: call([tensor(g * scale) for g in grads])


def in_loss_scale_optimizer(optimizer):
    return LossScaleOptimizer(optimizer, initial_scale=SCALE)


@pytest.fixture(params=["alone", "in a LossScaleOptimizer"])
def wrap(request):
    """Wraps LARS, or does not."""
    return in_loss_scale_optimizer if request.param != "alone" else lambda o: o


@pytest.fixture
def start():
    random = np.random.default_rng(1)
    return [random.standard_normal(s).astype("float32") for s in SHAPES]


@pytest.fixture
def gradients():
    """Of six steps."""
    random = np.random.default_rng(2)
    return [
        [random.standard_normal(s).astype("float32") for s in SHAPES] for _ in range(6)
    ]


class InNumPy:
    """`LARS` in float64, as the docstring of the class has it."""

    def __init__(
        self,
        weights,
        momentum=0.9,
        weight_decay_rate=0.0,
        eeta=0.001,
        nesterov=False,
        classic_momentum=True,
    ):
        self.weights = [np.asarray(w, "float64") for w in weights]
        self.momentums = [np.zeros_like(w) for w in self.weights]
        self.momentum, self.eeta = momentum, eeta
        self.weight_decay_rate, self.nesterov = weight_decay_rate, nesterov
        self.classic_momentum = classic_momentum

    def step(self, grads, learning_rate):
        for i, g in enumerate(grads):
            self._step(i, np.asarray(g, "float64"), learning_rate)

    def _step(self, i, g, learning_rate):
        w, v = self.weights[i], self.momentums[i]
        d = g + self.weight_decay_rate * w
        if self.classic_momentum:
            d = learning_rate * self.trust_ratio(w, d) * d
        v = self.momentum * v + d
        u = self.momentum * v + d if self.nesterov else v
        if not self.classic_momentum:
            u = learning_rate * self.trust_ratio(w, u) * u
        self.weights[i], self.momentums[i] = w - u, v

    def trust_ratio(self, w, d):
        w_norm, d_norm = np.linalg.norm(w), np.linalg.norm(d)
        return self.eeta * w_norm / d_norm if w_norm > 0 and d_norm > 0 else 1.0


def assert_close(actual, expected, share=SHARE):
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        tolerance = share * np.abs(e).max(initial=0)
        np.testing.assert_allclose(a, e, rtol=0, atol=tolerance, err_msg=str(i))


# --- Arguments ----------------------------------------------------------------

MODEL_GARDEN_ARGUMENTS = {
    "learning_rate": 0.01,
    "momentum": 0.9,
    "weight_decay_rate": 0.0,
    "eeta": 0.001,
    "nesterov": False,
    "classic_momentum": True,
    "exclude_from_weight_decay": None,
    "exclude_from_layer_adaptation": None,
    "name": "LARS",
}
OWN_ARGUMENTS = {
    "trust_ratio": "model_garden",
    "epsilon": 0.0,
    "trust_clip": False,
    "exclude_1d": False,
}


@pytest.mark.one_backend
def test_the_signature_is_the_model_gardens_and_four_keywords():
    parameters = inspect.signature(LARS).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    # As lists: the order counts as well.
    assert [(p.name, p.default) for p in positional] == list(
        MODEL_GARDEN_ARGUMENTS.items()
    )
    assert [(p.name, p.default) for p in keywords] == list(OWN_ARGUMENTS.items())


@pytest.mark.one_backend
def test_the_positional_arguments_land_where_they_do_in_the_model_garden():
    optimizer = LARS(0.5, 0.8, 0.1, 0.02, True, False, ["bn"], ["bias"], "mine")
    config = optimizer.get_config()
    assert {key: config[key] for key in MODEL_GARDEN_ARGUMENTS} == {
        "learning_rate": 0.5,
        "momentum": 0.8,
        "weight_decay_rate": 0.1,
        "eeta": 0.02,
        "nesterov": True,
        "classic_momentum": False,
        "exclude_from_weight_decay": ["bn"],
        "exclude_from_layer_adaptation": ["bias"],
        "name": "mine",
    }


@pytest.mark.one_backend
def test_each_argument_is_an_attribute():
    optimizer = LARS(
        0.5,
        momentum=0.75,
        weight_decay_rate=0.125,
        eeta=0.25,
        nesterov=True,
        exclude_from_layer_adaptation=["bias"],
        name="mine",
        trust_ratio="paper",
        epsilon=0.5,
        trust_clip=True,
        exclude_1d=True,
        decay=2.0,
        clipnorm=3.0,
    )
    assert float(optimizer.learning_rate) == 0.5
    assert optimizer.momentum == 0.75
    assert optimizer.weight_decay_rate == 0.125
    assert optimizer.eeta == 0.25
    assert optimizer.nesterov is True
    assert optimizer.classic_momentum is True
    assert list(optimizer.exclude_from_layer_adaptation) == ["bias"]
    assert optimizer.name == "mine"
    assert optimizer.trust_ratio == "paper"
    assert optimizer.epsilon == 0.5
    assert optimizer.trust_clip is True
    assert optimizer.exclude_1d is True
    assert optimizer.decay == 2.0
    assert optimizer.clipnorm == 3.0
    # Keras's method has the name of the other list.
    assert callable(optimizer.exclude_from_weight_decay)


@pytest.mark.one_backend
def test_numbers_of_numpy_and_integers_are_taken():
    optimizer = LARS(
        np.float32(0.5),
        momentum=np.float64(0.75),
        weight_decay_rate=1,
        eeta=np.int64(2),
        nesterov=np.bool_(True),
        decay=3,
    )
    config = optimizer.get_config()
    values = [
        config[key]
        for key in ("learning_rate", "momentum", "weight_decay_rate", "eeta", "decay")
    ]
    assert values == [0.5, 0.75, 1.0, 2.0, 3.0]
    assert {type(value) for value in values} == {float}
    assert config["nesterov"] is True
    json.dumps(config)


@pytest.mark.one_backend
@pytest.mark.parametrize("momentum", [0, 1, 0.0, 1.0])
def test_a_momentum_may_be_0_or_1(momentum):
    assert LARS(momentum=momentum).momentum == momentum


# --- lr -----------------------------------------------------------------------


@pytest.mark.one_backend
def test_lr_is_another_name_of_the_learning_rate():
    optimizer = LARS(lr=0.25)
    assert float(optimizer.learning_rate) == 0.25
    assert float(optimizer.lr) == 0.25
    optimizer.lr = 0.5
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.125
    assert float(optimizer.lr) == 0.125
    assert optimizer.get_config()["learning_rate"] == 0.125
    assert "lr" not in optimizer.get_config()


@pytest.mark.one_backend
def test_lr_is_read_and_written_through_a_loss_scale_optimizer():
    optimizer = in_loss_scale_optimizer(LARS(lr=0.25))
    assert float(optimizer.lr) == 0.25
    optimizer.lr = 0.5
    assert float(optimizer.inner_optimizer.learning_rate) == 0.5


def test_lr_may_be_a_schedule():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    optimizer = LARS(lr=schedule)
    w = variable("w", [3.0, 4.0])
    apply(optimizer, [np.zeros(2)], [w])
    assert float(optimizer.lr) == 0.25


@pytest.mark.one_backend
def test_lr_and_learning_rate_together_are_an_error():
    with pytest.raises(TypeError, match="learning_rate=0.5, lr=0.25") as error:
        LARS(0.5, lr=0.25)
    assert "give one of them" in str(error.value)


# --- The formula --------------------------------------------------------------

FORMS = {
    f"{'classic' if classic else 'popular'}{', nesterov' if nesterov else ''}": dict(
        classic_momentum=classic, nesterov=nesterov
    )
    for classic in (True, False)
    for nesterov in (False, True)
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@pytest.mark.exhaustive
@forms
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_steps_are_the_formula(wrap, start, gradients, form, decay, momentum):
    settings = dict(momentum=momentum, weight_decay_rate=decay, eeta=0.1, **form)
    reference = InNumPy(start, **settings)
    optimizer = LARS(0.5, **settings)
    outer = wrap(optimizer)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for grads in gradients:
        apply(outer, grads, variables)
        reference.step(grads, 0.5)
        assert_close(values_of(variables), reference.weights)
        # A momentum is a sum of many steps, some of which cancel.
        assert_close(values_of(optimizer.momentums), reference.momentums, 2 * SHARE)


def test_a_step_by_hand():
    # |w| is 5 and |g| is 10, so that the ratio is 0.5 * 5 / 10.
    w = variable("w", [3.0, 4.0])
    optimizer = LARS(2.0, momentum=0.5, eeta=0.5)
    apply(optimizer, [[0.0, 10.0]], [w])
    assert values_of([w])[0].tolist() == [3.0, -1.0]
    assert values_of(optimizer.momentums)[0].tolist() == [0.0, 5.0]
    # |w| is 0: a ratio of 1.
    w.assign([0.0, 0.0])
    apply(optimizer, [[1.0, 0.0]], [w])
    assert values_of([w])[0].tolist() == [-2.0, -2.5]


@forms
@pytest.mark.parametrize("zero", ["weights", "gradients", "both"])
def test_where_a_norm_is_zero_the_trust_ratio_is_one(wrap, form, zero):
    w = np.zeros(2) if zero != "gradients" else np.array([3.0, 4.0])
    g = np.zeros(2) if zero != "weights" else np.array([1.0, -2.0])
    v = variable("w", w)
    optimizer = LARS(0.5, momentum=0.0, **form)
    apply(wrap(optimizer), [g], [v])
    assert values_of([v])[0].tolist() == (w - 0.5 * g).tolist()
    assert np.isfinite(values_of(optimizer.momentums)[0]).all()


def test_a_schedule_gives_the_rate_of_each_step(wrap, start, gradients):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        [1, 3], [0.5, 0.25, 2.0]
    )
    optimizer = wrap(LARS(schedule, eeta=0.1))
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for grads, rate in zip(gradients, [0.5, 0.5, 0.25, 0.25, 2.0, 2.0], strict=True):
        apply(optimizer, grads, variables)
        reference.step(grads, rate)
    assert_close(values_of(variables), reference.weights)


def test_a_callable_is_asked_once_for_the_rate_of_each_step(wrap):
    rates = iter([0.5, 2.0])
    optimizer = wrap(LARS(lambda: next(rates), momentum=0.0, eeta=0.1))
    w = variable("w", [3.0, 4.0])
    reference = InNumPy([[3.0, 4.0]], momentum=0.0, eeta=0.1)
    for rate in (0.5, 2.0):
        apply(optimizer, [[1.0, 1.0]], [w])
        reference.step([[1.0, 1.0]], rate)
    assert_close(values_of([w]), reference.weights)


def test_a_setting_that_changes_counts_from_the_next_step_on(wrap, start, gradients):
    optimizer = wrap(LARS(0.5, eeta=0.1))
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for step, grads in enumerate(gradients):
        apply(optimizer, grads, variables)
        reference.step(grads, 0.5 if step < 2 else 0.125)
        if step == 1:
            optimizer.learning_rate = 0.125
            optimizer.weight_decay_rate = reference.weight_decay_rate = 0.25
            optimizer.momentum = reference.momentum = 0.5
            optimizer.eeta = reference.eeta = 0.2
    assert_close(values_of(variables), reference.weights)


def test_steps_are_the_same_when_compiled(compiled, start, gradients):
    settings = dict(weight_decay_rate=0.1, eeta=0.1, nesterov=True)
    optimizer = LARS(0.5, decay=0.5, **settings)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    optimizer.build(variables)

    def step(grads):
        optimizer.apply(grads, variables)

    call = compiled(step, [*variables, *optimizer.variables])
    reference = InNumPy(start, **settings)
    for i, grads in enumerate(gradients):
        call([tensor(g) for g in grads])
        reference.step(grads, 0.5 / (1 + 0.5 * i))
    assert_close(values_of(variables), reference.weights)
    assert int(optimizer.iterations) == len(gradients)


def test_one_slot_a_variable_and_no_more(start):
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    optimizer = LARS(0.5)
    optimizer.build(variables)
    optimizer.build(variables)
    assert [v.shape for v in optimizer.momentums] == [v.shape for v in variables]
    # Besides, the count of steps and the learning rate.
    assert len(optimizer.variables) == 2 + len(variables)


def test_the_callers_gradients_stay_as_they_are(wrap):
    w = variable("w", [3.0, 4.0])
    optimizer = wrap(LARS(0.5, weight_decay_rate=0.1))
    gradient = tensor([8.0, -0.0])
    optimizer.apply([gradient], [w])
    assert ops.convert_to_numpy(gradient).tobytes() == np.float32([8, -0.0]).tobytes()


def test_variables_without_a_gradient_stay_as_they_are(wrap):
    variables = [variable("a", [3.0, 4.0]), variable("b", [3.0, 4.0])]
    optimizer = wrap(LARS(0.5, weight_decay_rate=0.1))
    optimizer.build(variables)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([None, tensor([SCALE, 0.0])], variables)
    a, b = values_of(variables)
    assert a.tolist() == [3.0, 4.0]
    assert b.tolist() != [3.0, 4.0]


# --- decay --------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [False, True], ids=["a number", "a schedule"])
def test_decay_divides_the_learning_rate(wrap, start, gradients, schedule):
    rate = 0.5
    if schedule:
        rate = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.25)
    optimizer = wrap(LARS(rate, eeta=0.1, decay=0.75))
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for step, grads in enumerate(gradients):
        apply(optimizer, grads, variables)
        scheduled = 0.5 * 0.25 ** (step / 2) if schedule else 0.5
        reference.step(grads, scheduled / (1 + 0.75 * step))
    assert_close(values_of(variables), reference.weights)


def test_decay_counts_applied_steps_only():
    optimizer = in_loss_scale_optimizer(LARS(0.5, momentum=0.0, eeta=0.1, decay=1.0))
    w = variable("w", [3.0, 4.0])
    reference = InNumPy([[3.0, 4.0]], momentum=0.0, eeta=0.1)
    for i, gradient in enumerate([[1.0, 1.0], [np.inf, 0.0], [1.0, 2.0]]):
        optimizer.apply([tensor(gradient)], [w], scaled=False)
        if np.isfinite(gradient).all():
            reference.step([gradient], [0.5, None, 0.25][i])
    assert_close(values_of([w]), reference.weights)


def test_decay_counts_windows_of_accumulated_gradients(
    wrap, compiled_on_jax, start, gradients
):
    inner = LARS(0.5, eeta=0.1, decay=0.75, gradient_accumulation_steps=2)
    optimizer = wrap(inner)
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    apply_once = stepper(compiled_on_jax, optimizer, variables)
    for step, grads in enumerate(gradients):
        apply_once(grads)
        if step % 2:
            pair = zip(gradients[step - 1], grads, strict=True)
            mean = [(a.astype("float64") + b) / 2 for a, b in pair]
            reference.step(mean, 0.5 / (1 + 0.75 * (step // 2)))
        assert_close(values_of(variables), reference.weights)
    assert int(inner.iterations) == 3


def test_decay_can_be_set_later():
    optimizer = LARS(0.5, momentum=0.0, eeta=0.1)
    w = variable("w", [3.0, 4.0])
    reference = InNumPy([[3.0, 4.0]], momentum=0.0, eeta=0.1)
    apply(optimizer, [[1.0, 1.0]], [w])
    reference.step([[1.0, 1.0]], 0.5)
    optimizer.decay = 3.0
    apply(optimizer, [[1.0, 1.0]], [w])
    reference.step([[1.0, 1.0]], 0.125)
    assert_close(values_of([w]), reference.weights)


# --- Who is excluded ----------------------------------------------------------

ALL, NONE = set(PATHS), set()


def treatment(variables, wrap=lambda o: o, exclude_by_method=None, **settings):
    """Which paths decay, and which adapt, as told from one step of each."""
    # With an epsilon the ratio does not make up for the length of the direction.
    inner = LARS(
        1.0,
        momentum=0.0,
        weight_decay_rate=0.5,
        eeta=0.125,
        epsilon=1.0,
        **settings,
    )
    optimizer = wrap(inner)
    if exclude_by_method:
        optimizer.exclude_from_weight_decay(**exclude_by_method)
    before = values_of(variables)
    grads = [np.ones(w.shape) for w in before]
    apply(optimizer, grads, variables)
    decaying, adapting = set(), set()
    for v, old, g, new in zip(
        variables, before, grads, values_of(variables), strict=True
    ):
        possible = {}
        for decays in (True, False):
            for adapts in (True, False):
                d = g + 0.5 * old * decays
                ratio = 0.125 * np.linalg.norm(old) / (np.linalg.norm(d) + 1.0)
                possible[decays, adapts] = old - (ratio if adapts else 1.0) * d
        matching = [k for k, e in possible.items() if np.allclose(e, new, 1e-6, 1e-6)]
        assert len(matching) == 1, (v.path, new, possible)
        [(decays, adapts)] = matching
        decaying |= {v.path} if decays else NONE
        adapting |= {v.path} if adapts else NONE
    return decaying, adapting


@pytest.fixture
def variables():
    return [
        variable(p, np.full(s, 2.0, "float32"))
        for p, s in zip(PATHS, SHAPES, strict=True)
    ]


@pytest.mark.one_backend
def test_the_variables_here_have_the_paths_that_they_are_given(variables):
    assert [v.path for v in variables] == PATHS


@pytest.mark.parametrize(
    "patterns, excluded",
    [
        (["bn"], {"block/bn/gamma", "block/bn/beta"}),
        (["^block/bn/"], {"block/bn/gamma", "block/bn/beta"}),
        (["gamma$", "bias"], {"block/bn/gamma", "dense/bias"}),
        (["bn/(gamma|beta)", "^scale$"], {"block/bn/gamma", "block/bn/beta", "scale"}),
        (["block.bn.gamma"], {"block/bn/gamma"}),
        (["(?i)BETA"], {"block/bn/beta"}),
        (("bias",), {"dense/bias"}),
        ([""], ALL),
        ([], NONE),
        (None, NONE),
    ],
)
def test_patterns_are_regular_expressions_searched_in_the_full_path(
    wrap, variables, patterns, excluded
):
    decaying, adapting = treatment(
        variables,
        wrap,
        exclude_from_weight_decay=patterns,
        exclude_from_layer_adaptation=[],
    )
    assert (decaying, adapting) == (ALL - excluded, ALL)


def test_patterns_that_are_found_in_no_path_exclude_nothing(wrap, variables):
    idle = ["BETA", "^bn", "^gamma", "block$"]
    with pytest.warns(UserWarning, match="'BETA' .*'\\^bn' .*'\\^gamma' .*'block\\$' "):
        treated = treatment(variables, wrap, exclude_from_weight_decay=idle)
    assert treated == (ALL, ALL)


GAMMA, BIAS = {"block/bn/gamma"}, {"dense/bias"}


@pytest.mark.parametrize(
    "no_decay, no_adaptation, excluded, not_adapted",
    [
        (None, None, NONE, NONE),
        (None, [], NONE, NONE),
        (None, ["bias"], NONE, BIAS),
        ([], None, NONE, NONE),
        ([], [], NONE, NONE),
        ([], ["bias"], NONE, BIAS),
        # None means the same as the other list; an empty list excludes none.
        (["gamma"], None, GAMMA, GAMMA),
        (["gamma"], [], GAMMA, NONE),
        (["gamma"], ["bias"], GAMMA, BIAS),
        (["gamma"], ["gamma", "bias"], GAMMA, GAMMA | BIAS),
    ],
)
def test_none_an_empty_list_and_a_list_differ(
    wrap, variables, no_decay, no_adaptation, excluded, not_adapted
):
    decaying, adapting = treatment(
        variables,
        wrap,
        exclude_from_weight_decay=no_decay,
        exclude_from_layer_adaptation=no_adaptation,
    )
    assert (ALL - decaying, ALL - adapting) == (excluded, not_adapted)


@pytest.mark.parametrize(
    "lists, excluded, not_adapted",
    [
        ({}, NONE, NONE),
        (
            {"exclude_from_weight_decay": ["conv"]},
            {"block/conv/kernel"},
            {"block/conv/kernel"},
        ),
        (
            {
                "exclude_from_weight_decay": ["conv"],
                "exclude_from_layer_adaptation": [],
            },
            {"block/conv/kernel"},
            NONE,
        ),
    ],
)
def test_exclude_1d_drops_vectors_and_scalars_from_both(
    wrap, variables, lists, excluded, not_adapted
):
    flat = ALL - {"block/conv/kernel"}
    decaying, adapting = treatment(variables, wrap, exclude_1d=True, **lists)
    assert (ALL - decaying, ALL - adapting) == (flat | excluded, flat | not_adapted)


def test_keras_method_excludes_variables_and_names_from_decay_alone(wrap, variables):
    decaying, adapting = treatment(
        variables,
        wrap,
        exclude_by_method={"var_list": [variables[0]], "var_names": ["bias", "gam"]},
    )
    assert ALL - decaying == {"block/conv/kernel", "dense/bias", "block/bn/gamma"}
    assert adapting == ALL


def test_keras_method_and_the_list_add_up(wrap, variables):
    decaying, adapting = treatment(
        variables,
        wrap,
        exclude_by_method={"var_names": ["gamma"]},
        exclude_from_weight_decay=["bias"],
    )
    assert ALL - decaying == {"dense/bias", "block/bn/gamma"}
    assert ALL - adapting == {"dense/bias"}


def test_exclusions_hold_for_keras_decoupled_weight_decay_as_well(wrap, variables):
    optimizer = wrap(
        LARS(
            1.0,
            eeta=0.0,
            weight_decay=0.25,
            exclude_from_weight_decay=["bn"],
            exclude_from_layer_adaptation=[],
        )
    )
    # With an eeta of 0 a layer moves by its decay alone.
    apply(optimizer, [np.ones(s) for s in SHAPES], variables)
    firsts = [float(np.ravel(w)[0]) for w in values_of(variables)]
    after = dict(zip(PATHS, firsts, strict=True))
    assert {path for path, w in after.items() if w == 2.0} == {
        "block/bn/gamma",
        "block/bn/beta",
    }
    assert set(after.values()) == {2.0, 1.5}


def test_without_a_weight_decay_rate_the_lists_still_exclude_from_adaptation(variables):
    optimizer = LARS(
        1.0, momentum=0.0, eeta=0.5, exclude_from_layer_adaptation=["bias"]
    )
    apply(optimizer, [np.ones(s) for s in SHAPES], variables)
    # |w| / |g| is 2 for each.
    firsts = [float(np.ravel(w)[0]) for w in values_of(variables)]
    np.testing.assert_allclose(firsts, [1.0] * len(PATHS), rtol=1e-6)
    apply(optimizer, [np.full(s, 4.0) for s in SHAPES], variables)
    firsts = [float(np.ravel(w)[0]) for w in values_of(variables)]
    expected = [1.0 - 4.0 if path == "dense/bias" else 0.5 for path in PATHS]
    np.testing.assert_allclose(firsts, expected, rtol=1e-6)


def test_masters_of_float16_variables_are_excluded_like_them():
    variables = [
        variable(p, np.full(s, 2.0, "float32"), "float16")
        for p, s in zip(PATHS, SHAPES, strict=True)
    ]
    inner = LARS(
        1.0,
        momentum=0.0,
        weight_decay_rate=0.5,
        eeta=0.25,
        exclude_from_weight_decay=["bn"],
    )
    optimizer = in_loss_scale_optimizer(inner)
    optimizer.exclude_from_weight_decay(var_list=[variables[3]])
    optimizer.apply([ops.full(s, SCALE, dtype="float16") for s in SHAPES], variables)
    # Decayed, d is 2 and the ratio 1/4; by the method d is 1 and the ratio 1/2.
    expected = {"block/conv/kernel": 1.5, "dense/bias": 1.5, "scale": 1.5}
    expected |= {"block/bn/gamma": 1.0, "block/bn/beta": 1.0}
    actual = [float(np.ravel(w)[0]) for w in values_of(variables)]
    assert dict(zip(PATHS, actual, strict=True)) == expected


# --- The paper's trust ratio --------------------------------------------------


class MLPerf:
    """The step of MLPerf's reference, `LARSOptimizer`, in NumPy float64."""

    def __init__(self, weights, skipped, momentum, weight_decay, eeta, epsilon, clip):
        self.weights = [np.asarray(w, "float64") for w in weights]
        self.momentums = [np.zeros_like(w) for w in self.weights]
        self.skipped, self.momentum, self.eeta = skipped, momentum, eeta
        self.weight_decay, self.epsilon, self.clip = weight_decay, epsilon, clip

    def step(self, grads, learning_rate, nesterov):
        for i, (g, w) in enumerate(zip(grads, self.weights, strict=True)):
            g, rate = np.asarray(g, "float64"), learning_rate
            if not self.skipped[i]:
                w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(g)
                if w_norm > 0 and g_norm > 0:
                    ratio = self.eeta * w_norm
                    ratio /= g_norm + self.weight_decay * w_norm + self.epsilon
                    rate *= min(ratio, 1.0) if self.clip else ratio
                g = g + self.weight_decay * w
            v = self.momentums[i] = self.momentum * self.momentums[i] - rate * g
            self.weights[i] = w + (self.momentum * v - rate * g if nesterov else v)


@pytest.mark.exhaustive
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
@pytest.mark.parametrize("eeta", [0.01, 2.0])
def test_the_papers_ratio_is_mlperfs(
    wrap, start, gradients, eeta, epsilon, clip, nesterov
):
    start[1] = np.zeros_like(start[1])  # |w| is 0
    reference = MLPerf(
        start,
        skipped=["beta" in path or "bias" in path for path in PATHS],
        momentum=0.9,
        weight_decay=0.2,
        eeta=eeta,
        epsilon=epsilon,
        clip=clip,
    )
    optimizer = wrap(
        LARS(
            0.25,
            momentum=0.9,
            weight_decay_rate=0.2,
            eeta=eeta,
            nesterov=nesterov,
            exclude_from_weight_decay=["beta", "bias"],
            trust_ratio="paper",
            epsilon=epsilon,
            trust_clip=clip,
        )
    )
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for step, grads in enumerate(gradients):
        if step == 2:
            grads = [np.zeros_like(grads[0]), *grads[1:]]  # |g| is 0
        apply(optimizer, grads, variables)
        reference.step(grads, 0.25, nesterov)
        assert_close(values_of(variables), reference.weights, 2 * SHARE)


def test_the_papers_ratio_by_hand():
    # |w| is 5 and |g| is 2: 0.5 * 5 / (2 + 0.4 * 5 + 1) is a half.
    w = variable("w", [3.0, 4.0])
    settings = dict(momentum=0.0, weight_decay_rate=0.4, eeta=0.5)
    LARS(1.0, trust_ratio="paper", epsilon=1.0, **settings).apply(
        [tensor([2.0, 0.0])], [w]
    )
    # The gradient with its penalty is 2 + 1.2, 0 + 1.6.
    assert_close(values_of([w]), [[3.0 - 1.6, 4.0 - 0.8]])


def test_epsilon_and_the_cap_work_with_the_model_gardens_ratio_too(wrap):
    # |w| is 5 and |g| is 2: 0.5 * 5 / (2 + 3), and 2 * 5 / 2, which is above 1.
    for settings, ratio in [
        (dict(eeta=0.5, epsilon=3.0), 0.5),
        (dict(eeta=2.0), 5.0),
        (dict(eeta=2.0, trust_clip=True), 1.0),
        (dict(eeta=0.5, trust_clip=True, epsilon=3.0), 0.5),
    ]:
        for classic in (True, False):
            w = variable("w", [3.0, 4.0])
            optimizer = LARS(1.0, momentum=0.0, classic_momentum=classic, **settings)
            apply(wrap(optimizer), [[2.0, 0.0]], [w])
            assert_close(values_of([w]), [[3.0 - ratio * 2.0, 4.0]])


# --- Dtypes, and gradients of every kind --------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norms_of_narrow_tensors_are_summed_up_in_float32(wrap, dtype):
    # The square of 48 * 1024 overflows float16, and so does the norm, twice as much.
    w = variable("w", np.full(4, 49152.0), dtype)
    optimizer = LARS(1.0, momentum=0.0, eeta=0.25)
    outer = wrap(optimizer)
    gradient = ops.full((4,), 49152.0, dtype=dtype)
    options = {"scaled": False} if outer is not optimizer else {}
    outer.apply([gradient], [w], **options)
    # The ratio is a quarter.
    assert w.dtype == dtype
    assert values_of([w])[0].tolist() == [36864.0] * 4


@forms
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_variables_step_in_float32(form, dtype):
    w = variable("w", [3.0, 4.0], dtype)
    optimizer = LARS(0.5, momentum=0.5, weight_decay_rate=0.25, eeta=0.1, **form)
    optimizer.build([w])
    reference = InNumPy(
        [[3.0, 4.0]], momentum=0.5, weight_decay_rate=0.25, eeta=0.1, **form
    )
    for gradient in ([1.0, 2.0], [-4.0, 0.5]):
        optimizer.apply([tensor(gradient, dtype)], [w])
        reference.step([gradient], 0.5)
        # What is left is the rounding of the weights and the momentum themselves.
        epsilon = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        assert_close(values_of([w]), reference.weights, 3 * epsilon)
    assert optimizer.momentums[0].dtype == dtype


@forms
def test_float64_variables_step_in_float64(form, start, gradients):
    tensor(0.0, "float64")  # skips where there is none
    settings = dict(momentum=0.9, weight_decay_rate=0.1, eeta=0.1, **form)
    variables = [variable(p, w, "float64") for p, w in zip(PATHS, start, strict=True)]
    optimizer = LARS(0.5, **settings)
    reference = InNumPy(start, **settings)
    for grads in gradients:
        optimizer.apply([tensor(g, "float64") for g in grads], variables)
        reference.step(grads, 0.5)
    assert_close(values_of(variables), reference.weights, 1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_gradients_of_another_dtype_step_float32_variables(wrap, dtype):
    variables = [variable("a", [3.0, 4.0]), variable("b", 2.0)]
    reference = InNumPy([[3.0, 4.0], 2.0], eeta=0.1)
    optimizer = LARS(0.5, eeta=0.1)
    outer = wrap(optimizer)
    options = {"scaled": False} if outer is not optimizer else {}
    for grads in ([[1.0, -2.0], 3.0], [[0.5, 0.25], -1.0]):
        outer.apply([tensor(g, dtype) for g in grads], variables, **options)
        reference.step(grads, 0.5)
    assert_close(values_of(variables), reference.weights)


def test_a_gradient_whose_norm_overflows_float32_moves_nothing(wrap):
    # As in the Model Garden: the ratio is eeta * |w| / inf.
    w = variable("w", [3.0, 4.0])
    inner = LARS(0.5, momentum=0.5)
    outer = wrap(inner)
    options = {"scaled": False} if outer is not inner else {}
    outer.apply([tensor([1e25, -1e25])], [w], **options)
    assert values_of([w])[0].tolist() == [3.0, 4.0]
    assert int(inner.iterations) == 1


@pytest.mark.exhaustive
@forms
def test_sparse_gradients_do_what_dense_ones_do(wrap, form, sparse_gradient, compiled):
    values = np.array([[8.0, 1.0], [16.0, 2.0], [24.0, 3.0]], "float32")
    rows = [2, 0, 0]
    dense = np.zeros((4, 2), "float32")
    np.add.at(dense, rows, values)
    start = np.arange(1.0, 9.0, dtype="float32").reshape(4, 2)
    settings = dict(weight_decay_rate=0.1, eeta=0.1, **form)

    def two_steps(gradient):
        table = variable("table", start)
        optimizer = wrap(LARS(0.5, **settings))
        optimizer.build([table])

        def step(gradient):
            optimizer.apply([gradient], [table])

        call = compiled(step, [table, *optimizer.variables])
        call(gradient)
        call(gradient)
        return values_of([table])

    results = two_steps(sparse_gradient(values, rows, (4, 2)))
    assert_close(results, two_steps(tensor(dense)))
    # Rows without a gradient decay too: the penalty is of the whole table.
    assert (np.abs(results[0] - start) > 0).all()


def test_arrays_will_do_as_gradients(wrap):
    w = variable("w", [3.0, 4.0])
    optimizer = wrap(LARS(1.0, eeta=0.5))
    optimizer.apply([np.array([0.0, 16.0], "float32")], [w])
    assert_close(values_of([w]), [[3.0, 1.5]])


# What PyTorch warns of would be an error in the tests only.
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("shape", [(3,), (2, 2, 2)])
def test_a_gradient_of_another_shape_is_refused(wrap, shape):
    w = variable("w", [3.0, 4.0])
    optimizer = wrap(LARS(1.0, momentum=0.5))
    # Each framework says it in its own way.
    with pytest.raises(Exception, match=r"(?i)shape|size|broadcast|dimension"):
        optimizer.apply([ops.ones(shape)], [w])
    assert values_of([w])[0].tolist() == [3.0, 4.0]


def test_a_variable_that_its_gradient_overwrites_takes_no_step(wrap):
    w, scale = variable("w", [3.0, 4.0]), variable("scale", [1.0, 1.0])
    scale.overwrite_with_gradient = True
    inner = LARS(1.0, eeta=0.5)
    optimizer = wrap(inner)
    factor = 1.0 if optimizer is inner else SCALE
    grads = [tensor([0.0, 16.0 * factor]), tensor([7.0, 8.0])]
    optimizer.apply(grads, [w, scale])
    assert_close(values_of([w, scale]), [[3.0, 1.5], [7.0, 8.0]])


def test_a_bare_tensorflow_variable_is_excluded_by_its_name(wrap):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras's optimizers take bare variables on TensorFlow only")
    import tensorflow as tf

    names = ["bn/gamma", "kernel"]
    variables = [tf.Variable([3.0, 4.0], name=name) for name in names]
    optimizer = wrap(LARS(1.0, eeta=0.5, exclude_from_weight_decay=["gamma"]))
    apply(optimizer, [[0.0, 16.0]] * 2, variables)
    assert [v.numpy().tolist() for v in variables] == [[3.0, -12.0], [3.0, 1.5]]


# --- The keywords of every Keras optimizer ------------------------------------


def clipped_by_norm(grads):
    return [g * min(1.0, 0.5 / np.linalg.norm(g)) for g in grads]


def clipped_by_global_norm(grads):
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in grads))
    return [g * min(1.0, 0.5 / norm) for g in grads]


def clipped_by_value(grads):
    return [np.clip(g, -0.5, 0.5) for g in grads]


CLIPS = {
    "clipnorm": clipped_by_norm,
    "global_clipnorm": clipped_by_global_norm,
    "clipvalue": clipped_by_value,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("keyword", CLIPS)
def test_gradients_are_clipped_before_anything_else(wrap, start, gradients, keyword):
    # Without decay the norm of a gradient would not matter.
    settings = dict(weight_decay_rate=0.2, eeta=0.1)
    optimizer = wrap(LARS(0.5, **settings, **{keyword: 0.5}))
    reference = InNumPy(start, **settings)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.step(CLIPS[keyword]([g.astype("float64") for g in grads]), 0.5)
        assert_close(values_of(variables), reference.weights)


def test_averages_are_of_the_weights_after_each_step(wrap, start, gradients):
    optimizer = wrap(LARS(0.5, eeta=0.1, use_ema=True, ema_momentum=0.75))
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    averages = None
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.step(grads, 0.5)
        averages = [
            w if averages is None else 0.75 * averages[i] + 0.25 * w
            for i, w in enumerate(reference.weights)
        ]
    assert_close(values_of(variables), reference.weights)
    optimizer.finalize_variable_values(variables)
    assert_close(values_of(variables), averages)


def test_accumulated_gradients_are_one_step_of_their_mean(
    wrap, compiled_on_jax, start, gradients
):
    settings = dict(weight_decay_rate=0.1, eeta=0.1, nesterov=True)
    optimizer = wrap(LARS(0.5, gradient_accumulation_steps=3, **settings))
    reference = InNumPy(start, **settings)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    apply_once = stepper(compiled_on_jax, optimizer, variables)
    for step, grads in enumerate(gradients):
        apply_once(grads)
        if step % 3 == 2:
            window = zip(*gradients[step - 2 : step + 1], strict=True)
            reference.step([np.mean(np.float64(g), axis=0) for g in window], 0.5)
        assert_close(values_of(variables), reference.weights)


def test_keras_weight_decay_shrinks_the_weights_beside_the_step(wrap, start, gradients):
    optimizer = wrap(LARS(0.5, eeta=0.1, weight_decay=0.25))
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for grads in gradients:
        apply(optimizer, grads, variables)
        reference.weights = [w * (1 - 0.25 * 0.5) for w in reference.weights]
        reference.step(grads, 0.5)
    assert_close(values_of(variables), reference.weights)


def test_a_constraint_holds_after_the_step(wrap):
    w = variable("w", [3.0, 4.0])
    w.constraint = keras.constraints.MinMaxNorm(max_value=1.0)
    apply(wrap(LARS(0.5)), [[1.0, 1.0]], [w])
    np.testing.assert_allclose(np.linalg.norm(values_of([w])[0]), 1.0, rtol=1e-5)


# --- Subclasses ---------------------------------------------------------------


class HalfSteps(LARS):
    """A user's: each step is half as long."""

    def update_step(self, gradient, variable, learning_rate):
        half = ops.multiply(ops.cast(learning_rate, "float32"), 0.5)
        super().update_step(gradient, variable, half)


class CountedSteps(LARS):
    """A user's, which changes nothing but looks on."""

    calls = 0

    def update_step(self, gradient, variable, learning_rate):
        self.calls += 1
        super().update_step(gradient, variable, learning_rate)


class JustANewName(LARS):
    """A user's, which changes nothing at all."""


@pytest.mark.exhaustive
@forms
def test_a_users_update_step_is_honoured(wrap, compiled, start, gradients, form):
    inner = HalfSteps(0.5, weight_decay_rate=0.1, eeta=0.1, **form)
    optimizer = wrap(inner)
    reference = InNumPy(start, weight_decay_rate=0.1, eeta=0.1, **form)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    optimizer.build(variables)

    def step(grads):
        optimizer.apply(grads, variables)

    call = compiled(step, [*variables, *optimizer.variables])
    scale = 1.0 if optimizer is inner else SCALE
    for grads in gradients[:3]:
        call([tensor(g * scale) for g in grads])
        reference.step(grads, 0.25)
    assert_close(values_of(variables), reference.weights)


def test_a_users_update_step_is_called_for_each_variable(wrap, start, gradients):
    inner = CountedSteps(0.5, eeta=0.1)
    optimizer = wrap(inner)
    reference = InNumPy(start, eeta=0.1)
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    for step, grads in enumerate(gradients[:2]):
        apply(optimizer, grads, variables)
        reference.step(grads, 0.5)
        assert inner.calls == (step + 1) * len(variables)
    assert_close(values_of(variables), reference.weights)


@forms
def test_a_subclass_that_changes_nothing_does_the_same(wrap, start, gradients, form):
    variables, twins = (
        [variable(p, w) for p, w in zip(PATHS, start, strict=True)] for _ in range(2)
    )
    settings = dict(weight_decay_rate=0.1, eeta=0.1, **form)
    optimizer, subclass = LARS(0.5, **settings), wrap(JustANewName(0.5, **settings))
    for grads in gradients:
        apply(optimizer, grads, variables)
        apply(subclass, grads, twins)
    assert_close(values_of(twins), values_of(variables))


# --- Configs ------------------------------------------------------------------

CONFIGURED = {
    "by default": {},
    "all numbers": dict(
        learning_rate=0.5,
        momentum=0.75,
        weight_decay_rate=0.125,
        eeta=0.25,
        nesterov=True,
        name="mine",
        epsilon=0.5,
        decay=2.0,
    ),
    "popular": dict(classic_momentum=False),
    "paper": dict(trust_ratio="paper", trust_clip=True, exclude_1d=True),
    "lists": dict(
        exclude_from_weight_decay=["bn", r"bias$"],
        exclude_from_layer_adaptation=["gamma"],
    ),
    "empty lists": dict(exclude_from_weight_decay=[], exclude_from_layer_adaptation=[]),
    "one list": dict(exclude_from_weight_decay=["bn"]),
    "Keras's keywords": dict(
        clipnorm=1.0, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2
    ),
    "global_clipnorm": dict(global_clipnorm=2.0),
    "clipvalue": dict(clipvalue=2.0),
    "decoupled": dict(weight_decay=0.125),
    "lr": dict(lr=0.5),
}
KERAS_KEYS = set(keras.optimizers.Optimizer(0.5).get_config())


def round_trips(optimizer):
    """The optimizer, come back on each way that there is."""
    yield type(optimizer).from_config(optimizer.get_config())
    serialized = keras.optimizers.serialize(optimizer)
    serialized = json.loads(json.dumps(serialized))
    yield keras_lso.deserialize(serialized)
    yield keras.saving.deserialize_keras_object(serialized)
    yield keras.saving.deserialize_keras_object(
        json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
    )


@pytest.mark.one_backend
@pytest.mark.parametrize("settings", CONFIGURED.values(), ids=CONFIGURED)
def test_a_config_holds_everything(settings):
    optimizer = LARS(**settings)
    config = optimizer.get_config()
    own = set(MODEL_GARDEN_ARGUMENTS) | set(OWN_ARGUMENTS) | {"decay"}
    assert set(config) == own | KERAS_KEYS
    for key, value in settings.items():
        assert config["learning_rate" if key == "lr" else key] == value
    for twin in round_trips(optimizer):
        assert type(twin) is LARS
        assert twin.get_config() == config


@pytest.mark.one_backend
@pytest.mark.parametrize("settings", CONFIGURED.values(), ids=CONFIGURED)
def test_a_config_is_no_part_of_the_optimizer(settings):
    optimizer = LARS(**settings)
    config = optimizer.get_config()
    for key in ("exclude_from_weight_decay", "exclude_from_layer_adaptation"):
        if config[key] is not None:
            assert type(config[key]) is list
            config[key].append("more")
    before = dict(config)
    LARS.from_config(config)
    assert config == before
    assert "more" not in json.dumps(optimizer.get_config())


def test_what_comes_back_steps_like_the_original(start, gradients):
    optimizer = LARS(
        keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.25),
        weight_decay_rate=0.1,
        eeta=0.1,
        classic_momentum=False,
        exclude_from_weight_decay=["bn"],
        exclude_from_layer_adaptation=["bias"],
        decay=0.5,
    )
    results = []
    for twin in [optimizer, *round_trips(optimizer)]:
        variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
        for grads in gradients:
            apply(twin, grads, variables)
        results.append([w.tobytes() for w in values_of(variables)])
    assert len(results) == 5
    assert results[1:] == results[:1] * 4


def test_a_nested_schedule_comes_back():
    schedule = keras.optimizers.schedules.CosineDecay(0.25, 10, alpha=0.5, name="mine")
    for twin in round_trips(LARS(schedule)):
        restored = twin.get_config()["learning_rate"]
        assert restored["class_name"] == "CosineDecay"
        assert restored["config"] == schedule.get_config()
        assert float(twin.learning_rate) == 0.25


@pytest.mark.one_backend
def test_reading_a_config_does_not_change_it():
    schedule = keras.optimizers.schedules.CosineDecay(0.25, 10)
    config = LARS(schedule, exclude_from_weight_decay=["bn"]).get_config()
    before = json.dumps(config)
    LARS.from_config(config)
    assert json.dumps(config) == before


@keras.saving.register_keras_serializable("test_lars")
class MySchedule(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate * ops.cast(step + 1, "float32")

    def get_config(self):
        return {"rate": self.rate}


def test_a_users_schedule_comes_back():
    for twin in round_trips(LARS(MySchedule(0.25))):
        assert twin.get_config()["learning_rate"]["config"] == {"rate": 0.25}
        assert float(twin.learning_rate) == 0.25


class Unregistered(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.75

    def get_config(self):
        return {}


@pytest.mark.one_backend
def test_a_schedule_is_found_among_custom_objects():
    config = LARS(Unregistered()).get_config()
    twin = LARS.from_config(config, custom_objects={"Unregistered": Unregistered})
    assert float(twin.learning_rate) == 0.75


@pytest.mark.one_backend
def test_a_subclass_comes_back_as_itself():
    config = keras.saving.serialize_keras_object(HalfSteps(0.5, eeta=0.25))
    twin = keras.saving.deserialize_keras_object(
        config, custom_objects={"HalfSteps": HalfSteps}
    )
    assert type(twin) is HalfSteps
    assert twin.eeta == 0.25


@pytest.mark.one_backend
def test_it_comes_back_inside_a_loss_scale_optimizer():
    optimizer = LossScaleOptimizer(
        LARS(0.5, exclude_from_weight_decay=["bn"], exclude_from_layer_adaptation=[])
    )
    serialized = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    twin = keras_lso.deserialize(serialized)
    assert type(twin.inner_optimizer) is LARS
    assert twin.get_config() == optimizer.get_config()


@pytest.mark.one_backend
def test_another_class_of_that_name_is_left_alone():
    @keras.saving.register_keras_serializable("elsewhere", name="LARS")
    class Other(keras.optimizers.SGD):
        pass

    read = keras_lso.deserialize(keras.optimizers.serialize(Other(0.5)))
    assert isinstance(read, Other)


# --- Models -------------------------------------------------------------------


# `torch.compile` takes a minute, and leaves the optimizer outside.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "jit_compile", [False] if keras.backend.backend() == "torch" else [False, True]
)
def test_a_model_comes_back_with_its_optimizer(wrap, tmp_path, snapshot, jit_compile):
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 3)).astype("float32")
    y = random.normal(size=(8, 1)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="dense")])
    optimizer = wrap(
        LARS(
            keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.25),
            weight_decay_rate=0.1,
            exclude_from_weight_decay=["bias"],
        )
    )
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert int(optimizer.iterations) == 4
    path = tmp_path / "model.keras"
    model.save(path)
    twin = keras.saving.load_model(path)
    assert type(twin.optimizer) is type(optimizer)
    assert twin.optimizer.get_config() == optimizer.get_config()
    assert snapshot(twin.optimizer.variables) == snapshot(optimizer.variables)
    for m in (model, twin):
        m.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert snapshot(twin.variables) == snapshot(model.variables)


# --- Loss scaling -------------------------------------------------------------

IN_EVERY_WAY = {
    **FORMS,
    "without decay": dict(weight_decay_rate=0.0),
    "paper": dict(trust_ratio="paper", epsilon=1e-3),
    "excluded": dict(exclude_1d=True),
    "clipped": dict(clipnorm=1.0),
}


def one_side(compiled, start, settings, wrap):
    """A step of LARS, its variables and slots, and the LARS itself."""
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    inner = LARS(0.5, **{"weight_decay_rate": 0.1, "eeta": 0.1, **settings})
    optimizer = wrap(inner)
    optimizer.build(variables)

    def step(grads):
        optimizer.apply(grads, variables)

    call = compiled(step, [*variables, *optimizer.variables])
    return call, [*variables, *inner.momentums], inner


def in_a_fixed_scale(optimizer):
    return LossScaleOptimizer(optimizer, dynamic=False, initial_scale=SCALE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", IN_EVERY_WAY.values(), ids=IN_EVERY_WAY)
def test_neither_loss_scaling_nor_a_skipped_step_shows(
    compiled, start, gradients, settings, snapshot
):
    # One compiled step for both, with a skipped one before each that is applied.
    plain, state, _ = one_side(compiled, start, settings, lambda o: o)
    scaled, state_inside, inner = one_side(compiled, start, settings, in_a_fixed_scale)
    for number, grads in enumerate(gradients):
        if number == 1:
            # Zeros of both signs are among what must stay.
            for side in (state, state_inside):
                for v in side[1], side[len(PATHS) + 1]:
                    v.assign(np.array([-0.0, 0.0, -0.0], "float32"))
        before = snapshot([*state_inside, *inner.variables])
        # Each of them anywhere: `tests/_backend/test_primitives.py`.
        bad, where = (np.inf, -np.inf, np.nan)[number % 3], number % len(PATHS)
        poisoned = [np.array(g) for g in grads]
        poisoned[where].flat[-1] = bad
        scaled([tensor(g) for g in poisoned])
        assert snapshot([*state_inside, *inner.variables]) == before, (bad, where)
        plain([tensor(g) for g in grads])
        scaled([tensor(g * SCALE) for g in grads])
        assert_close(values_of(state_inside), values_of(state), 2e-6)
    assert int(inner.iterations) == len(gradients)


@pytest.mark.parametrize("settings", IN_EVERY_WAY.values(), ids=IN_EVERY_WAY)
def test_outside_a_compiler_loss_scaling_does_not_show_in_any_bit(
    start, gradients, settings, snapshot
):
    # A compiler contracts products and sums, here and there another way.
    plain, state, _ = one_side(_as_it_is, start, settings, lambda o: o)
    scaled, state_inside, _ = one_side(
        _as_it_is, start, settings, in_loss_scale_optimizer
    )
    for grads in gradients:
        plain([tensor(g) for g in grads])
        scaled([tensor(g * SCALE) for g in grads])
        assert snapshot(state_inside) == snapshot(state)


def _as_it_is(function, variables):
    return function


def test_trust_ratios_are_of_unscaled_gradients():
    # Of scaled ones, the decay would weigh a thousandth in the norm.
    w = variable("w", [3.0, 4.0])
    optimizer = in_loss_scale_optimizer(
        LARS(1.0, momentum=0.0, weight_decay_rate=1.0, eeta=0.5)
    )
    optimizer.apply([tensor([SCALE * 3.0, SCALE * 4.0])], [w])
    # d is 6, 8; the ratio 0.5 * 5 / 10.
    assert_close(values_of([w]), [[1.5, 2.0]])


def test_a_gradient_that_overflows_only_scaled_is_no_reason_to_stop():
    # 1e20 squared overflows float32; unscaled, the norm does not.
    w = variable("w", [3.0, 4.0])
    optimizer = LossScaleOptimizer(LARS(1.0, eeta=0.5), initial_scale=2.0**20)
    optimizer.apply([tensor([0.0, 2.0**70])], [w])
    assert_close(values_of([w]), [[3.0, 1.5]])
    assert bool(optimizer.last_step_applied)


# --- Stateless ----------------------------------------------------------------


def test_a_stateless_step_is_a_step(wrap, start, gradients, snapshot):
    if keras.backend.backend() == "tensorflow":
        pytest.skip("Keras has no stateless_apply on TensorFlow")
    variables = [variable(p, w) for p, w in zip(PATHS, start, strict=True)]
    inner = LARS(0.5, weight_decay_rate=0.1, eeta=0.1)
    optimizer = wrap(inner)
    optimizer.build(variables)
    scale = 1.0 if optimizer is inner else SCALE
    before = snapshot([*variables, *optimizer.variables])
    trained = [ops.copy(ops.convert_to_tensor(v)) for v in variables]
    state = [ops.copy(ops.convert_to_tensor(v)) for v in optimizer.variables]
    reference = InNumPy(start, weight_decay_rate=0.1, eeta=0.1)
    for grads in gradients:
        trained, state = optimizer.stateless_apply(
            state, [tensor(g * scale) for g in grads], trained
        )
        reference.step(grads, 0.5)
    assert_close(values_of(trained), reference.weights)
    assert snapshot([*variables, *optimizer.variables]) == before
    for grads in gradients:
        apply(optimizer, grads, variables)
    assert snapshot(variables) == snapshot(trained)
    assert snapshot(optimizer.variables) == snapshot(state)


# --- Refusals -----------------------------------------------------------------

RATES = ["learning_rate", "lr", "weight_decay_rate", "eeta", "epsilon", "decay"]
BOOLS = ["nesterov", "classic_momentum", "trust_clip", "exclude_1d"]
LISTS = ["exclude_from_weight_decay", "exclude_from_layer_adaptation"]


def assert_refused(error_type, parts, **settings):
    with pytest.raises(error_type) as error:
        LARS(**settings)
    for part in parts:
        assert part in str(error.value), (part, str(error.value))


@pytest.mark.one_backend
@pytest.mark.parametrize("argument", RATES)
def test_rates_are_zero_or_more_and_finite(argument):
    for value in (-0.5, -1e-30):
        parts = [f"`{argument}`", f"{argument}={value!r}", "zero or more"]
        assert_refused(ValueError, parts, **{argument: value})
    for value in (np.nan, np.inf, -np.inf, 1e39, 10**400):
        parts = [f"`{argument}`", f"{argument}={value!r}", "finite"]
        assert_refused(ValueError, parts, **{argument: value})


@pytest.mark.one_backend
@pytest.mark.parametrize("argument", RATES)
def test_rates_are_numbers(argument):
    for value in ("0.5", True, None, [0.5], np.bool_(False), 1j):
        parts = [f"`{argument}`", f"{argument}={value!r}", "must be a number"]
        assert_refused(TypeError, parts, **{argument: value})


def test_a_function_of_keras_is_no_learning_rate():
    # A config can name any of them, and each step would call it.
    parts = ["`learning_rate`", "a function of your own"]
    for function in (keras.ops.shape, keras.config.floatx):
        assert_refused(TypeError, parts, learning_rate=function)


@pytest.mark.one_backend
def test_a_momentum_lies_between_0_and_1():
    for value in (-0.1, 1.1, np.nan, np.inf, "0.9", True, None, [0.9]):
        parts = ["`momentum`", f"momentum={value!r}", "between 0 and 1"]
        assert_refused(ValueError, parts, momentum=value)


@pytest.mark.one_backend
@pytest.mark.parametrize("argument", BOOLS)
def test_bools_are_bools(argument):
    for value in (0, 1, 0.5, "True", None, np.int64(1)):
        parts = [f"`{argument}`", f"{argument}={value!r}", "must be True or False"]
        assert_refused(TypeError, parts, **{argument: value})


@pytest.mark.one_backend
@pytest.mark.parametrize("argument", LISTS)
def test_a_bare_string_is_no_list(argument):
    parts = [f"`{argument}`", f"{argument}='bias'", "a list of regular expressions"]
    assert_refused(TypeError, parts, **{argument: "bias"})


@pytest.mark.one_backend
@pytest.mark.parametrize("argument", LISTS)
def test_what_is_no_list_is_refused(argument):
    for value in (3, {"bias"}, {"bias": 1}, b"bias"):
        assert_refused(TypeError, [f"`{argument}`", repr(value)], **{argument: value})


@pytest.mark.one_backend
@pytest.mark.parametrize("argument", LISTS)
def test_a_pattern_that_is_no_string_is_refused(argument):
    for item in (3, None, b"bias", ["bias"]):
        parts = [f"`{argument}`", repr(["bn", item]), "must hold strings"]
        assert_refused(TypeError, parts, **{argument: ["bn", item]})


@pytest.mark.one_backend
@pytest.mark.parametrize("argument", LISTS)
def test_a_pattern_that_does_not_compile_is_refused(argument):
    parts = [f"`{argument}`", "'bn['", r"bn\\[", "must hold regular expressions"]
    assert_refused(ValueError, parts, **{argument: ["bias", "bn["]})


@pytest.mark.one_backend
def test_an_unknown_trust_ratio_is_refused():
    for value in ("papers", "PAPER", None, 1, True):
        parts = ["`trust_ratio`", f"trust_ratio={value!r}", "'model_garden', 'paper'"]
        assert_refused(ValueError, parts, trust_ratio=value)


@pytest.mark.one_backend
def test_the_papers_ratio_needs_classic_momentum():
    parts = ["trust_ratio='paper'", "classic_momentum=False", "classic_momentum=True"]
    parts.append("trust_ratio='model_garden'")
    settings = dict(trust_ratio="paper", classic_momentum=False)
    assert_refused(ValueError, parts, **settings)


@pytest.mark.one_backend
def test_two_kinds_of_weight_decay_are_refused():
    parts = ["weight_decay_rate=0.125", "weight_decay=0.25", "Give one of them"]
    assert_refused(ValueError, parts, weight_decay_rate=0.125, weight_decay=0.25)
    # A decay of 0 is none.
    LARS(weight_decay_rate=0.0, weight_decay=0.25)
    LARS(weight_decay_rate=0.25, weight_decay=0.0)


@pytest.mark.one_backend
def test_an_unknown_keyword_is_refused():
    assert_refused(ValueError, ["not recognized", "wheight_decay"], wheight_decay=0.1)


@pytest.mark.one_backend
def test_too_many_positional_arguments_are_refused():
    # What follows the name in the Model Garden are keywords, and so it is here.
    with pytest.raises(TypeError, match="positional"):
        LARS(0.5, 0.9, 0.0, 0.001, False, True, None, None, "LARS", "paper")


def test_keras_s_exclusion_counts_after_build_as_well():
    w, bias = variable("kernel", [3.0, 4.0]), variable("bias", [1.0, 2.0])
    optimizer = LARS(1.0, weight_decay_rate=0.5, eeta=1.0, momentum=0.0)
    optimizer.build([w, bias])
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.apply([ops.zeros(2), ops.zeros(2)], [w, bias])
    # Without decay a gradient of zero moves nothing.
    assert values_of([bias])[0].tolist() == [1.0, 2.0]
    assert (values_of([w])[0] < [3.0, 4.0]).all()


def test_lists_will_do_as_gradients():
    w = variable("w", [3.0, 4.0])
    LARS(10.0, momentum=0.0).apply([[0.0, 100.0]], [w])
    np.testing.assert_allclose(values_of([w])[0], [3.0, 3.95], rtol=1e-6)


@pytest.mark.one_backend
def test_a_custom_lars_is_preferred_to_ours():
    class Mine(keras.optimizers.SGD):
        pass

    config = {"class_name": "LARS", "config": {"learning_rate": 0.5}}
    assert type(keras_lso.deserialize(config)) is LARS
    mine = keras_lso.deserialize(config, custom_objects={"LARS": Mine})
    assert isinstance(mine, Mine)


def test_the_papers_trust_ratios_have_the_decay_in_them():
    optimizer = keras_lso.LARS(
        1.0, eeta=0.1, weight_decay_rate=0.2, trust_ratio="paper"
    )
    variable = keras.Variable([3.0, 4.0], name="w")
    optimizer.build([variable])
    ratios = optimizer.trust_ratios([ops.array([0.0, 1.0])])
    # 0.1 * |w| / (|g| + 0.2 * |w|), in float32
    assert float(ratios["w"]) == pytest.approx(0.1 * 5 / (1 + 0.2 * 5), rel=1e-6)


def test_trust_ratios_are_what_the_step_is_rescaled_by():
    # Nesterov-free, undecayed and with a rate of 1, the first step is ratio * g.
    optimizer = keras_lso.LARS(1.0, eeta=0.1, exclude_from_weight_decay=["left_out"])
    names = ["a", "b", "left_out", "unused"]
    variables = [keras.Variable([3.0, 4.0], name=name) for name in names]
    with pytest.raises(ValueError, match="must be built"):
        optimizer.trust_ratios([])
    optimizer.build(variables)
    grads = [ops.array([0.5 * i, 1.0]) for i in range(3)] + [None]
    ratios = optimizer.trust_ratios(grads)
    assert list(ratios) == ["a", "b"]
    before = [v.numpy() for v in variables]
    with pytest.warns(UserWarning, match="do not exist"):
        optimizer.apply(grads)
    for i, ratio in enumerate(ratios.values()):
        step = before[i] - variables[i].numpy()
        # Differences of float32 numbers below 4.
        np.testing.assert_allclose(step, ratio * np.array([0.5 * i, 1.0]), atol=1e-6)
