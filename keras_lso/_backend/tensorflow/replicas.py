"""The replicas of a `tf.distribute.Strategy`."""

from typing import Any

import keras
import tensorflow as tf

from keras_lso._backend.replicas import Replicas
from keras_lso._backend.tensorflow.measure import in_xla, replica_context
from keras_lso._backend.tensors import Grads, Variables, map_by_dtype

# The strategies with a copy of each variable on each replica. A step that changes every
# copy alike communicates only the gradients.
_MIRRORED = tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy


class TensorFlowReplicas(Replicas):
    REDUCES_GRADIENTS = True

    def check_replica_context(self, method: str) -> None:
        if tf.distribute.in_cross_replica_context():
            raise RuntimeError(
                f"`{method}()` cannot be called in cross-replica context. Use "
                "`tf.distribute.Strategy.run` to enter replica context."
            )

    def check_accumulates(self, optimizer: keras.Optimizer) -> None:
        # Keras's branch calls `merge_call`.
        if replica_context() is not None and not tf.executing_eagerly():
            raise RuntimeError(
                "On several replicas a `tf.function` cannot run the "
                "`gradient_accumulation_steps` of an optimizer that steps by itself. "
                "Leave them out and use more replicas or a larger batch, or choose an "
                "optimizer with a fast path, such as `keras.optimizers.Adam`, and "
                "weights made by Keras in float32 or with masters. Nothing was "
                f"changed. Received: inner_optimizer={optimizer!r}"
            )

    def check_on_replicas(self, variables: Variables) -> None:
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync == 1 or not isinstance(strategy, _MIRRORED):
            return
        for v, variable in zip(variables, tf_variables(variables), strict=True):
            if not isinstance(variable, tf.distribute.DistributedValues):
                path = getattr(v, "path", v.name)  # TensorFlow's own have none.
                raise ValueError(
                    f"The variable {path!r} was not made in the strategy's scope: all "
                    "replicas would write to the same one, each its own step. Make the "
                    "model and the optimizer inside `with strategy.scope():`, and "
                    "call `optimizer.build(model.trainable_variables)` there."
                )

    def reduce_gradients(self, grads: Grads, axis_name: Any = None) -> Grads:
        context = replica_context()
        if context is None:
            return grads
        # `tf.cast` also casts sparse gradients.
        wide = [
            g if g is None or g.dtype == tf.float64 else tf.cast(g, tf.float32)
            for g in grads
        ]
        # TensorFlow packs the tensors of a list into one, which must have one dtype.
        total = tf.distribute.ReduceOp.SUM
        return map_by_dtype(lambda tensors: context.all_reduce(total, tensors), wide)


def are_on_each_replica(variables: Variables) -> bool:
    """Whether a step may change each replica's copies of these variables alike."""
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync == 1:
        return True
    return (
        isinstance(strategy, _MIRRORED)
        and not in_xla()
        and all(isinstance(v.value, tf.distribute.DistributedValues) for v in variables)
    )


def is_on_all_replicas(variable: tf.Variable) -> bool:
    """Whether no replica runs here, and each one has a copy of the variable."""
    context = (
        tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None
    )
    return context is None and isinstance(variable, tf.distribute.DistributedValues)


def tf_variables(variables: list) -> list[tf.Variable]:
    """Returns TensorFlow's own variables behind Keras's."""
    return [v.value if isinstance(v, keras.Variable) else v for v in variables]
