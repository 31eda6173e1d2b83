"""Faults of the TensorFlow backend: graphs, and sparse gradients."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="gradients that overflow only when unscaled are finite to TensorFlow",
        file="keras_lso/_backend/tensorflow/measure.py",
        old=") & (inv_scale <= 1.0)",
        new=")",
        tests="tests/_backend/test_measure.py::test_compiled_measure_finds_overflows_and_largest_magnitude",
        backend="tensorflow",
    ),
    Fault(
        name="rows that overflow only when added up are finite",
        file="keras_lso/_backend/tensorflow/framework.py",
        old="tf.math.unsorted_segment_sum(grad.values, rows, tf.size(indices))",
        new="grad.values",
        tests="tests/_backend/test_measure.py::test_largest_magnitude_of_sparse_gradient_sums_duplicate_rows",
        backend="tensorflow",
    ),
    Fault(
        name="infinities that cancel are a proof",
        file="keras_lso/_backend/tensorflow/measure.py",
        old="tf.reduce_sum(tf.cast",
        new="0.0 * tf.reduce_sum(tf.ones_like",
        tests="tests/_backend/test_measure.py::test_measure_finds_one_nonfinite_element_at_any_position",
        backend="tensorflow",
    ),
    Fault(
        name="a kernel takes a sparse gradient",
        file="keras_lso/_backend/tensorflow/framework.py",
        old="and not any(isinstance(g, tf.IndexedSlices) for g in gradients)",
        new="",
        tests="tests/_backend/test_fused_step.py::test_fused_step_does_not_accept_sparse_gradient",
        backend="tensorflow",
    ),
    Fault(
        name="a skipped step in a graph is applied",
        file="keras_lso/_backend/tensorflow/framework.py",
        old="tf.cond(found.finite, step, _nothing",
        new="step(",
        tests="tests/test_fast_paths.py::test_kernels_match_generic_path",
        backend="tensorflow",
    ),
]
