"""Faults of what serves older APIs."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="a class for older APIs is not found after a plain import",
        file="keras_lso/_core/late_classes.py",
        old=")[_registered_name",
        new=")[_name",
        tests="tests/test_import.py::test_a_config_of_a_class_for_older_apis_is_read_after_a_plain_import",
    ),
    Fault(
        name="a skipped step counts in global_step",
        file="keras_lso/compat/v1/mixed_precision/loss_scale_optimizer.py",
        old="self.last_step_applied",
        new="True",
        tests="tests/compat/test_v1.py::test_gradients_come_unscaled_and_are_applied",
    ),
    Fault(
        name="compute_gradients of TF1 returns them scaled",
        file="keras_lso/compat/v1/mixed_precision/loss_scale_optimizer.py",
        old="grads = self.get_unscaled_gradients(grads)",
        new="",
        tests="tests/compat/test_v1.py::test_gradients_come_unscaled_and_are_applied",
    ),
    Fault(
        name="clipping makes gradients that are not finite look finite",
        file="keras_lso/compat/open_seq2seq/_clipping.py",
        old="factor, norm - norm",
        new="factor, 0 * factor",
        tests="tests/compat/open_seq2seq/test_clipping.py::test_what_is_not_finite_does_not_become_so",
    ),
    Fault(
        name="Keras's own scaling is taken",
        file="keras_lso/compat/open_seq2seq/_making.py",
        old="is_keras_own or made.loss_scale_factor is not None",
        new="is_keras_own",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_keras_own_scaling_is_refused",
    ),
    Fault(
        name="a resumed RMSProp starts its average again",
        file="keras_lso/compat/open_seq2seq/_optimizer_names.py",
        old="if self.built:\n            return\n        super",
        new="super",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_a_resumed_rmsprop_goes_on",
    ),
    Fault(
        name="accumulators are not emptied",
        file="keras_lso/compat/open_seq2seq/_training_op.py",
        old='accumulator.assign(ops.zeros(accumulator.shape, "float32"))',
        new="pass",
        tests="tests/compat/open_seq2seq/test_optimize_loss.py::test_accumulators_are_the_mean_so_far_at_every_step",
    ),
    Fault(
        name="a step that was traced for other gradients is used again",
        file="keras_lso/compat/open_seq2seq/_training_op.py",
        old=", *self._has_gradient",
        new="",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_batches_of_two_kinds_accumulate_for_two_variables",
        backend="jax",
    ),
    Fault(
        name="the training op's gradients are unscaled twice",
        file="keras_lso/compat/open_seq2seq/_training_op.py",
        old='} if self._scaler is None else {"scaled": False}',
        new="}",
        tests="tests/compat/open_seq2seq/test_optimize_loss.py::test_a_mixed_step_is_the_float32_one_of_the_masters",
    ),
    Fault(
        name="a v1 name leads to Keras's class",
        file="keras_lso/compat/v1/keras/mixed_precision/__init__.py",
        old="keras_lso.mixed_precision import LossScaleOptimizer,",
        new="keras.optimizers import LossScaleOptimizer\n\nfrom keras_lso.mixed_precision import",
        tests="tests/mixed_precision/test_experimental.py::test_the_modern_names_of_tensorflow_lead_to_ours",
    ),
    Fault(
        name="a model that looks built is trained in part",
        file="keras_lso/compat/open_seq2seq/_training_op.py",
        old='built and all(map(_is_built, getattr(layer, "layers", [])))',
        new="built",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_a_model_that_looks_built_is_not",
    ),
]
