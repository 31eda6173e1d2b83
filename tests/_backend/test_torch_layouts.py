"""Weights in any dense layout step like contiguous ones, by the same kernels.

Values are compared by their places in the tensors, whatever their order in memory.
"""

import copy
import shutil

import keras
import numpy as np
import pytest

from keras_lso import LossScaleOptimizer
from testing import optimizers as table
from testing.harness import steps_by_rule

if keras.backend.backend() != "torch":
    pytest.skip("tensors of PyTorch", allow_module_level=True)

import torch

from benchmarks.accelerators.meta import Kernels, as_accelerator
from keras_lso._backend.torch import compiled, layouts
from keras_lso._backend.torch import masters as torch_masters

# One is a chunk of its own, and one is contiguous in channels_last as well. PyTorch's
# kernel of Adam on a CPU rounds the last elements otherwise if 16 does not divide their
# number, and which are the last in memory depends on the layout.
SHAPES = [(64, 32, 3, 3), (16, 4, 3, 3), (32, 17), (16, 1, 3, 3), (16,), ()]
KINDS = {
    "float32": ("float32", {}),
    "moments": ("float32", {"slot_dtype": "bfloat16"}),
    "masters": ("float16", {"master_weights": "float32"}),
    "remainders": ("bfloat16", {"master_weights": "remainder"}),
    "short remainders": ("bfloat16", {"master_weights": "remainder8"}),
    "stochastic": ("bfloat16", {"master_weights": "stochastic"}),
    "all in bfloat16": (
        "bfloat16",
        {"master_weights": "stochastic", "slot_dtype": "bfloat16"},
    ),
}
# Weights that are large enough for slots in 8 bits, and one that is not.
WITH_BLOCKS = {
    "int8": ("float32", {"slot_dtype": "int8"}),
    "24 bits, int8": (
        "bfloat16",
        {"master_weights": "remainder8", "slot_dtype": "int8"},
    ),
}
SHAPES_OF_BLOCKS = [(3, 3, 8, 64), (64, 64), (32, 17)]
OPTIMIZERS = table.OPTIMIZERS
ELEMENTWISE = [n for n in OPTIMIZERS if n not in [*table.WITH_NORMS, "muon"]]


def transposed(tensor):
    """The same numbers, with the dimensions in reverse in memory."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def channels_last(tensor):
    """The same numbers, as guides for convolutions in 16 bits lay them out."""
    if tensor.dim() != 4:
        return transposed(tensor)
    return tensor.contiguous(memory_format=torch.channels_last)


def expanded(tensor):
    """A tensor whose elements share memory, as a gradient may."""
    return tensor.flatten()[5 % tensor.numel()].expand(tensor.shape)


contiguous = torch.Tensor.contiguous
LAYOUTS = {"channels_last": channels_last, "transposed": transposed}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def lay_out(variables, layout):
    """Converts tensors in place, as `torch.nn.Module.to` does."""
    for variable in variables:
        variable.value.data = layout(variable.value.data)


def make(name, **options):
    rate = 0.1 if name.startswith(("lars", "lamb", "novo")) else 0.01
    decay = table.decaying(OPTIMIZERS[name])
    return OPTIMIZERS[name](rate, **decay, **options)


class Training:
    """Weights in a layout, and the optimizer that was built for them."""

    def __init__(self, kind, inner, layout, shapes=SHAPES):
        dtype, options = (KINDS | WITH_BLOCKS)[kind]
        self.random, self.layout = np.random.default_rng(0), layout
        arrays = [self.random.normal(size=shape) for shape in shapes]
        self.weights = [keras.Variable(a, dtype=dtype) for a in arrays]
        lay_out(self.weights, layout)
        self.optimizer = LossScaleOptimizer(inner, initial_scale=1.0, **options)
        self.optimizer.build(self.weights)

    def step(self, overflows=False, layout=None):
        grads = [
            torch.from_numpy(self.random.normal(size=w.shape)).to(w.value.dtype)
            for w in self.weights
        ]
        if overflows:
            grads[1].view(-1)[5] = torch.inf
        self.optimizer.apply(list(map(layout or self.layout, grads)), self.weights)

    def run(self, layout_of_gradients=None):
        """Takes five steps, of which the fourth is skipped; returns all values."""
        for step in range(5):
            self.step(step == 3, layout_of_gradients)
        assert int(self.optimizer.skipped_steps) == 1
        assert steps_by_rule(self.optimizer)
        return self.values

    @property
    def kept(self):
        """What the optimizer keeps for the first weight."""
        shape = self.weights[0].shape
        return [v.value for v in self.optimizer.variables if v.shape == shape]

    @property
    def values(self):
        tensors = [v.value for v in [*self.weights, *self.optimizer.variables]]
        # Without its expanded placeholders, which hold NaN.
        return [np.array(t.detach().double()) for t in tensors if 0 not in t.stride()]


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e, strict=True)


@pytest.mark.exhaustive
@each_layout
@each_kind
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_layout_changes_no_bit(name, kind, layout, way):
    if name == "adagrad" and "slot_dtype" in KINDS[kind][1]:
        pytest.skip("it has no moments")
    expected = Training(kind, make(name), contiguous).run()
    assert_same(Training(kind, make(name), layout).run(), expected)


@pytest.mark.skipif("muon" not in OPTIMIZERS, reason="Keras 3.12 has another Muon")
@each_kind
def test_muon_takes_convolutions_in_any_layout_but_no_transposed_matrix(kind, way):
    shapes = [s for s in SHAPES if len(s) != 2]
    expected, actual = (
        Training(kind, make("muon"), layout, [*shapes, (8, 12)])
        for layout in (
            contiguous,
            lambda t: channels_last(t) if t.dim() == 4 else t.contiguous(),
        )
    )
    assert_same(actual.run(), expected.run())
    lay_out(actual.weights[-1:], transposed)
    if kind in ("moments", "all in bfloat16"):
        with pytest.raises(ValueError, match="which cannot make this step"):
            actual.step()
        return
    actual.step()
    expected.step()
    # Its own step has other roundings, which masters in 16 bits round once more.
    ours, theirs = actual.values[len(shapes)], expected.values[len(shapes)]
    rtol = 1e-5 if kind == "float32" else 2**-7
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol)


@pytest.mark.exhaustive
@each_layout
@pytest.mark.parametrize("kind", ["float32", "masters"])
@pytest.mark.parametrize("name", table.WITH_NORMS)
def test_layout_changes_norms_by_rounding_alone(name, kind, layout, way):
    """They add up the squares in the order of memory: five roundings of float32."""
    rtol = {"float32": 5 * 2**-23, "masters": 2**-10}[kind]
    expected = Training(kind, make(name), contiguous).run()
    for a, e in zip(Training(kind, make(name), layout).run(), expected, strict=True):
        size = np.abs(e).max(initial=0)
        np.testing.assert_allclose(a, e, rtol=0, atol=rtol * size, strict=True)


@pytest.mark.parametrize("name", ["sgd", "nadam", "rmsprop", "adagrad"])
def test_float32_step_is_bitwise_that_of_inner_optimizer(name, way):
    ours, theirs = (
        Training("float32", OPTIMIZERS[name](0.01), channels_last) for _ in range(2)
    )
    theirs.optimizer = theirs.optimizer.inner_optimizer
    for training in (ours, theirs):
        for _ in range(4):
            training.step()
    assert_same(ours.values[: len(SHAPES)], theirs.values[: len(SHAPES)])


@each_kind
def test_weights_that_are_converted_later_go_on(kind, way):
    expected, training = (Training(kind, make("adam"), contiguous) for _ in range(2))
    for layout in (contiguous, channels_last, transposed, contiguous):
        lay_out(training.weights, layout)
        training.step(layout=layout)
        expected.step()
        assert {t.stride() for t in training.kept} == {
            training.weights[0].value.stride()
        }
    assert_same(training.values, expected.values)


@pytest.mark.exhaustive
@each_kind
@pytest.mark.parametrize("of_gradients", [contiguous, transposed, expanded])
def test_gradients_may_have_another_layout(of_gradients, kind, way):
    def in_order(gradient):
        return of_gradients(gradient).contiguous()

    expected = Training(kind, make("adamw"), contiguous).run(in_order)
    found = Training(kind, make("adamw"), channels_last).run(of_gradients)
    assert_same(found, expected)


@pytest.mark.exhaustive
@each_kind
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        {"use_ema": True, "gradient_accumulation_steps": 2},
        {"clipvalue": 0.5},
    ],
    ids=lambda options: " ".join(options),
)
def test_sums_and_averages_have_layout_of_weights(options, kind, way):
    expected = Training(kind, make("adam", **options), contiguous).run()
    training = Training(kind, make("adam", **options), channels_last)
    assert_same(training.run(), expected)
    training.step()
    assert {t.stride() for t in training.kept} == {training.weights[0].value.stride()}


@pytest.mark.parametrize("options", [{"clipnorm": 1.0}, {"global_clipnorm": 1.0}])
def test_clipped_steps_differ_by_rounding_of_norm(options, way):
    """By one rounding of float32 in a factor, where the moments may amplify it."""
    expected = Training("float32", make("momentum", **options), contiguous).run()
    found = Training("float32", make("momentum", **options), channels_last).run()
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-7)


@each_kind
def test_only_first_step_lays_out(kind, way):
    training = Training(kind, make("adam"), channels_last)
    training.step()
    before = [t.data_ptr() for t in training.kept]
    training.step()
    assert [t.data_ptr() for t in training.kept] == before


@pytest.mark.parametrize("kind", ["float32", "masters", "all in bfloat16"])
def test_state_is_loaded_into_any_layout(kind, way):
    saved, loaded = (
        Training(kind, make("adam"), layout) for layout in (channels_last, contiguous)
    )
    for _ in range(2):
        saved.step()
    state: dict = {}
    saved.optimizer.save_own_variables(state)
    loaded.step()
    for new, old in zip(loaded.weights, saved.weights, strict=True):
        new.assign(old)
    loaded.optimizer.load_own_variables(state)
    loaded.random = copy.deepcopy(saved.random)
    for training in (saved, loaded):
        training.step()
    assert_same(loaded.values, saved.values)


@each_kind
def test_stateless_step_leaves_its_arguments_as_they_are(kind, way):
    training = Training(kind, make("adam"), channels_last)
    optimizer, weights = training.optimizer, training.weights
    expected = Training(kind, make("adam"), channels_last)
    values = [v.value.detach().clone() for v in weights]
    state = [v.value.detach().clone() for v in optimizer.variables]
    strides = [t.stride() for t in state]
    grads = [channels_last(torch.ones_like(v)) for v in values]
    new, _ = optimizer.stateless_apply(state, grads, values)
    expected.optimizer.apply(grads, expected.weights)
    for a, e in zip(new, expected.weights, strict=True):
        assert torch.equal(a, e.value)
    assert [t.stride() for t in state] == strides
    assert_same(training.values, Training(kind, make("adam"), channels_last).values)


@each_kind
def test_tensors_of_step_in_inference_mode_can_be_written_later(kind, way):
    training, expected = (
        Training(kind, make("adam"), layout) for layout in (channels_last, contiguous)
    )
    with torch.inference_mode():
        training.step()
    assert not any(t.is_inference() for t in training.kept)
    training.step()
    expected.step()
    expected.step()
    assert_same(training.values, expected.values)


def test_masters_on_accelerator_are_compared_only_in_first_step(monkeypatch):
    monkeypatch.setattr(
        "keras_lso._backend.torch.measure.is_on_host", lambda tensor: False
    )
    calls = []
    compare = torch_masters._resynchronise_all
    monkeypatch.setattr(
        torch_masters, "_resynchronise_all", lambda *a: (calls.append(1), compare(*a))
    )
    training = Training("masters", make("adam"), channels_last)
    for _ in range(3):
        training.step()
    # The chunk is compared once more after an assignment.
    assert len(calls) == 1
    training.weights[0].assign(training.weights[0] * 2)
    training.step()
    assert len(calls) == 2


def test_graph_does_not_record_that_tensors_are_laid_out(monkeypatch):
    """A replay would restore what they held."""
    training = Training("float32", make("adam"), channels_last)
    monkeypatch.setattr(layouts, "is_recorded", lambda: True)
    before = training.values
    with pytest.raises(RuntimeError, match="Take one step before"):
        training.step()
    assert_same(training.values[: len(SHAPES)], before[: len(SHAPES)])
    monkeypatch.setattr(layouts, "is_recorded", lambda: False)
    training.step()
    monkeypatch.setattr(layouts, "is_recorded", lambda: True)
    training.step()


@pytest.mark.parametrize("kind", ["float32", "masters", "remainders"])
@pytest.mark.parametrize("name", ["momentum", "adamw", "lamb"])
def test_step_launches_kernels_of_contiguous_weights(name, kind):
    counts = []
    for layout in (contiguous, channels_last):
        with as_accelerator(), torch.device("meta"):
            training = Training(kind, make(name), layout)
            grads = [layout(torch.zeros_like(w.value)) for w in training.weights]
            with torch.no_grad():
                training.optimizer.apply(grads, training.weights)
                with Kernels() as kernels:
                    training.optimizer.apply(grads, training.weights)
        counts.append((kernels.calls, kernels.bytes))
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a compiler")
@pytest.mark.parametrize("kind", ["remainders", "all in bfloat16"])
def test_layout_changes_no_bit_of_compiled_step(kind, way, monkeypatch):
    monkeypatch.setattr(compiled, "IS_ON", True)
    expected = Training(kind, make("adam"), contiguous).run()
    assert_same(Training(kind, make("adam"), channels_last).run(), expected)
    assert not compiled._has_failed


# --- Slots in 8 bits, whose blocks are parts of rows ----------------------------------


def codes_of(training):
    inner = training.optimizer.inner_optimizer
    return [v.dtype for v in inner.variables if v.dtype in ("int8", "uint8")]


@each_layout
@pytest.mark.parametrize("kind", WITH_BLOCKS)
def test_weights_whose_rows_are_no_neighbours_have_bfloat16_slots(kind, layout, way):
    shapes = SHAPES_OF_BLOCKS
    assert len(codes_of(Training(kind, make("adam"), contiguous, shapes))) == 4
    training = Training(kind, make("adam"), layout, shapes)
    assert not codes_of(training)
    training.run()


@pytest.mark.parametrize("kind", WITH_BLOCKS)
@pytest.mark.parametrize("of_gradients", [transposed, expanded])
def test_gradients_of_slots_in_8_bits_may_have_another_layout(kind, of_gradients, way):
    shapes = SHAPES_OF_BLOCKS
    expected = Training(kind, make("adamw"), contiguous, shapes)
    found = Training(kind, make("adamw"), contiguous, shapes).run(of_gradients)
    assert_same(found, expected.run(lambda g: of_gradients(g).contiguous()))


@pytest.mark.parametrize("kind", WITH_BLOCKS)
def test_weight_between_others_may_be_transposed_at_build(kind, way):
    def mixed(tensor):
        return transposed(tensor) if tensor.dim() == 2 else tensor.contiguous()

    # No slot of the transposed weights is in 8 bits; the others' bits are the same.
    expected = Training(kind, make("adam"), contiguous, SHAPES_OF_BLOCKS)
    training = Training(kind, make("adam"), mixed, SHAPES_OF_BLOCKS)
    assert codes_of(training) == ["int8", "uint8"]
    for one in (expected, training):
        one.run()
    weights = [t.weights[0].value.detach().double() for t in (training, expected)]
    assert torch.equal(*weights)


@pytest.mark.parametrize("kind", WITH_BLOCKS)
def test_weight_of_slots_in_8_bits_that_is_converted_later_is_refused(kind, way):
    training = Training(kind, make("adam"), contiguous, SHAPES_OF_BLOCKS)
    expected = Training(kind, make("adam"), contiguous, SHAPES_OF_BLOCKS)
    training.step()
    expected.step()
    lay_out(training.weights, channels_last)
    before, random = training.values, copy.deepcopy(training.random)
    with pytest.raises(ValueError, match="parameter.data.contiguous"):
        training.step()
    assert_same(training.values, before)
    # What it says to write.
    lay_out(training.weights, contiguous)
    training.random = random
    training.step()
    expected.step()
    assert_same(training.values, expected.values)


# --- Dense tensors --------------------------------------------------------------------

_X = torch.arange(48.0).reshape(4, 6, 2)
DENSE = [_X, _X.permute(2, 0, 1), _X[:2], _X[:, :, None].transpose(1, 3), _X[:0, ::2]]
OTHERS = [_X[:, ::2], _X[..., :1], _X[:, :1].expand(4, 6, 2), _X.unfold(1, 3, 1)]


@pytest.mark.parametrize("tensor", DENSE)
def test_dense_tensors_are_recognised(tensor):
    assert layouts.are_dense([tensor])


@pytest.mark.parametrize("tensor", OTHERS)
def test_tensors_with_gaps_or_overlaps_are_not_dense(tensor):
    assert not layouts.are_dense([_X, tensor])


@pytest.mark.parametrize("tensors", [DENSE, [*DENSE, *OTHERS]])
def test_flat_tensors_have_elements_of_each(tensors):
    for flat, tensor in zip(layouts.flat(tensors), tensors, strict=True):
        assert flat.shape == (tensor.numel(),)
        assert flat.is_contiguous()
        assert sorted(flat.tolist()) == sorted(tensor.flatten().tolist())
