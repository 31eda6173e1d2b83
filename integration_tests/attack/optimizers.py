"""Inner optimizers with any hyperparameters: Keras's, and ours."""

import dataclasses
import inspect
from typing import Any

import keras
from hypothesis import strategies as st

import keras_lso
from integration_tests.attack.policies import between
from integration_tests.keras_optimizers import keras_optimizers
from keras_lso import schedules
from keras_lso.compat import model_garden

CLASSES = {
    "SGD": keras.optimizers.SGD,  # the simplest
    **keras_optimizers(),
    "LARS": keras_lso.LARS,
    "LAMB": keras_lso.LAMB,
    "NovoGrad": keras_lso.NovoGrad,
}


def power_of_ten(low, high):
    return between(low, high).map(lambda exponent: 10**exponent)


def one_in(count):
    """Whether something happens that happens in one of `count` cases."""
    return st.integers(1, count).map(lambda n: n == count)


# Of those arguments of optimizers that are drawn, how each is.
HYPERPARAMETERS = {
    **dict.fromkeys(["beta_1", "momentum", "adam_beta_1"], between(0.1, 0.99)),
    **dict.fromkeys(["beta_2", "rho", "adam_beta_2"], between(0.5, 0.9999)),
    **dict.fromkeys(["weight_decay", "weight_decay_rate"], power_of_ten(-3, -0.5)),
    **dict.fromkeys(["nesterov", "amsgrad", "centered"], st.booleans()),
    **dict.fromkeys(["relative_step", "classic_momentum"], st.booleans()),
    **dict.fromkeys(["trust_clip", "exclude_1d", "bias_correction"], st.booleans()),
    "grad_averaging": st.booleans(),
    "epsilon": power_of_ten(-8, -2),
    "initial_accumulator_value": between(0.01, 1.0),
    "l1_regularization_strength": between(0.0, 0.1),
    "l2_regularization_strength": between(0.0, 0.1),
    "l2_shrinkage_regularization_strength": between(0.0, 0.1),
    "beta": between(0.0, 0.5),
    "beta_2_decay": between(-0.9, -0.5),
    "clip_threshold": between(0.5, 2.0),
    "warmup_steps": st.sampled_from([0, 3]),
    "eeta": power_of_ten(-3, 0),
    "trust_ratio": st.sampled_from(["model_garden", "paper"]),
    "min_trust_ratio": between(0.1, 0.9),
    "max_trust_ratio": between(1.0, 4.0),
    "exclude_from_weight_decay": st.sampled_from([None, ["bias"]]),
    "exclude_from_layer_adaptation": st.sampled_from([None, ["kernel"]]),
}
CLIPS = {
    "clipnorm": power_of_ten(-2, 1),
    "clipvalue": power_of_ten(-3, 1),
    "global_clipnorm": power_of_ten(-2, 1),
}
# Those that may change in mid-run, whatever the optimizer's state holds.
CHANGEABLE = ["beta_1", "beta_2", "momentum", "rho", "epsilon", "weight_decay"]
CHANGES = {name: HYPERPARAMETERS[name] for name in CHANGEABLE} | CLIPS

_of_keras = keras.optimizers.schedules
# Learning rates: numbers, and schedules of both kinds.
RATES = {
    "constant": lambda rate, steps: rate,
    "exponential": lambda rate, steps: _of_keras.ExponentialDecay(rate, steps, 0.5),
    "warmup": lambda rate, steps: schedules.LinearWarmup(
        _of_keras.CosineDecay(rate, 10), steps
    ),
    "joined": lambda rate, steps: schedules.JoinedSchedules(
        [rate, _of_keras.InverseTimeDecay(rate, 2, 1)], [steps]
    ),
    "offset": lambda rate, steps: model_garden.PolynomialDecayWithOffset(
        steps, initial_learning_rate=rate, decay_steps=5
    ),
}


@dataclasses.dataclass
class Optimizer:
    """An optimizer that can be made repeatedly.

    It may be in a LARC, or in a `MultiOptimizer` with another one for biases.
    """

    name: str
    rate: tuple
    options: dict
    excludes_bias: bool = False
    larc: dict | None = None
    biases: Any = None

    @property
    def members(self):
        return [self, self.biases] if self.biases else [self]

    @property
    def names(self):
        return {m.name for m in self.members} | ({"LARC"} if self.larc else set())

    @property
    def accumulates(self):
        return any("gradient_accumulation_steps" in m.options for m in self.members)

    @property
    def window(self):
        """The steps whose gradients it accumulates; each of a pair has its window."""
        is_single = self.biases is None
        return self.options.get("gradient_accumulation_steps", 1) if is_single else 1

    def make(self):
        if self.biases:
            kernels = dataclasses.replace(self, biases=None)
            by_name = keras.optimizers.OptimizerMap(kernels.make())
            by_name[".*bias.*"] = self.biases.make()
            return keras.optimizers.MultiOptimizer(by_name)
        schedule, *arguments = self.rate
        made = getattr(keras.optimizers, self.name, CLASSES[self.name])(
            learning_rate=RATES[schedule](*arguments), **self.options
        )
        if self.excludes_bias:
            made.exclude_from_weight_decay(var_names=["bias"])
        return made if self.larc is None else keras_lso.LARC(made, **self.larc)


@st.composite
def single_optimizers(draw):
    name = draw(st.sampled_from(list(CLASSES)))
    arguments = inspect.signature(CLASSES[name].__init__).parameters
    options = {
        argument: draw(values)
        for argument, values in HYPERPARAMETERS.items()
        if argument in arguments and draw(st.integers(0, 4)) >= 3
    }
    if options.get("trust_ratio") == "paper":
        options["classic_momentum"] = True
    if draw(st.integers(0, 9)) >= 7:
        clip = draw(st.sampled_from(list(CLIPS)))
        options[clip] = draw(CLIPS[clip])
    if draw(one_in(5)):
        options |= {"use_ema": True, "ema_momentum": draw(between(0.1, 0.99))}
        options["ema_overwrite_frequency"] = draw(st.sampled_from([None, 2, 3]))
    if draw(one_in(7)):
        options["gradient_accumulation_steps"] = draw(st.sampled_from([2, 3]))
    excludes_bias = "weight_decay" in options and draw(one_in(3))
    schedule = draw(st.sampled_from(["constant"] * 12 + list(RATES)[1:]))
    rate = schedule, draw(power_of_ten(-4, 0)), draw(st.integers(1, 8))
    return Optimizer(name, rate, options, excludes_bias)


@st.composite
def optimizers(draw):
    """Any optimizer; now and then one for biases and one for kernels, or in a LARC."""
    optimizer = draw(single_optimizers())
    if "MultiOptimizer" in dir(keras.optimizers) and draw(one_in(14)):
        optimizer.biases = draw(single_optimizers())
    elif draw(one_in(10)):
        optimizer.larc = {
            "eta": draw(power_of_ten(-3, 0)),
            "mode": draw(st.sampled_from(["clip", "scale"])),
            "exclude": draw(st.sampled_from([None, ["bias"]])),
        }
    return optimizer
