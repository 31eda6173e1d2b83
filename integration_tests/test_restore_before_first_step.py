"""A checkpoint that is restored before the first step, as tf.keras's users do.

`tf.train.Checkpoint.restore` finds a variable when it is created. Those of the loss
scale must be there before the first loss is scaled: scaled by one number and unscaled
by another, the step would be wrong by their ratio.
"""

import keras
import pytest

import keras_lso
from keras_lso import loss_scales
from keras_lso.compat import v1
from keras_lso.mixed_precision import experimental

if keras.backend.backend() != "tensorflow":
    pytest.skip(
        "tf.train.Checkpoint tracks TensorFlow variables only", allow_module_level=True
    )

import tensorflow as tf

GROWING = {"initial_loss_scale": 2.0, "increment_period": 1}


def dynamic(**arguments):
    return loss_scales.DynamicLossScale(**GROWING, **arguments)


# With the default initial scale, which differs from the restored one.
OPTIMIZERS = {
    "dynamic": lambda inner: keras_lso.LossScaleOptimizer(
        inner, initial_scale=2, dynamic_growth_steps=1
    ),
    "hysteresis": lambda inner: keras_lso.LossScaleOptimizer(
        inner, loss_scale=dynamic(hysteresis=2)
    ),
    "LogMax": lambda inner: keras_lso.LossScaleOptimizer(
        inner, loss_scale=loss_scales.LogMaxLossScale()
    ),
    "experimental": lambda inner: experimental.LossScaleOptimizer(inner, dynamic()),
    "TF1": lambda inner: v1.mixed_precision.MixedPrecisionLossScaleOptimizer(
        inner, dynamic()
    ),
}
INNER = {
    "SGD": lambda: keras.optimizers.SGD(1.0),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1),
    "LARC": lambda: keras_lso.LARC(keras.optimizers.SGD(1.0, momentum=0.5)),
    "LARS": lambda: keras_lso.LARS(1.0),
    "LAMB": lambda: keras_lso.LAMB(0.1),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.1),
}


def minimize(optimizer, variable):
    # In TF1 the list of variables was the third argument.
    optimizer.minimize(lambda: variable * 1.0, var_list=[variable])


def scale_and_apply(optimizer, variable):
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(variable * 1.0)
    optimizer.apply(tape.gradient(loss, [variable.value]), [variable])


def unscale_and_apply(optimizer, variable):
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(variable * 1.0)
    grads = optimizer.get_unscaled_gradients(tape.gradient(loss, [variable.value]))
    optimizer.apply_gradients(zip(grads, [variable], strict=True))


LOOPS = {
    "minimize": minimize,
    "scale_loss and apply": scale_and_apply,
    "get_scaled_loss": unscale_and_apply,
}


class Run:
    """A weight, the optimizer that makes it fall, and their checkpoint."""

    def __init__(self, wrap, inner, loop, is_compiled, dtype="float32"):
        self.variable = keras.Variable(1000.0, dtype=dtype, name="w")
        self.optimizer = wrap(inner())
        step = lambda: loop(self.optimizer, self.variable)  # noqa: E731
        self.step = tf.function(step) if is_compiled else step
        self.checkpoint = tf.train.Checkpoint(
            optimizer=self.optimizer, variable=self.variable.value
        )

    @property
    def state(self):
        variables = [self.variable, *self.optimizer.variables]
        return [(v.name, v.numpy().tolist()) for v in variables]


def compare(folder, *arguments, **options):
    """Holds a run that was restored before its third step against one that was not."""
    whole = Run(*arguments, **options)
    for _ in range(3):
        whole.step()
    path = whole.checkpoint.save(str(folder / "run"))
    whole.step()
    resumed = Run(*arguments, **options)
    resumed.checkpoint.restore(path)
    for name in ("dynamic_counter", "skipped_steps", "last_step_applied", "iterations"):
        getattr(resumed.optimizer, name)
    resumed.step()
    assert resumed.state == whole.state
    return whole, resumed


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_step_after_restore_moves_weight_like_uninterrupted_run(
    loop, is_compiled, tmp_path
):
    _, resumed = compare(
        tmp_path, OPTIMIZERS["dynamic"], INNER["SGD"], loop, is_compiled
    )
    # Four steps of 1.0: the scale is a power of two, which leaves no trace.
    assert float(resumed.variable.numpy()) == 996.0
    assert float(resumed.optimizer.loss_scale) == 2.0**5


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrap", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_every_policy_and_optimizer_resumes_from_checkpoint(wrap, inner, tmp_path):
    compare(tmp_path, wrap, inner, minimize, is_compiled=False)


def test_masters_of_float16_weights_resume_from_checkpoint(tmp_path):
    # 1000.0 moves in steps of 0.5 in float16: what the master holds is not rounded.
    compare(
        tmp_path,
        OPTIMIZERS["dynamic"],
        lambda: keras.optimizers.SGD(0.3),
        minimize,
        is_compiled=False,
        dtype="float16",
    )


def test_checkpoint_restores_before_first_step_under_strategy(tmp_path):
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])

    def on_its_replica(optimizer, variable):
        strategy.run(lambda: minimize(optimizer, variable))

    with strategy.scope():
        compare(tmp_path, OPTIMIZERS["dynamic"], INNER["SGD"], on_its_replica, False)
