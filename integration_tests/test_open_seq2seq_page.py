"""The functions and classes of OpenSeq2Seq's page, with its arguments.

`tests/public_names.txt` has their other attributes, and the names in the package.
"""

import operator

from keras_lso.compat import open_seq2seq
from testing.signatures import without_types

# The arguments and defaults of each function and class, from the page.
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


def test_signatures_match_open_seq2seq_page():
    for name, signature in SIGNATURES.items():
        member = operator.attrgetter(name)(open_seq2seq)
        assert without_types(member) == f"({signature})", name
    method = open_seq2seq.MixedPrecisionOptimizerWrapper.apply_gradients
    arguments = "(self, grads_and_vars, global_step=None, name=None"
    assert without_types(method).startswith(arguments)  # It has more.
