"""What XLA makes of a step on JAX: no host in it, and no state in a branch."""

import functools
import re

import keras
import numpy as np
import pytest

import keras_lso
from benchmarks.accelerators.program import Program
from keras_lso._backend import backend
from keras_lso._backend.leaves import Leaves
from keras_lso.optimizers.lars import LARSRule

if keras.backend.backend() != "jax":
    pytest.skip("It reads what JAX compiles", allow_module_level=True)

jax = pytest.importorskip("jax")
pytest.importorskip("jax.extend")
pytest.importorskip("jax.export")

from jax.experimental.sparse import BCOO  # noqa: E402

from keras_lso._backend.jax import measure as jax_measure  # noqa: E402

dynamic = keras_lso.loss_scales.DynamicLossScale
STEPS = {
    "momentum": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), dynamic),
    "LogMax": (
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        keras_lso.loss_scales.LogMaxLossScale,
    ),
    "AdamW": (lambda: keras.optimizers.AdamW(0.1), dynamic),
    "RMSprop": (lambda: keras.optimizers.RMSprop(0.1, clipnorm=1.0), dynamic),
    "LARS": (lambda: keras_lso.LARS(0.1, weight_decay_rate=0.1), dynamic),
    "LAMB": (lambda: keras_lso.LAMB(0.1, weight_decay_rate=0.1), dynamic),
    "NovoGrad": (lambda: keras_lso.NovoGrad(0.1), dynamic),
}
SHAPES = [(30, 40), (50,)]


@pytest.fixture(params=["CPU", "accelerator"])
def kind(request, monkeypatch):
    """Both kinds of steps compile, and run, on a CPU."""
    if request.param == "accelerator":
        monkeypatch.setattr(jax_measure, "_is_on_cpu", lambda: False)
    return request.param


def test_small_gradients_are_read_together_on_accelerator(monkeypatch):
    monkeypatch.setattr(jax_measure, "_is_on_cpu", lambda: False)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    grads = [jax.numpy.ones(3), jax.numpy.ones((200, 100)), jax.numpy.ones((2, 2))]

    def is_finite(grads):
        return backend.measure(grads).finite

    assert str(jax.make_jaxpr(is_finite)(grads)).count("reduce_and") == 3
    for i, shape in enumerate([(3,), (200, 100), (2, 2)]):
        bad = jax.numpy.ones(shape).at[(-1,) * len(shape)].set(np.nan)
        assert is_finite(grads)
        assert not is_finite([*grads[:i], bad, *grads[i + 1 :]])

    def masked(grads):
        return jax.numpy.where(is_finite(grads), grads[0].sum(), 0.0)

    np.testing.assert_array_equal(jax.grad(masked)(grads)[0], np.ones(3))


class Step:
    """A jitted step as Keras's trainer makes it, with donated state."""

    def __init__(self, optimizer, shapes=SHAPES):
        self.variables = [keras.Variable(np.ones(s, "float32")) for s in shapes]
        self.optimizer = optimizer
        self.optimizer.build(self.variables)
        self.grads = [jax.numpy.ones(s) for s in shapes]
        self.jitted = jax.jit(self.step, donate_argnums=0)
        self.compiled = self.jitted.lower(self.new_state(), self.grads).compile()

    def new_state(self):
        """Returns copies, which may be donated."""
        return tuple(
            [jax.numpy.copy(v.value) for v in variables]
            for variables in (self.variables, self.optimizer.variables)
        )

    def step(self, state, grads):
        trainable, own = state
        return self.optimizer.stateless_apply(own, grads, trainable)

    @property
    def hlo(self):
        return self.compiled.as_text()


@functools.cache
def compiled_step(kind, name):
    """Compiled once for all tests, none of which changes it."""
    inner, policy = STEPS[name]
    return Step(keras_lso.LossScaleOptimizer(inner(), loss_scale=policy()))


@pytest.fixture(params=STEPS)
def step(request, kind):
    return compiled_step(kind, request.param)


def conditionals(hlo):
    """Returns what each `conditional` returns, `(pred[], f32[2])` say."""
    return re.findall(r"= (\(.*?\)|\S+) conditional\(", hlo)


def tensors(state):
    return [x for x in jax.tree.leaves(state) if x.ndim]


def test_check_stores_no_squares_that_adam_takes_too():
    step = Step(keras_lso.GuardedOptimizer(keras.optimizers.Adam()), [(300, 400)])
    main = step.hlo.partition("ENTRY")[2]
    # The weight and its two slots.
    assert len(re.findall(r"= f32\[300,400\]\S* fusion\(", main)) == 3


@pytest.mark.exhaustive
def test_no_branch_of_compiled_step_carries_variable_or_slot(kind, step):
    found = conditionals(step.hlo)
    assert bool(found) == (kind == "CPU")
    for result in found:
        # Flags and norms: what reads slices of one tensor of norms compiles slowly.
        shapes = set(re.findall(r"\w+\[[\d,]*\]", result))
        assert shapes <= {"pred[]", "f32[]"}
    # What goes into it comes from the gradients.
    arguments = step.new_state(), step.grads
    closed = jax.make_jaxpr(step.step)(*arguments)
    of_state = {
        invar
        for invar, x in zip(
            closed.jaxpr.invars, jax.tree.leaves(arguments), strict=True
        )
        if x.ndim and not any(x is g for g in step.grads)
    }
    branches = [e for e in closed.jaxpr.eqns if e.primitive.name == "cond"]
    assert bool(branches) == (kind == "CPU")
    for branch in branches:
        inputs = {v for v in branch.invars if isinstance(v, jax.extend.core.Var)}
        assert not inputs & of_state


@pytest.mark.exhaustive
def test_compiled_step_has_no_host_transfers(kind, step):
    assert not Program(step.hlo).host_transfers


@pytest.mark.exhaustive
def test_compiled_step_returns_state_in_donated_buffers(kind, step):
    state = step.new_state()
    before = [x.unsafe_buffer_pointer() for x in tensors(state)]
    after = jax.block_until_ready(step.compiled(state, step.grads))
    assert [x.unsafe_buffer_pointer() for x in tensors(after)] == before


@pytest.mark.exhaustive
def test_overflows_and_rate_changes_do_not_recompile_step(kind, step):
    overflow = [g * np.inf for g in step.grads]
    state = step.new_state()
    for grads in (step.grads, overflow, overflow, step.grads):
        state = step.jitted(state, grads)
    trainable, own = state
    # The learning rate is one of the optimizer's variables.
    rate = next(
        i
        for i, v in enumerate(step.optimizer.variables)
        if v is step.optimizer.inner_optimizer.variables[1]
    )
    own = [*own]
    own[rate] = own[rate] / 2
    step.jitted((trainable, own), step.grads)
    assert step.jitted._cache_size() == 1


def readers_of_the_product(inner):
    """Returns what kernels make of the product that a mixed gradient is."""
    # Larger than what is packed with others.
    variable = keras.Variable(np.ones((256, 128), "float32"))
    optimizer = keras_lso.LossScaleOptimizer(inner)
    optimizer.build([variable])

    def loss(kernel, inputs):
        outputs = inputs @ kernel.astype("float16")
        return jax.numpy.square(outputs).sum().astype("float32")

    def step(kernel, own, inputs):
        grads = [jax.grad(loss)(kernel, inputs)]
        return optimizer.stateless_apply(own, grads, [kernel])

    own = [v.value for v in optimizer.variables]
    inputs = jax.numpy.ones((16, 256), "float16")
    hlo = jax.jit(step).lower(variable.value, own, inputs).compile().as_text()
    entry = hlo[hlo.index("\nENTRY ") :]
    # In the order of the kernel it would be f32[256,128].
    [product] = re.findall(r"(%\S+) = f32\[128,256\]\S* dot\(", entry)
    return re.findall(rf"= (.*) fusion\(.*{re.escape(product)}[,)]", entry)


@pytest.mark.skipif(not jax_measure.HAS_LAYOUTS, reason="this JAX has no layouts")
@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "LARS"])
def test_transposed_gradient_is_copied_once_for_all_readers(name, monkeypatch):
    inner, _ = STEPS[name]
    [copy] = readers_of_the_product(inner())
    # In the order of the kernel, as it is or as a vector.
    assert copy in ("f32[256,128]{1,0}", "f32[32768]{0}")
    monkeypatch.setattr(type(backend), "prepare_gradients", lambda self, grads: grads)
    assert len(readers_of_the_product(inner())) > 1


def exported(inner, platform, *allowed):
    """Returns a step that is exported, with its arguments and its results."""
    variable = keras.Variable(np.ones((2, 3), "float32"))
    optimizer = keras_lso.LossScaleOptimizer(inner)
    optimizer.build([variable])
    state = [v.value for v in optimizer.variables]
    step = jax.jit(optimizer.stateless_apply)
    arguments = state, [jax.numpy.ones((2, 3))], [variable.value]
    export = jax.export.export(step, platforms=[platform], disabled_checks=allowed)
    return export(*arguments), arguments, step(*arguments)


def test_step_exports_for_cpu_where_layout_custom_call_is_allowed():
    """JAX guarantees nothing for layouts, and exports them only where it is told to."""
    allowed = jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")
    program, arguments, expected = exported(keras.optimizers.SGD(0.5), "cpu", allowed)
    again = jax.export.deserialize(program.serialize())
    [[new], _] = again.call(*arguments)
    np.testing.assert_array_equal(new, expected[0][0])


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_step_exports_for_accelerator_without_disabled_safety_checks(platform):
    program, _, _ = exported(keras.optimizers.SGD(0.5), platform)
    assert jax.export.deserialize(program.serialize()).platforms == (platform,)


def test_vmapped_step_of_ensemble_equals_step_of_each_model():
    """As an ensemble trains, by `jax.vmap`."""
    variable = keras.Variable(np.ones((4, 3), "float32"))
    optimizer = keras_lso.LossScaleOptimizer(keras.optimizers.Adam(0.5))
    optimizer.build([variable])
    state = [v.value for v in optimizer.variables]
    grads = jax.numpy.arange(24.0).reshape(2, 4, 3) - 5.0
    step = jax.jit(lambda g: optimizer.stateless_apply(state, [g], [variable.value]))
    [together], _ = jax.vmap(step)(grads)
    for new, grad in zip(together, grads, strict=True):
        np.testing.assert_array_equal(new, step(grad)[0][0])


def test_update_does_not_accept_float64_gradient():
    variables = [keras.Variable([1.0, 2.0])]
    # NumPy's, since JAX has any only where it was told so at its start.
    leaves, wide = Leaves(variables, []), np.ones(2)
    assert backend.takes_update(LARSRule, leaves, [wide.astype("float32")])
    assert not backend.takes_update(LARSRule, leaves, [wide])


def test_sparse_gradient_with_unique_indices_steps_like_keras_adam():
    """Keras's Adam squares no other sparse gradient under `jit`."""
    values = np.arange(1.0, 9.0, dtype="float32").reshape(2, 4)

    def gradient(scale):
        rows = jax.numpy.array([[2], [0]])
        return BCOO((scale * values, rows), shape=(3, 4), unique_indices=True)

    found = []
    for wraps in (False, True):
        variable = keras.Variable(np.ones((3, 4), "float32"))
        optimizer = keras.optimizers.Adam(0.1)
        if wraps:
            optimizer = keras_lso.LossScaleOptimizer(optimizer, initial_scale=64.0)
        optimizer.build([variable])
        state = [v.value for v in optimizer.variables]
        step = jax.jit(optimizer.stateless_apply)
        [new], _ = step(state, [gradient(64.0 if wraps else 1.0)], [variable.value])
        found.append(np.asarray(new))
    # Both are compiled: XLA may round a product and a sum at once in one of them.
    np.testing.assert_allclose(*found, rtol=0, atol=1e-6)
    assert (found[0][1] == 1).all() and (found[0][0] < 1).all()
