"""Faults of what serves older APIs."""

from tools.faults.fault import Fault

FAULTS = [
    Fault(
        name="a class for older APIs is not found after a plain import",
        file="keras_lso/_core/late_classes.py",
        old=")[_registered_name",
        new=")[_name",
        tests="tests/test_import.py::test_config_of_compat_class_deserializes_after_plain_import",
    ),
    Fault(
        name="a skipped step counts in global_step",
        file="keras_lso/compat/v1/mixed_precision/loss_scale_optimizer.py",
        old="self.last_step_applied",
        new="True",
        tests="tests/compat/test_v1.py::test_compute_gradients_unscales_and_apply_gradients_applies",
    ),
    Fault(
        name="compute_gradients of TF1 returns them scaled",
        file="keras_lso/compat/v1/mixed_precision/loss_scale_optimizer.py",
        old="grads = self.get_unscaled_gradients(grads)",
        new="",
        tests="tests/compat/test_v1.py::test_compute_gradients_unscales_and_apply_gradients_applies",
    ),
    Fault(
        name="clipping makes gradients that are not finite look finite",
        file="keras_lso/compat/open_seq2seq/_clipping.py",
        old="factor, norm - norm",
        new="factor, 0 * factor",
        tests="tests/compat/open_seq2seq/test_clipping.py::test_clipping_with_non_finite_norm_leaves_no_finite_value",
    ),
    Fault(
        name="Keras's own scaling is taken",
        file="keras_lso/compat/open_seq2seq/_making.py",
        old="is_keras_own or made.loss_scale_factor is not None",
        new="is_keras_own",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_loss_scaling_by_keras_optimizer_is_rejected",
    ),
    Fault(
        name="a resumed RMSProp starts its average again",
        file="keras_lso/compat/open_seq2seq/_optimizer_names.py",
        old="if self.built:\n            return\n        super",
        new="super",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_resumed_rmsprop_matches_uninterrupted_run",
    ),
    Fault(
        name="accumulators are not emptied",
        file="keras_lso/compat/open_seq2seq/_training_op.py",
        old='accumulator.assign(ops.zeros(accumulator.shape, "float32"))',
        new="pass",
        tests="tests/compat/open_seq2seq/test_optimize_loss.py::test_accumulator_holds_partial_mean_of_gradients_at_every_step",
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
        tests="tests/compat/open_seq2seq/test_optimize_loss.py::test_mixed_step_matches_float32_step_up_to_rounding",
    ),
    Fault(
        name="a v1 name leads to Keras's class",
        file="keras_lso/compat/v1/keras/mixed_precision/__init__.py",
        old="keras_lso.mixed_precision import LossScaleOptimizer,",
        new="keras.optimizers import LossScaleOptimizer\n\nfrom keras_lso.mixed_precision import",
        tests="tests/mixed_precision/test_experimental.py::test_compat_module_exports_modern_class_and_state_loader",
    ),
    Fault(
        name="a model that looks built is trained in part",
        file="keras_lso/compat/open_seq2seq/_training_op.py",
        old='built and all(map(_is_built, getattr(layer, "layers", [])))',
        new="built",
        tests="tests/compat/open_seq2seq/test_training_op.py::test_unbuilt_model_that_claims_to_be_built_is_trained_whole",
    ),
]
