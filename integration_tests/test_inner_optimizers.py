"""Any optimizer of Keras, with any feature, or of a user can be the inner optimizer.

The weights are those of the inner optimizer alone on the gradients that do not
overflow. A step that overflows changes nothing, bit for bit.
"""

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_lso
from integration_tests.keras_optimizers import keras_optimizers
from testing.keras_versions import multi_optimizer
from testing.tiers import full_but_for

INF = float("inf")


@keras.saving.register_keras_serializable("keras_lso_tests")
class SignSGD(keras.optimizers.SGD):
    """A user's own version of a known optimizer, with another formula."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(ops.sign(gradient), variable, learning_rate)


@keras.saving.register_keras_serializable("keras_lso_tests")
class LargestSoFar(keras.optimizers.Optimizer):
    """An optimizer like none of Keras's, with a slot and a scalar of its own."""

    def __init__(self, learning_rate=0.1, **options):
        super().__init__(learning_rate=learning_rate, **options)

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.largest = self.add_optimizer_variables(variables, "largest")
        self.updates = self.add_variable(shape=(), name="updates")

    def update_step(self, gradient, variable, learning_rate):
        largest = self.largest[self._get_variable_index(variable)]
        self.assign(largest, ops.maximum(largest, ops.abs(gradient)))
        self.assign_add(self.updates, ops.ones(()))
        self.assign_sub(variable, learning_rate * gradient / (largest + 1e-7))


def of_two():
    of_output = keras.optimizers.Adam(0.01)
    default = keras.optimizers.SGD(0.1, momentum=0.5)
    return multi_optimizer(default, {".*/output/.*": of_output})


INNER = {
    **keras_optimizers(),
    "SGD with momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "SGD with Nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam with amsgrad": lambda: keras.optimizers.Adam(amsgrad=True),
    "RMSprop, centered": lambda: keras.optimizers.RMSprop(momentum=0.5, centered=True),
    "MultiOptimizer": of_two,
    "LARS": lambda: keras_lso.LARS(1.0),
    "LARS with decay": lambda: keras_lso.LARS(
        1.0, weight_decay_rate=0.01, nesterov=True, exclude_1d=True
    ),
    "LARS, popular": lambda: keras_lso.LARS(
        1.0, weight_decay_rate=0.01, classic_momentum=False
    ),
    "LARS of the paper": lambda: keras_lso.LARS(
        1.0, weight_decay_rate=0.01, trust_ratio="paper"
    ),
    "LARS, clipped": lambda: keras_lso.LARS(1.0, global_clipnorm=1.0),
    "LAMB": lambda: keras_lso.LAMB(0.1, weight_decay_rate=0.01),
    "LAMB, clipped": lambda: keras_lso.LAMB(0.1, global_clipnorm=1.0),
    "NovoGrad": lambda: keras_lso.NovoGrad(0.1, weight_decay_rate=0.01),
    "LARC around SGD": lambda: keras_lso.LARC(keras.optimizers.SGD(0.1, momentum=0.9)),
    "LARC around Adam": lambda: keras_lso.LARC(
        keras.optimizers.Adam(0.1), mode="scale", exclude=["bias"]
    ),
    "subclass of SGD": lambda: SignSGD(0.1, momentum=0.5),
    "custom optimizer": LargestSoFar,
}


@pytest.fixture
def gradients():
    """Three gradients for each variable of the model, of all magnitudes."""
    random = np.random.default_rng(0)
    shapes = [(4, 8), (8,), (8, 1), (1,)]
    return [
        [
            random.normal(scale=scale, size=shape).astype("float32")
            for scale, shape in zip((1e-3, 1.0, 1e2, 1.0), shapes, strict=True)
        ]
        for _ in range(3)
    ]


@pytest.mark.parametrize("inner", INNER)
def test_apply_gives_weights_of_bare_inner_optimizer(
    inner, make_model, gradients, values, bits, assert_close
):
    expected, model = make_model("float32"), make_model("float32")
    variables = list(model.trainable_variables)
    start = values(variables)
    bare = INNER[inner]()
    wrapper = keras_lso.LossScaleOptimizer(INNER[inner](), dynamic_growth_steps=2)
    for step, bad in zip(gradients, (INF, -INF, float("nan")), strict=True):
        scale = float(wrapper.loss_scale)
        bare.apply([ops.array(g) for g in step], expected.trainable_variables)
        wrapper.apply([ops.array(g * scale) for g in step], variables)

        # One element that is not finite, and everything stays, bit for bit.
        before = bits([*variables, *wrapper.inner_optimizer.variables])
        step[2][5, 0] = bad
        wrapper.apply([ops.array(g) for g in step], variables)
        assert bits([*variables, *wrapper.inner_optimizer.variables]) == before

    weights = values(variables)
    assert all((a != b).any() for a, b in zip(start, weights, strict=True))
    assert_close(weights, values(expected.trainable_variables))
    assert (int(wrapper.iterations), int(wrapper.skipped_steps)) == (3, 3)


EMA = {"use_ema": True, "ema_momentum": 0.75}
# Arguments of Adam. The thresholds are such that they take effect.
FEATURES = {
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "EMA": EMA,
    "EMA that overwrites": {**EMA, "ema_overwrite_frequency": 2},
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.01},
    "weight decay": {"weight_decay": 0.5},
    "schedule": {
        "learning_rate": keras.optimizers.schedules.PiecewiseConstantDecay(
            [0, 2, 4], [0.03, 0.003, 0.02, 0.01]
        )
    },
    "accumulation, EMA and clipping": {
        **EMA,
        "gradient_accumulation_steps": 3,
        "clipvalue": 0.01,
        "weight_decay": 0.5,
    },
}
FITTED = INNER | {
    name: functools.partial(keras.optimizers.Adam, **{"learning_rate": 0.01, **options})
    for name, options in FEATURES.items()
}
# In addition to `apply`, above, `fit` has a compiled step, and on JAX one without a
# state of its own. It is the same for all that have slots and a formula, such as the
# SGD and the Adam of `test_survival.py`. These are ours, or hold more than slots, or
# other optimizers.
IN_FIT = {
    "Adafactor",
    "LAMB",
    "LARC around Adam",
    "LARS with decay",
    "MultiOptimizer",
    "Nadam",
    "NovoGrad",
    "ScheduleFreeAdamW",
    "custom optimizer",
}
if keras.backend.backend() == "torch":
    # They have a condition or a count in the step, or look at all gradients. The steps
    # of each backend are compared with Keras's in `tests/_core/`.
    IN_FIT |= {
        "EMA that overwrites",
        "global_clipnorm",
        "schedule",
        "accumulation, EMA and clipping",
    }


@pytest.mark.parametrize("inner", full_but_for(IN_FIT, FITTED))
def test_fit_with_overflows_matches_bare_fit_without_them(
    inner, make_model, data, fit, with_overflows, values, assert_close
):
    # Nine batches, of which the first, the fourth and the fifth overflow.
    x, y = (np.concatenate([array] * 3)[: 9 * 8] for array in data)
    overflows = np.repeat(np.isin(np.arange(9), [0, 3, 4]), 8)
    bare, expected = FITTED[inner](), make_model("float32")
    expected.compile(bare, loss="mse")
    fit(expected, x[~overflows], y[~overflows])

    wrapper = keras_lso.LossScaleOptimizer(FITTED[inner]())
    model = make_model("float32")
    start = values(model.trainable_variables)
    model.compile(wrapper, loss="mse")
    fit(model, with_overflows(x, [0, 3, 4]), y)
    assert int(wrapper.iterations) == int(bare.iterations) > 0
    assert int(wrapper.skipped_steps) == 3
    assert float(wrapper.loss_scale) == 2.0**12
    weights = values(model.trainable_variables)
    assert any((a != b).any() for a, b in zip(start, weights, strict=True))
    assert_close(weights, values(expected.trainable_variables))
    # A fused Adam takes `1 - beta_2`, 0.001, in float32: off by up to 2**-25.
    inner = wrapper.inner_optimizer
    assert_close(values(inner.variables), values(bare.variables), share=5e-5)


def test_multi_optimizer_steps_each_variable_with_its_own_optimizer(
    make_model, data, fit
):
    model = make_model()
    optimizer = keras_lso.LossScaleOptimizer(of_two())
    model.compile(optimizer, loss="mse")
    fit(model, *data)
    parts = {type(o).__name__: o for o in optimizer.inner_optimizer.optimizers}
    # `iteration`, `learning_rate`, and the slots of a kernel and a bias.
    assert len(parts["SGD"].variables) == 2 + 2
    assert len(parts["Adam"].variables) == 2 + 4
    assert [int(o.iterations) for o in (optimizer, *parts.values())] == [4, 4, 4]
    # Its learning rates are those of its parts; the wrapper has none to offer.
    assert not hasattr(optimizer, "learning_rate")
