"""The rules in TensorFlow's own kernels, for steps that XLA does not fuse.

Each `apply_*` implements the formula of the rules whose `kernel` is its key in
`KERNELS`, and is tested against it. `norm` is the norm of the unscaled gradient, or
None.
"""

from collections.abc import Callable

import tensorflow as tf

from keras_lso._backend import formulas
from keras_lso._backend.rule import always


def norm_of(values):
    """Returns the L2 norm, by one kernel that writes no squares."""
    return tf.sqrt(2.0 * tf.nn.l2_loss(values))


def apply_decay(w, decay):
    """Does `w = w - decay * w`, if `decay` is not None."""
    if decay is not None:
        tf.raw_ops.ResourceApplyGradientDescent(var=w, alpha=decay, delta=_read(w))


# If the formula multiplies the gradient, the factor includes the scale, so that no
# unscaled gradient is written.


def apply_sgd(rule, grad, inv_scale, norm, w):
    apply_decay(w, rule.decay)
    rate = rule.learning_rate * inv_scale
    tf.raw_ops.ResourceApplyGradientDescent(var=w, alpha=rate, delta=grad)


def apply_momentum(rule, grad, inv_scale, norm, w, m):
    apply_decay(w, rule.decay)
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=w,
        accum=m,
        lr=rule.learning_rate * inv_scale,
        grad=grad,
        momentum=tf.cast(rule.momentum, tf.float32),
        use_nesterov=rule.nesterov,
    )


def apply_adam(rule, grad, inv_scale, norm, w, m, v):
    apply_decay(w, rule.decay)
    grad = grad * inv_scale

    def move(slot, target, weight):
        step = (target - _read(slot)) * weight
        tf.raw_ops.AssignAddVariableOp(resource=slot, value=step)

    move(m, grad, 1 - rule.beta_1)
    move(v, tf.square(grad), 1 - rule.beta_2)
    # Without updates of its slots, Adagrad's kernel is
    # `w -= lr * m / (sqrt(v) + epsilon)`. Adam's kernel computes `1 - beta` in float32,
    # which is off by 1e-5 for a beta of 0.999. With betas of 1 it makes a NaN where `v`
    # is inf.
    tf.raw_ops.ResourceApplyAdagradV2(
        var=w,
        accum=v,
        # `alpha` includes the bias correction.
        lr=rule.alpha,
        epsilon=rule.epsilon,
        grad=_read(m),
        update_slots=False,
    )


def apply_formula(rule, grad, inv_scale, norm, *handles):
    """Runs the formula of a rule for which TensorFlow has no kernel."""
    old = [_read(handle) for handle in handles]
    grad, norms = _unscale(grad, inv_scale), None
    if rule.takes_norms:
        norms = tuple(map(norm_of, rule.measured(formulas, grad, *old)))
    new = rule(formulas, always, grad, *old, norms=norms)
    for handle, value in zip(handles, new, strict=True):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def apply_lars(rule, grad, inv_scale, norm, w, v):
    factor = inv_scale
    if rule.weight_decay or not rule.classic_momentum:
        grad, factor = _unscale(grad, inv_scale), 1.0
    d = rule.decayed(grad, _read(w))
    if not rule.classic_momentum:
        new_v, update = rule.advance(formulas, always, d, _read(v))
        rate = _lars_rate(rule, norm_of(update), w)
        tf.raw_ops.AssignVariableOp(resource=v, value=new_v)
        tf.raw_ops.ResourceApplyGradientDescent(var=w, alpha=rate, delta=update)
        return
    if rule.weight_decay and not rule.is_paper:
        # `norm` is the norm of the gradient without its decay.
        norm = norm_of(d)
    elif norm is None:
        norm = norm_of(grad) * factor
    tf.raw_ops.ResourceApplyMomentum(
        var=w,
        accum=v,
        lr=1.0,
        grad=d * (_lars_rate(rule, norm, w) * factor),
        momentum=tf.cast(rule.momentum, tf.float32),
        use_nesterov=rule.nesterov,
    )


def _lars_rate(rule, norm, w):
    return rule.rate((norm, norm_of(_read(w))))


def apply_lamb(rule, grad, inv_scale, norm, w, m, v):
    old = _read(w), _read(m), _read(v)
    new_m, new_v, d = rule.advance(formulas, always, _unscale(grad, inv_scale), *old)
    tf.raw_ops.AssignVariableOp(resource=m, value=new_m)
    tf.raw_ops.AssignVariableOp(resource=v, value=new_v)
    # Not `norm`, which is the norm of the gradient, and not of the direction.
    norms = (norm_of(d), norm_of(old[0])) if rule.takes_norms else None
    tf.raw_ops.ResourceApplyGradientDescent(var=w, alpha=rule.rate(norms), delta=d)


def apply_novograd(rule, grad, inv_scale, norm, w, m, v):
    if norm is None:
        grad, inv_scale = _unscale(grad, inv_scale), 1.0
        norm = norm_of(grad)
    new_v, factor = rule.normalize(formulas, norm, _read(v))
    d = grad * (factor * rule.direction_weight * inv_scale)
    if rule.weight_decay:
        d += _read(w) * (rule.weight_decay * rule.direction_weight)
    tf.raw_ops.AssignVariableOp(resource=v, value=new_v)
    tf.raw_ops.ResourceApplyMomentum(
        var=w,
        accum=m,
        lr=rule.learning_rate,
        grad=d,
        momentum=tf.cast(rule.beta_1, tf.float32),
        use_nesterov=False,
    )


def _unscale(grad, inv_scale):
    # A product with 1 is a pass over memory here.
    return grad if isinstance(inv_scale, float) else grad * inv_scale


def _read(handle):
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)


# Keyed by `Rule.kernel`.
KERNELS: dict[str | None, Callable[..., None]] = {
    None: apply_formula,
    "sgd": apply_sgd,
    "momentum": apply_momentum,
    "adam": apply_adam,
    "lars": apply_lars,
    "lamb": apply_lamb,
    "novograd": apply_novograd,
}
