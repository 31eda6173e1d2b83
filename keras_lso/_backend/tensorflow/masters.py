"""The memory of stand-ins for 16-bit weights on TensorFlow."""

import tensorflow as tf


def release(variable):
    """Frees the memory of a variable, whose `shape` stays the same."""
    with tf.init_scope():
        for handle in _handles(variable):
            # A kernel that reads the variable as it was finds too few elements.
            tf.raw_ops.AssignVariableOp(
                resource=handle, value=tf.zeros([0], variable.dtype)
            )


def allocate(variable):
    """Gives a variable its memory back, if it was freed. Call it eagerly."""
    for handle in _handles(variable):
        held = tf.raw_ops.VariableShape(input=handle)
        if tuple(held.numpy()) != tuple(variable.shape):
            zeros = tf.zeros(variable.shape, variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)


def _handles(variable):
    """Returns the handles of a variable's copies on the replicas."""
    copies = getattr(variable, "values", None)
    return [v.handle for v in (copies if isinstance(copies, tuple) else [variable])]
