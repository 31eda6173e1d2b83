"""OpenSeq2Seq's learning-rate policies as functions of the step.

Each is the class of `keras_lso.schedules` that its docstring names, called with the
step: there are the formula, a table of values and what is refused. To give a policy
to an optimizer, take the class.
"""

from keras_lso import schedules

__all__ = [
    "cosine_decay",
    "exp_decay",
    "fixed_lr",
    "inv_poly_decay",
    "piecewise_constant",
    "poly_decay",
    "transformer_policy",
]


def fixed_lr(global_step, learning_rate):
    """Returns the same rate at every step.

    Args:
        global_step: Ignored.
        learning_rate: See `keras_lso.schedules.FixedLR`.

    Returns:
        The learning rate, a float32 scalar.

    Example:

    >>> from keras_lso.compat.open_seq2seq import lr_policies
    >>> [float(lr_policies.fixed_lr(step, 0.25)) for step in (0, 1, 2)]
    [0.25, 0.25, 0.25]
    """
    return schedules.FixedLR(learning_rate)(global_step)


def piecewise_constant(
    global_step, learning_rate, boundaries, decay_rates, steps_per_epoch=None
):
    """Returns a rate that changes at some steps or epochs.

    Args:
        global_step: Int, or a tensor of one. The step, from 0.
        learning_rate: See `keras_lso.schedules.PiecewiseConstant`, also for the rest.
        boundaries: See there.
        decay_rates: See there.
        steps_per_epoch: See there. Defaults to `None`: the boundaries are steps.

    Returns:
        The learning rate, a float32 scalar.

    Example:

    >>> from keras_lso.compat.open_seq2seq import lr_policies
    >>> for step in range(4):
    ...     print(step, float(lr_policies.piecewise_constant(step, 1.0, [1], [0.25])))
    0 1.0
    1 1.0
    2 0.25
    3 0.25
    """
    policy = schedules.PiecewiseConstant(
        learning_rate, boundaries, decay_rates, steps_per_epoch
    )
    return policy(global_step)


def exp_decay(
    global_step,
    learning_rate,
    decay_steps,
    decay_rate,
    use_staircase_decay,
    begin_decay_at=0,
    min_lr=0.0,
):
    """Returns a rate that waits, then decays exponentially to a minimum.

    Args:
        global_step: Int, or a tensor of one. The step, from 0.
        learning_rate: See `keras_lso.schedules.ExpDecay`, also for the rest.
        decay_steps: See there.
        decay_rate: See there.
        use_staircase_decay: See there.
        begin_decay_at: See there. Defaults to `0`.
        min_lr: See there. Defaults to `0.0`.

    Returns:
        The learning rate, a float32 scalar.

    Example:

    >>> from keras_lso.compat.open_seq2seq import lr_policies
    >>> for step in range(4):
    ...     rate = lr_policies.exp_decay(step, 1.0, 1, 0.5, False, begin_decay_at=1)
    ...     print(step, f"{float(rate):.2f}")
    0 1.00
    1 1.00
    2 0.50
    3 0.25
    """
    policy = schedules.ExpDecay(
        learning_rate,
        decay_steps,
        decay_rate,
        use_staircase_decay,
        begin_decay_at,
        min_lr,
    )
    return policy(global_step)


def poly_decay(
    global_step,
    learning_rate,
    decay_steps,
    power=1.0,
    begin_decay_at=0,
    min_lr=0.0,
    warmup_steps=0,
):
    """Returns a rate that warms up, waits, then follows a power to a minimum.

    The decay counts from `begin_decay_at`, also where the warm-up takes longer: then
    the rate that is still warming up is what decays.

    Args:
        global_step: Int, or a tensor of one. The step, from 0.
        learning_rate: See `keras_lso.schedules.PolyDecay`, also for the rest.
        decay_steps: See there.
        power: See there. Defaults to `1.0`.
        begin_decay_at: See there. Defaults to `0`.
        min_lr: See there. Defaults to `0.0`.
        warmup_steps: See there. Defaults to `0`.

    Returns:
        The learning rate, a float32 scalar.

    Example:

    >>> from keras_lso.compat.open_seq2seq import lr_policies
    >>> for step in range(5):
    ...     late = lr_policies.poly_decay(step, 1.0, 2, 1.0, 2, warmup_steps=2)
    ...     early = lr_policies.poly_decay(step, 1.0, 4, warmup_steps=2)
    ...     print(step, f"{float(late):.3f}", f"{float(early):.3f}")
    0 0.000 0.000
    1 0.500 0.375
    2 1.000 0.500
    3 0.500 0.250
    4 0.000 0.000
    """
    policy = schedules.PolyDecay(
        learning_rate, decay_steps, power, begin_decay_at, min_lr, warmup_steps
    )
    return policy(global_step)


def inv_poly_decay(
    global_step,
    learning_rate,
    decay_steps,
    min_lr,
    power=1.0,
    begin_decay_at=0,
    warmup_steps=0,
    name="learning_rate",
):
    """Returns a rate that falls as one over a power of the steps, to a minimum.

    It stops at `min_lr`, and waits for `begin_decay_at` and the end of the warm-up, as
    OpenSeq2Seq's page has these arguments; OpenSeq2Seq's code goes on below the first
    and ignores the others.

    Args:
        global_step: Int, or a tensor of one. The step, from 0.
        learning_rate: See `keras_lso.schedules.InvPolyDecay`, also for the rest.
        decay_steps: See there.
        min_lr: See there.
        power: See there. Defaults to `1.0`.
        begin_decay_at: See there. Defaults to `0`.
        warmup_steps: See there. Defaults to `0`.
        name: String. Defaults to `"learning_rate"`.

    Returns:
        The learning rate, a float32 scalar.

    Example:

    >>> from keras_lso.compat.open_seq2seq import lr_policies
    >>> for step in range(4):
    ...     rate = lr_policies.inv_poly_decay(step, 1.0, 2, min_lr=0.25)
    ...     print(step, f"{float(rate):.2f}")
    0 1.00
    1 0.40
    2 0.25
    3 0.25
    """
    policy = schedules.InvPolyDecay(
        learning_rate, decay_steps, min_lr, power, begin_decay_at, warmup_steps, name
    )
    return policy(global_step)


def cosine_decay(
    global_step,
    learning_rate,
    decay_steps,
    power=1.0,
    begin_decay_at=0,
    min_lr=0.0,
    warmup_steps=0,
):
    """Returns a rate that warms up, waits, then follows half a cosine.

    The decay counts from `begin_decay_at`, also where the warm-up takes longer: then
    the rate that is still warming up is what decays.

    Args:
        global_step: Int, or a tensor of one. The step, from 0.
        learning_rate: See `keras_lso.schedules.CosineDecay`, also for the rest.
        decay_steps: See there.
        power: Has no effect. Defaults to `1.0`.
        begin_decay_at: See there. Defaults to `0`.
        min_lr: See there: a fraction of the rate. Defaults to `0.0`.
        warmup_steps: See there. Defaults to `0`.

    Returns:
        The learning rate, a float32 scalar.

    Example:

    >>> from keras_lso.compat.open_seq2seq import lr_policies
    >>> for step in range(5):
    ...     late = lr_policies.cosine_decay(step, 1.0, 2, 1.0, 2, 0.1, warmup_steps=2)
    ...     early = lr_policies.cosine_decay(step, 1.0, 2, 1.0, 0, 0.1, warmup_steps=2)
    ...     print(step, f"{float(late):.3f}", f"{float(early):.3f}")
    0 0.000 0.000
    1 0.500 0.275
    2 1.000 0.100
    3 0.550 0.100
    4 0.100 0.100
    """
    policy = schedules.CosineDecay(
        learning_rate, decay_steps, power, begin_decay_at, min_lr, warmup_steps
    )
    return policy(global_step)


def transformer_policy(
    global_step,
    learning_rate,
    d_model,
    warmup_steps,
    max_lr=None,
    coefficient=1.0,
    dtype="float32",
):
    """Returns the rate of the Transformer, with a cap.

    Args:
        global_step: Int, or a tensor of one. The step, from 0.
        learning_rate: See `keras_lso.schedules.TransformerPolicy`, also for the rest.
        d_model: See there.
        warmup_steps: See there.
        max_lr: See there. Defaults to `None`: no cap.
        coefficient: See there. Defaults to `1.0`.
        dtype: See there. Defaults to `"float32"`.

    Returns:
        The learning rate, a scalar of `dtype`.

    Example:

    >>> from keras_lso.compat.open_seq2seq import lr_policies
    >>> for step in (0, 1, 3, 15):
    ...     rate = lr_policies.transformer_policy(step, 2.0, 16, 4, max_lr=0.2)
    ...     print(step, f"{float(rate):.4f}")
    0 0.0625
    1 0.1250
    3 0.2000
    15 0.1250
    """
    policy = schedules.TransformerPolicy(
        learning_rate, d_model, warmup_steps, max_lr, coefficient, dtype
    )
    return policy(global_step)
