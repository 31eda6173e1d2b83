"""What a step does with the memory of PyTorch's tensors, and what it tells PyTorch."""

import keras
import numpy as np
import pytest

import keras_lso
from keras_lso import LossScaleOptimizer
from testing.harness import bits

if keras.backend.backend() != "torch":
    pytest.skip("tensors of PyTorch", allow_module_level=True)

import torch

from keras_lso._backend.torch import update as torch_update

KINDS = {
    "SGD": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.5),
    "Adam": lambda: keras.optimizers.Adam(0.5),
    "AdamW": lambda: keras.optimizers.AdamW(0.5),
    "Nadam": lambda: keras.optimizers.Nadam(0.5),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.5),
    "Lion": lambda: keras.optimizers.Lion(0.5),
    "amsgrad": lambda: keras.optimizers.Adam(0.5, amsgrad=True),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "LARS": lambda: keras_lso.LARS(0.5),
    "LAMB": lambda: keras_lso.LAMB(0.5),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.5),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def wrapped(kind, dtype="float32", **options):
    """A variable of four elements, and the optimizer that was built for it."""
    variable = keras.Variable(np.float32([1.0, 2.0, 3.0, 4.0]), dtype=dtype)
    optimizer = LossScaleOptimizer(KINDS[kind](), initial_scale=1.0, **options)
    optimizer.build([variable])
    return variable, optimizer


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_backward_through_weights_changed_by_step_raises(dtype, kind, way):
    """As after a step of Keras or of `torch.optim`: a GAN's second loss needs it."""
    variable, optimizer = wrapped(kind, dtype)
    loss = (variable.value * variable.value).sum()
    optimizer.apply([torch.ones(4)], [variable], scaled=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_skipped_step_leaves_autograd_graph_usable():
    variable, optimizer = wrapped("Adam")
    loss = (variable.value * variable.value).sum()
    optimizer.apply([torch.full((4,), torch.inf)], [variable], scaled=True)
    loss.backward()
    assert variable.value.grad.tolist() == [2.0, 4.0, 6.0, 8.0]


@every_kind
def test_step_increments_version_counters_of_slots(kind):
    variable, optimizer = wrapped(kind)
    slots = [v for v in optimizer.inner_optimizer.variables if v.shape == (4,)]
    before = [v.value._version for v in slots]
    optimizer.apply([torch.ones(4)], [variable], scaled=True)
    assert all(v.value._version > b for v, b in zip(slots, before, strict=True))


def test_weights_created_in_inference_mode_are_updated():
    with torch.inference_mode():
        variable, optimizer = wrapped("Adam")
        optimizer.apply([torch.ones(4)], [variable], scaled=True)
        assert not np.allclose(variable.numpy(), [1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("kind", ["Adam", "RMSprop"])
def test_weight_that_gets_another_layout_has_other_views_of_memory(kind):
    shape = (4, 3, 2, 2)
    pairs = []
    for _ in range(2):
        variable = keras.Variable(np.ones(shape, "float32"))
        optimizer = LossScaleOptimizer(KINDS[kind](), initial_scale=4.0)
        optimizer.build([variable])
        pairs.append((optimizer, variable))
    for step in range(6):
        values = np.random.default_rng(step).normal(size=shape)
        for is_converted, (optimizer, variable) in enumerate(pairs):
            grad = torch.tensor(values, dtype=torch.float32)
            form = torch.contiguous_format
            if is_converted and step in (2, 3):
                form = torch.channels_last
            weight = variable.value
            weight.data = weight.data.contiguous(memory_format=form)
            grad = grad.contiguous(memory_format=form)
            optimizer.apply([grad], [variable], scaled=True)
    assert bits([pairs[0][1]]) == bits([pairs[1][1]])


@pytest.mark.parametrize("kind", ["Adam", "RMSprop"])
def test_gradients_of_any_kind_are_copied_to_same_memory(kind, monkeypatch):
    shapes = (2, 3), (5,), (), (0, 3)
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float32]
    addresses, copies_of = set(), torch_update.Memory.for_copies

    def look(*args):
        flat, copies = copies_of(*args)
        addresses.add(tuple(t.data_ptr() for t in (flat, *copies)))
        return flat, copies

    monkeypatch.setattr(torch_update.Memory, "for_copies", look)
    ends = []
    for in_order in (True, False):
        variables = [keras.Variable(np.ones(shape, "float32")) for shape in shapes]
        optimizer = LossScaleOptimizer(KINDS[kind](), initial_scale=4.0)
        optimizer.build(variables)
        addresses.clear()
        for i, dtype in enumerate(kinds):
            grads = [torch.full(s, 2.0 ** (i + j)) for j, s in enumerate(shapes)]
            grads = [g.to(dtype if in_order else torch.float32) for g in grads]
            # Memory from inference mode could not be written outside of it.
            with torch.inference_mode(i == 0):
                optimizer.apply(grads, variables, scaled=True)
        assert len(addresses) == 1
        ends.append(bits(variables))
    assert ends[0] == ends[1]


def strided(tensor):
    """The same numbers, with others between them."""
    return torch.stack([tensor, torch.full_like(tensor, 100.0)], -1)[..., 0]


def steps_of(kind, between, dtype="float32", count=3):
    """The weights after some steps, with `between` called after the first."""
    variable, optimizer = wrapped(kind, dtype)
    for step in range(count):
        grad = torch.arange(1.0, 5.0) * (step + 1)
        optimizer.apply([grad], [variable], scaled=True)
        if step == 0:
            between(variable, optimizer)
    return np.array(variable.numpy())


def replace(variables, layout):
    for variable in variables:
        if variable.shape == (4,):
            variable._value.data = layout(variable._value.data)


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_strided_weights_and_slots_step_like_contiguous_tensors(dtype, kind, way):
    expected = steps_of(kind, lambda variable, optimizer: None, dtype)
    targets = {
        "slots": lambda variable, optimizer: optimizer.inner_optimizer.variables,
        "weights": lambda variable, optimizer: [variable],
    }
    for name, of in targets.items():
        found = steps_of(kind, lambda *both, of=of: replace(of(*both), strided), dtype)
        # Keras's own step rounds otherwise.
        rtol = 2e-3 if dtype == "float16" else 1e-6
        np.testing.assert_allclose(found, expected, rtol=rtol, err_msg=name)


def negative(values):
    """A tensor that holds the negatives of these, and says so."""
    tensor = torch._neg_view(-torch.tensor(values))
    assert tensor.is_neg()
    assert tensor.is_contiguous()
    return tensor


@every_kind
def test_gradient_with_negative_bit_steps_like_plain_gradient(kind, way):
    ends = []
    for make in (torch.tensor, negative):
        variables = [keras.Variable(np.ones(n, "float32")) for n in (2, 20000)]
        optimizer = LossScaleOptimizer(KINDS[kind](), initial_scale=1.0)
        optimizer.build(variables)
        # At first none is: what a step decides once must not stay so.
        for grad in (torch.tensor([0.5, -2.0]), make([0.5, -2.0]), make([1.0, 3.0])):
            grads = [torch.ones(20000), grad]
            optimizer.apply(grads[::-1], variables, scaled=True)
            assert int(optimizer.skipped_steps) == 0
        ends.append(bits(variables))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "amsgrad", "LARS"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_module_cast_to_16_bits_after_build_is_rejected(dtype, kind):
    module = torch.nn.Linear(1, 1, bias=False)
    variable = keras.Variable(module.weight, name="kernel")
    optimizer = LossScaleOptimizer(KINDS[kind](), initial_scale=1.0)
    optimizer.build([variable])
    # The second time a plan would hold.
    for steps in range(2):
        grad = torch.ones(1, 1, dtype=module.weight.dtype)
        optimizer.apply([grad], [variable], scaled=True)
        module.to(dtype)
        before = bits([*optimizer.variables]), module.weight.tolist()
        for gradient in grad, grad.to(dtype):
            with pytest.raises(ValueError, match="'kernel' was made with dtype"):
                optimizer.apply([gradient], [variable], scaled=True)
        assert (bits([*optimizer.variables]), module.weight.tolist()) == before
        module.float()
        assert int(optimizer.iterations) == steps + 1


@pytest.mark.parametrize(
    "make, before, after",
    [
        (lambda _: LossScaleOptimizer(KINDS["SGD"]()), torch.float16, torch.bfloat16),
        (keras_lso.LARS, torch.float32, torch.float16),
        (keras_lso.LAMB, torch.float32, torch.float16),
        (keras_lso.NovoGrad, torch.float32, torch.float16),
    ],
)
def test_module_cast_after_build_is_rejected_by_masters_and_unwrapped_optimizers(
    make, before, after
):
    module = torch.nn.Linear(1, 1, bias=False).to(before)
    variable = keras.Variable(module.weight)
    optimizer = make(0.1)
    optimizer.build([variable])
    module.to(after)
    name = str(after).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"was cast to {name} since"):
        optimizer.apply([torch.ones(1, 1)], [variable])
