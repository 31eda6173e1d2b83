"""Watches a forward pass: the magnitudes that go into, through and out of each layer.

It wraps each layer's `call`, and each function of `keras.ops`, whose results are the
intermediate values of a layer. It is a diagnosis on the host, of an eager call. Tensors
inside a transformation of JAX (`jax.vmap`, `ops.scan`) have no values yet, and are left
out.
"""

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
from keras import ops, tree

from keras_lso._backend import backend
from keras_lso._keras_internals.layers import (
    BACKEND_OP_MODULES,
    OP_MODULES,
    is_cast,
    operations_of,
    own_variables_of,
)
from keras_lso.diagnostics.magnitudes import Reading, reading_of
from keras_lso.diagnostics.trial_runs import attribute_set

# Functions whose results have no values that their arguments do not have.
_MOVES = frozenset(
    """
    array broadcast_to cast cond concatenate convert_to_numpy convert_to_tensor copy
    diagonal expand_dims flip get_item moveaxis pad ravel repeat reshape scan shape
    slice slice_update split squeeze stack stop_gradient swapaxes switch take
    take_along_axis tile transpose unstack while_loop zeros zeros_like
    """.split()  # noqa: SIM905
)


def readings_of(
    layers: Iterable[keras.layers.Layer], run: Callable[[], object]
) -> tuple[dict[Any, Reading], Mapping[int, int]]:
    """Returns the readings of the layers from a call of `run()`.

    The layers are unchanged afterwards, even if `run` raises an error.

    Args:
        layers: List of layers, models included.
        run: Callable without arguments.

    Returns:
        Tuple of two dicts. The first has a `Reading` for each tuple of the id of the
        layer; "inputs", "weights", "outputs" or "ops"; the name of the op, or ""; and
        the index of the value among the values of that kind. The second has the number
        of calls for each id of a layer.
    """
    watcher = _Watcher()
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(watcher.of_layer(layer))
            for operation in operations_of(layer):
                stack.enter_context(watcher.of_operation(operation))
            if isinstance(layer, keras.layers.RNN):
                stack.enter_context(_unrolled(layer))
        stack.enter_context(watcher.of_ops())
        run()
    return watcher.readings, watcher.calls


class _Watcher:
    """The readings of one pass, and the stack of the layers being called."""

    def __init__(self) -> None:
        self.readings: dict[Any, Reading] = {}
        self.calls: Counter[int] = Counter()
        self._counts: Counter = Counter()
        self._called: list[keras.layers.Layer] = []
        self._is_reading = False
        # How many functions of ops are being called, one by the other.
        self._depth = 0

    def _read(self, kind, name, values):
        """Reads all floating-point tensors among some values."""
        if not self._called or self._is_reading:
            return
        # The lines below call ops themselves.
        self._is_reading = True
        try:
            for value in tree.flatten(values):
                if _has_floats(value):
                    key = id(self._called[-1]), kind, name
                    dtype = keras.backend.standardize_dtype(value.dtype)
                    array = ops.convert_to_numpy(value)
                    self.readings[*key, self._counts[key]] = reading_of(array, dtype)
                    self._counts[key] += 1
        finally:
            self._is_reading = False

    def _read_weights(self, layer):
        if self.calls[id(layer)] > 1:
            return
        for variable in filter(is_cast, own_variables_of(layer)):
            # Inside the layer's call, the variable is read in the layer's dtype.
            self._read("weights", "", variable.value)

    @contextlib.contextmanager
    def _calling(self, layer):
        self.calls[id(layer)] += 1
        self._called.append(layer)
        try:
            yield
        finally:
            self._called.pop()

    def of_layer(
        self, layer: keras.layers.Layer
    ) -> contextlib.AbstractContextManager[None]:
        call = layer.call

        def watched(*args, **kwargs):
            with self._calling(layer):
                self._read_weights(layer)
                self._read("inputs", "", (args, kwargs))
                outputs = call(*args, **kwargs)
                self._read("outputs", "", outputs)
            return outputs

        return attribute_set(layer, "call", watched)

    def of_operation(self, operation: Any) -> contextlib.AbstractContextManager[None]:
        call, name = operation.call, type(operation).__name__.lower()

        def watched(*args, **kwargs):
            outputs = call(*args, **kwargs)
            self._read("ops", name, outputs)
            return outputs

        return attribute_set(operation, "call", watched)

    @contextlib.contextmanager
    def of_ops(self) -> Iterator[None]:
        before = [
            (module, name, op)
            for module in (*OP_MODULES, *BACKEND_OP_MODULES)
            for name, op in vars(module).items()
            if inspect.isfunction(op) and name not in _MOVES
        ]
        try:
            for module, name, op in before:
                is_inner = module in BACKEND_OP_MODULES
                setattr(module, name, self._of_op(name, op, is_inner))
            yield
        finally:
            for module, name, op in before:
                setattr(module, name, op)

    def _of_op(self, name, op, is_inner):
        """Returns an op that is watched.

        Args:
            name: String.
            op: The function.
            is_inner: Bool. Whether it is the backend's, which other ops call as well.
        """

        @functools.wraps(op)
        def watched(*args, **kwargs):
            is_read = not (is_inner and self._depth)
            self._depth += 1
            try:
                outputs = op(*args, **kwargs)
            finally:
                self._depth -= 1
            if is_read:
                self._read("ops", name, outputs)
            return outputs

        return watched


def _has_floats(value):
    """Whether a value is a tensor of floats with values: a tracer of JAX has none."""
    is_float = ops.is_tensor(value) and keras.backend.is_float_dtype(value.dtype)
    return is_float and backend.has_values(value)


@contextlib.contextmanager
def _unrolled(rnn):
    """Makes a recurrent layer call its cell step by step, where values can be read.

    A loop of JAX has no values, and a fused kernel calls no cell. On PyTorch, Keras
    does not unroll a loop that goes backwards over a mask, and need not.
    """
    values = {"use_cudnn": False, "unroll": backend.COMPILES_LOOPS or rnn.unroll}
    before = {name: getattr(rnn, name) for name in values if hasattr(rnn, name)}
    try:
        for name in before:
            setattr(rnn, name, values[name])
        yield
    finally:
        for name, value in before.items():
            setattr(rnn, name, value)
