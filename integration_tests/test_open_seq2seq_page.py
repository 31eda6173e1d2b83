"""Every name of OpenSeq2Seq's page is there, with its arguments."""

import importlib

from keras_lso.compat import open_seq2seq
from testing.signatures import without_types

# What the page says of each function and class: its arguments and defaults.
SIGNATURES = {
    "optimizers._clip_by_global_norm": "t_list, clip_norm, use_norm, name=None",
    "optimizers._clip_gradients_by_norm": "grads_and_vars, clip_gradients",
    "optimizers.get_regularization_loss": (
        "scope=None, name='total_regularization_loss'"
    ),
    "optimizers.optimize_loss": (
        "loss, optimizer, optimizer_params, learning_rate_decay_fn, var_list=None, "
        "dtype='float32', clip_gradients=None, summaries=None, larc_params=None, "
        "loss_scaling=1.0, loss_scaling_params=None, on_horovod=False, iter_size=1, "
        "skip_update_ph=None, model=None"
    ),
    "mp_wrapper.MixedPrecisionOptimizerWrapper": "optimizer, loss_scale=None",
    "mp_wrapper.MixedPrecisionOptimizerWrapper.compute_gradients": (
        "self, loss, var_list=None, gate_gradients=1, aggregation_method=None, "
        "colocate_gradients_with_ops=False, grad_loss=None"
    ),
    "automatic_loss_scaler.AutomaticLossScaler": "algorithm='Backoff', params=None",
    "lr_policies.exp_decay": (
        "global_step, learning_rate, decay_steps, decay_rate, use_staircase_decay, "
        "begin_decay_at=0, min_lr=0.0"
    ),
    "lr_policies.fixed_lr": "global_step, learning_rate",
    "lr_policies.inv_poly_decay": (
        "global_step, learning_rate, decay_steps, min_lr, power=1.0, "
        "begin_decay_at=0, warmup_steps=0, name='learning_rate'"
    ),
    "lr_policies.piecewise_constant": (
        "global_step, learning_rate, boundaries, decay_rates, steps_per_epoch=None"
    ),
    "lr_policies.poly_decay": (
        "global_step, learning_rate, decay_steps, power=1.0, begin_decay_at=0, "
        "min_lr=0.0, warmup_steps=0"
    ),
    "lr_policies.transformer_policy": (
        "global_step, learning_rate, d_model, warmup_steps, max_lr=None, "
        "coefficient=1.0, dtype='float32'"
    ),
}
# Of which further arguments follow.
APPLY_GRADIENTS = "self, grads_and_vars, global_step=None, name=None"
# Attributes, and names that are in the code and not on the page.
OTHERS = {
    "automatic_loss_scaler.AutomaticLossScaler": (
        "SUPPORTED_ALGOS loss_scale update_op check_grads"
    ),
    "mp_wrapper.MixedPrecisionOptimizerWrapper": "apply_gradients minimize",
    "optimizers": "OPTIMIZER_CLS_NAMES OPTIMIZER_SUMMARIES",
    "lr_policies": "cosine_decay",
}


def resolve(name):
    found = open_seq2seq
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_signatures_match_open_seq2seq_page():
    for name, signature in SIGNATURES.items():
        assert without_types(resolve(name)) == f"({signature})", name
    method = open_seq2seq.MixedPrecisionOptimizerWrapper.apply_gradients
    assert without_types(method).startswith(f"({APPLY_GRADIENTS}")


def test_classes_have_other_names_on_page():
    made = {
        "automatic_loss_scaler.AutomaticLossScaler": open_seq2seq.AutomaticLossScaler()
    }
    for owner, names in OTHERS.items():
        for name in names.split():
            assert hasattr(made.get(owner, resolve(owner)), name), name


def test_package_exports_every_name_of_its_modules():
    for name in SIGNATURES:
        module, last = name.split(".", 1)
        importlib.import_module(f"keras_lso.compat.open_seq2seq.{module}")
        if "." not in last:
            assert getattr(open_seq2seq, last) is resolve(name)
