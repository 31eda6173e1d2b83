"""The float32 numbers of 16-bit weights on TensorFlow, outside XLA.

Its kernels update resource variables. Where no variable holds the number, a kernel gets
one of a single step: TensorFlow hands it the memory of the number, and takes it back.
"""

import itertools

import tensorflow as tf

# The name of a resource of its own for each operation that makes one, which ends with
# the last reference to it.
_ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"
# A function that was loaded from a `SavedModel` has another name in its place, which
# would make its resources one, if their containers did not differ.
_containers = map("keras_lso_{}".format, itertools.count())


class Number:
    """The float32 number that the kernel of a rule steps on.

    Args:
        framework: `Framework`.
        variable: What `Targets.variables` has.
        narrow: The `Narrow` weight that it is, or None.

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
        """Returns tuples of a variable and a tensor, to be assigned after the step.

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
        # Eagerly TensorFlow keeps a kernel for each.
        container="" if tf.executing_eagerly() else next(_containers),
    )
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    return handle


# --- Stand-ins ----------------------------------------------------------------------


def release(variable):
    """Takes the memory of a variable, which keeps its shape for whoever asks."""
    with tf.init_scope():
        for handle in _handles(variable):
            # No kernel that reads it as what it was would find enough.
            tf.raw_ops.AssignVariableOp(
                resource=handle, value=tf.zeros([0], variable.dtype)
            )


def allocate(variable):
    """Gives a variable its memory back, if it has none; called eagerly."""
    for handle in _handles(variable):
        held = tf.raw_ops.VariableShape(input=handle)
        if tuple(held.numpy()) != tuple(variable.shape):
            zeros = tf.zeros(variable.shape, variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)


def _handles(variable):
    """Returns the handles of the copies that replicas have of a variable."""
    copies = getattr(variable, "values", None)
    return [v.handle for v in (copies if isinstance(copies, tuple) else [variable])]
