"""The float32 numbers of 16-bit weights on TensorFlow, outside XLA.

TensorFlow's kernels update resource variables. If no variable holds the number, a
kernel gets a variable for a single step. TensorFlow lends it the memory of the number.
"""

import itertools

import tensorflow as tf

# With this name, each operation makes its own resource, which ends with the last
# reference to it.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"
# A function that was loaded from a `SavedModel` has another name in its place. All its
# resources would then be the same if their containers did not differ.
_containers = map("keras_lso_{}".format, itertools.count())


class Number:
    """The float32 number that the kernel of a rule steps on.

    Args:
        framework: `Framework`.
        variable: Item of `Targets.variables`.
        narrow: The `Narrow` of that variable, or None.

    Attributes:
        handle: The handle of a resource variable that holds the number.
    """

    def __init__(self, framework, variable, narrow):
        self._framework, self._narrow = framework, narrow
        if narrow is None:
            self.handle = variable.value.handle
        elif narrow.kind.keeps_number:
            self.handle = narrow.kept.value.handle
        else:
            self.handle = _holding(narrow.number(framework))

    def parts(self, iterations):
        """Returns tuples of a variable and a tensor to assign to it after the step.

        Args:
            iterations: Integer scalar tensor, the number of the step, or None.
        """
        narrow = self._narrow
        if narrow is None:
            return []
        number = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=tf.float32)
        parts = narrow.parts(self._framework, number, iterations)
        return parts[:1] if narrow.kind.keeps_number else parts


def _holding(value):
    """Returns the handle of a new variable that holds a tensor."""
    handle = tf.raw_ops.VarHandleOp(
        dtype=value.dtype,
        shape=value.shape,
        shared_name=_ANONYMOUS,
        # In eager execution TensorFlow keeps a kernel for each container.
        container="" if tf.executing_eagerly() else next(_containers),
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return handle


# --- Stand-ins ----------------------------------------------------------------------


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
