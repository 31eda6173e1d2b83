"""The functions of a framework that no step calls, with their defaults."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops

from keras_lso._backend.tensors import Grads, Tensor, Variables

# Returns the loss, a tensor of any shape, whose sum is differentiated.
Loss: TypeAlias = Callable[[], Tensor]
# The variables, or a function that returns them after the loss was computed.
Trained: TypeAlias = Variables | Callable[[], Variables]


class Host:
    """What `minimize`, callbacks and reports need, among it facts for messages."""

    # For bug reports: how `run_if` runs a step.
    OTHER_STEP = "none: this backend trains nothing"
    # How a custom training step scales its loss.
    HOW_TO_SCALE = "    loss = optimizer.scale_loss(loss)"
    # Whether the loop of a recurrent layer is compiled: its cell then sees no values.
    COMPILES_LOOPS = True

    def compute_gradients(
        self, loss_fn: Loss, variables: Trained, grad_loss: Any = None, tape: Any = None
    ) -> tuple[Tensor, Grads]:
        """Returns a loss and its gradients.

        `loss_fn` may assign variables. `grad_loss` weights the elements of the loss.
        `tape` is a `tf.GradientTape`, which may have recorded a part of the loss.
        """
        raise NotImplementedError(
            "keras_lso differentiates no loss with the Keras backend "
            f"{keras.backend.backend()!r}. Pass gradients to `apply`, or set "
            "KERAS_BACKEND to 'tensorflow', 'jax' or 'torch'."
        )

    def differentiate(
        self,
        loss: Tensor,
        variables: Any,
        transform: Callable[[Tensor], Tensor],
        grad_loss: Any = None,
        tape: Any = None,
    ) -> Grads:
        """Returns the gradients of `transform(loss)`, whose history was recorded."""
        # For the other arguments see `compute_gradients`.
        args = variables, grad_loss, tape
        _, grads = self.compute_gradients(lambda: transform(loss), *args)
        return grads

    def trained_variables(self, loss_fn: Loss) -> Variables:
        """Returns the trainable variables that a loss reads, in order."""
        # Its assignments are discarded. Variables that it creates, as layers do,
        # persist.
        try:
            with RecordingScope() as scope:
                self._run(loss_fn)
        except ValueError:
            # Keras does not create a variable from an initial value in a scope.
            loss_fn()
            with RecordingScope() as scope:
                self._run(loss_fn)
        return [v for v in scope.read.values() if v.trainable]

    def _run(self, loss_fn: Loss) -> None:
        """Calls a loss for the variables that it reads."""
        loss_fn()

    @contextlib.contextmanager
    def outside_of_functions(self, like: Any = None) -> Iterator[None]:
        """Returns a context outside `tf.function`s, in the name scope of `like`."""
        # It also decorates functions.
        yield

    def shown(
        self, data: Iterable, show: Callable[[Any], None], steps_per_execution: int
    ) -> Iterable:
        """Returns the batches for a train function; calls `show` on each one first.

        Raises a `ValueError` if the function takes batches that cannot be seen.
        """
        if isinstance(data, list):
            for batch in data:
                show(batch)
            return data

        def batches() -> Iterator:
            for batch in data:
                show(batch)
                yield batch

        return batches()

    def register_list_class(self, cls: type[list]) -> None:
        """Registers `cls` as a list for the framework's functions on structures."""
        return

    def to_host(self, value: Tensor) -> Any:
        """Returns a copy of the whole tensor in host memory, an array."""
        # If several processes hold shards of it, all of them must call this method.
        # A copy: on a CPU the array may share the memory of a variable.
        return np.array(ops.convert_to_numpy(value))

    def devices(self) -> list[str]:
        """Returns the names of the devices that the framework sees, a list."""
        return []

    def hardware_of(self, value: Any) -> str | None:
        """Returns the hardware that a tensor is on: `"cpu"`, `"tpu"` or `"gpu:7.5"`."""
        # The number is the compute capability. None means that the fast dtypes of the
        # device are unknown, as on GPUs of other makers.
        return "cpu"

    def preserve_random_state(self) -> AbstractContextManager:
        """Returns a context that restores the framework's own random numbers."""
        return contextlib.nullcontext()

    def casts_to_float16(self) -> str | None:
        """Returns the setting by which ops use float16 under any dtype policy."""
        return None

    def is_constant(self, value: Any, result: Any) -> bool:
        """Whether a function that is traced computes `result` of a constant `value`."""
        return False

    def has_values(self, value: Tensor) -> bool:
        """Whether a tensor holds numbers that can be read. A traced tensor does not."""
        return True

    def is_deleted(self, value: Tensor) -> bool:
        """Whether a tensor has lost its memory to a step that has failed."""
        return False

    def reference_to(self, value: Tensor) -> weakref.ref | None:
        """Returns a weak reference, None where what is kept leaves a traced graph."""
        # NumPy's numbers take none.
        return None if isinstance(value, np.generic) else weakref.ref(value)


# --- Differentiation: the parts that backends share ---------------------------------


class RecordingScope(keras.StatelessScope):
    """A `StatelessScope` that records which variables are read and written in it."""

    def __init__(
        self, state_mapping: Iterable[tuple[keras.Variable, Tensor]] = ()
    ) -> None:
        # Otherwise Keras silently drops the losses that layers add.
        super().__init__(state_mapping, collect_losses=True)
        self.read: dict[int, keras.Variable] = {}
        self.written: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Tensor:
        """Returns the value in this scope, or else around it, or else its own."""
        self.read[id(variable)] = variable
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            value = self.original_scope.get_current_value(variable)
        if value is None:
            # Keras's weight regularizers ask the scope alone.
            with keras.StatelessScope():
                return variable.value
        return value

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        self.written[id(update[0])] = update[0]
        super().add_update(update)


def weights_of(loss: Tensor, grad_loss: Any) -> Tensor:
    """Returns the weights of the loss's elements, a tensor like the loss."""
    if grad_loss is None:
        return ops.ones_like(loss)
    weights = ops.cast(ops.convert_to_tensor(grad_loss), loss.dtype)
    check_shape_of_weights(loss.shape, weights.shape)
    return ops.broadcast_to(weights, loss.shape)


def check_shape_of_weights(loss_shape: Iterable[int], shape: Iterable[int]) -> None:
    """Raises a `ValueError` if `grad_loss` cannot be broadcast to the loss's shape."""
    loss_shape, shape = tuple(loss_shape), tuple(shape)
    is_shorter = len(shape) <= len(loss_shape)
    aligned = zip(reversed(shape), reversed(loss_shape), strict=False)
    if not is_shorter or any(size not in (1, of_loss) for size, of_loss in aligned):
        raise ValueError(
            f"Argument `grad_loss` must have the loss's shape, {loss_shape}. "
            f"Received one of shape {shape}."
        )


def refuse_tape(tape: Any) -> None:
    """Raises a `ValueError` for a `tf.GradientTape` on the other backends."""
    if tape is not None:
        raise ValueError(
            "A `tape` is TensorFlow's: this Keras backend has none, and does not need "
            "it. Pass a `loss` without arguments to be called, and no `tape`. "
            f"Received: tape={tape!r}"
        )
