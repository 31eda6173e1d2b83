"""The functions of replicas and of shards, with their defaults."""

from collections.abc import Iterable
from typing import Any

import keras

from keras_lso._backend.tensors import Grads, Tensor, Variables


class Replicas:
    """The functions where there is one replica, and no tensor is sharded."""

    # Whether a step calls `reduce_gradients` and `are_shards`.
    REDUCES_GRADIENTS = False
    # What to say of `shard_state` on a backend that does not have it.
    INSTEAD_OF_SHARD_STATE = "Each replica of a strategy keeps the whole state."

    def reduce_gradients(self, grads: Grads, axis_name: Any = None) -> Grads:
        """Returns the gradients, reduced over the replicas that apply them together."""
        # They are sums on TensorFlow and means over `axis_name` on JAX, in float32 or
        # wider.
        return grads

    def over_shards(self, value: Tensor, maximum: bool = False) -> Tensor:
        """Returns the sum, or the maximum, over the devices of a `jax.shard_map`."""
        return value

    def check_axis_name(self, axis_name: Any) -> None:
        """Raises a `ValueError` for an `axis_name` where there are no named axes."""
        if axis_name is not None:
            raise ValueError(
                "`axis_name` is an axis of `jax.shard_map` or `jax.pmap`, which this "
                "Keras backend does not have: leave it out. On TensorFlow the replicas "
                "of a `tf.distribute.Strategy` add up their gradients on their own; "
                "on PyTorch `DistributedDataParallel` has averaged them already. "
                f"Received: axis_name={axis_name!r}"
            )

    def check_shards_state(self) -> None:
        """Raises a `ValueError` where `shard_state=True` has no effect."""
        raise ValueError(
            "`shard_state=True` needs the JAX backend, with a `keras.distribution`. "
            f"{self.INSTEAD_OF_SHARD_STATE} Leave it out; of a saved model, call "
            "`load_model(..., compile=False)` and compile it again. Received: "
            f"shard_state=True on the backend {keras.backend.backend()!r}"
        )

    def check_replica_context(self, method: str) -> None:
        """Raises a `RuntimeError` if `method` is called in a cross-replica context."""
        return

    def check_accumulates(self, optimizer: keras.Optimizer) -> None:
        """Raises a `RuntimeError` if an optimizer's own accumulation fails here."""
        return

    def check_on_replicas(self, variables: Variables) -> None:
        """Raises a `ValueError` for a variable without a copy on each replica."""
        return

    def sharded_like(self, value: Tensor, like: Tensor) -> Tensor:
        """Returns a whole tensor, sharded like `like` if both have the same shape."""
        return value

    def layout_of(self, value: Tensor) -> Any:
        """Returns the layout of a shard, as Keras's variables take it, or None."""
        return None

    def keeps_rows(self, value: Tensor) -> bool:
        """Whether the numbers of a last axis are neighbours in memory, on a device."""
        return True

    def are_shards(self, grads: Grads, variables: Variables) -> bool:
        """Whether gradients are shards in `jax.shard_map`; refuses a mixture."""
        return False

    def sharded_alike(
        self, grads: Grads, variables: Variables, values: Iterable[Tensor]
    ) -> Grads:
        """Returns gradients that are sharded like their variables, which hold `values`.

        In `fit`, those that are not are redistributed. It raises an error if a step
        would make processes diverge: if only one of variable and gradient is sharded,
        or only the variable's layer.
        """
        return grads
