"""Faults of the TensorFlow backend: kernels, graphs, replicas and processes."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="gradients that overflow only when unscaled are finite to TensorFlow",
        file="keras_lso/backend/_tensorflow.py",
        old="tf.reduce_all(tf.math.is_finite(tf.stack(proofs))) & (inv_scale <= 1.0)",
        new="tf.reduce_all(tf.math.is_finite(tf.stack(proofs)))",
        tests="tests/backend/test_primitives.py::test_measuring_is_the_same_when_compiled",
        backend="tensorflow",
    ),
    Fault(
        name="rows that overflow only when added up are finite",
        file="keras_lso/backend/_tensorflow.py",
        old="return tf.math.unsorted_segment_sum(grad.values, positions, tf.size(indices))",
        new="return grad.values",
        tests="tests/backend/test_primitives.py::test_the_largest_magnitude_adds_up_rows_that_come_twice",
        backend="tensorflow",
    ),
    Fault(
        name="infinities that cancel are a proof",
        file="keras_lso/backend/_tensorflow.py",
        old="return tf.reduce_sum(tf.cast(values, tf.float32))",
        new="return 0.0 * tf.reduce_sum(tf.ones_like(values, tf.float32))",
        tests="tests/backend/test_primitives.py::test_one_bad_element_anywhere_is_found",
        backend="tensorflow",
    ),
    Fault(
        name="gradients are averaged over the replicas",
        file="keras_lso/backend/_tensorflow.py",
        old="functools.partial(context.all_reduce, tf.distribute.ReduceOp.SUM)",
        new="functools.partial(context.all_reduce, tf.distribute.ReduceOp.MEAN)",
        tests="integration_tests/distributed/test_tensorflow_replicas.py::test_an_overflow_on_any_replica_skips_the_step_on_all",
        backend="tensorflow",
    ),
    Fault(
        name="what was made outside of a strategy's scope is trained",
        file="keras_lso/backend/_tensorflow.py",
        old="if strategy.num_replicas_in_sync == 1 or not isinstance(strategy, _MIRRORED):",
        new="if strategy.num_replicas_in_sync == 1 or isinstance(strategy, _MIRRORED):",
        tests="integration_tests/distributed/test_tensorflow_replicas.py::test_an_overflow_on_any_replica_skips_the_step_on_all",
        backend="tensorflow",
    ),
    Fault(
        name="a kernel takes a sparse gradient",
        file="keras_lso/backend/_tensorflow.py",
        old="        and not any(isinstance(g, tf.IndexedSlices) for g in gradients)\n",
        new="",
        tests="tests/backend/test_primitives.py::test_no_kernel_takes_a_sparse_gradient",
        backend="tensorflow",
    ),
    Fault(
        name="a fused step starts from an old master",
        file="keras_lso/backend/_tensorflow.py",
        old="        _restart(pairs)\n",
        new="",
        tests="tests/backend/test_primitives.py::test_fused_steps_of_masters_keep_their_variables_in_step",
        backend="tensorflow",
    ),
    Fault(
        name="a skipped step in a graph is applied",
        file="keras_lso/backend/_tensorflow.py",
        old="        tf.cond(finite, step, _nothing)\n",
        new="        step()\n",
        tests="tests/test_fast_paths.py::test_kernels_do_what_the_reference_does",
        backend="tensorflow",
    ),
]
