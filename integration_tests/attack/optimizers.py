"""Inner optimizers with random hyperparameters: Keras's, and ours."""

import dataclasses
import inspect
from collections.abc import Callable

import keras

import keras_lso
from integration_tests.keras_optimizers import keras_optimizers
from keras_lso import schedules
from keras_lso.compat import model_garden

CLASSES = {
    **keras_optimizers(),
    "LARS": keras_lso.LARS,
    "LAMB": keras_lso.LAMB,
    "NovoGrad": keras_lso.NovoGrad,
}


def one_of(*values):
    return lambda random: values[random.integers(len(values))]


def between(low, high):
    return lambda random: float(random.uniform(low, high))


def power_of_ten(low, high):
    return lambda random: float(10 ** random.uniform(low, high))


FLAG = one_of(False, True)
# Of those arguments of optimizers that a case may set, how each is drawn.
HYPERPARAMETERS = {
    **dict.fromkeys(["beta_1", "momentum", "adam_beta_1"], between(0.1, 0.99)),
    **dict.fromkeys(["beta_2", "rho", "adam_beta_2"], between(0.5, 0.9999)),
    **dict.fromkeys(["weight_decay", "weight_decay_rate"], power_of_ten(-3, -0.5)),
    **dict.fromkeys(["nesterov", "amsgrad", "centered", "relative_step"], FLAG),
    **dict.fromkeys(["classic_momentum", "trust_clip", "exclude_1d"], FLAG),
    **dict.fromkeys(["bias_correction", "grad_averaging"], FLAG),
    "epsilon": power_of_ten(-8, -2),
    "initial_accumulator_value": between(0.01, 1.0),
    "l1_regularization_strength": between(0.0, 0.1),
    "l2_regularization_strength": between(0.0, 0.1),
    "l2_shrinkage_regularization_strength": between(0.0, 0.1),
    "beta": between(0.0, 0.5),
    "beta_2_decay": between(-0.9, -0.5),
    "clip_threshold": between(0.5, 2.0),
    "warmup_steps": one_of(0, 3),
    "eeta": power_of_ten(-3, 0),
    "trust_ratio": one_of("model_garden", "paper"),
    "min_trust_ratio": between(0.1, 0.9),
    "max_trust_ratio": between(1.0, 4.0),
    "exclude_from_weight_decay": one_of(None, ["bias"]),
    "exclude_from_layer_adaptation": one_of(None, ["kernel"]),
}
# Those that may change in mid-run, whatever the optimizer's state holds.
CHANGEABLE = ["beta_1", "beta_2", "momentum", "rho", "epsilon", "weight_decay"]
CLIPS = {
    "clipnorm": power_of_ten(-2, 1),
    "clipvalue": power_of_ten(-3, 1),
    "global_clipnorm": power_of_ten(-2, 1),
}


@dataclasses.dataclass
class Inner:
    """An optimizer that can be made again and again."""

    words: str
    options: dict
    make: Callable

    def __repr__(self):
        return self.words


def inner(random):
    """Any optimizer; now and then one for biases and one for kernels, or in a LARC."""
    if "MultiOptimizer" in dir(keras.optimizers) and random.random() < 0.07:
        return _multi(random)
    found = single(random)
    if random.random() < 0.1:
        return _in_larc(random, found)
    return found


def single(random, names=tuple(CLASSES)):
    name = one_of(*names)(random)
    arguments = inspect.signature(CLASSES[name].__init__).parameters
    options = {
        argument: draw(random)
        for argument, draw in HYPERPARAMETERS.items()
        if argument in arguments and random.random() < 0.4
    }
    if options.get("trust_ratio") == "paper":
        options["classic_momentum"] = True
    if random.random() < 0.3:
        clip = one_of(*CLIPS)(random)
        options[clip] = CLIPS[clip](random)
    if random.random() < 0.2:
        options |= {"use_ema": True, "ema_momentum": between(0.1, 0.99)(random)}
        options["ema_overwrite_frequency"] = one_of(None, 2, 3)(random)
    if random.random() < 0.15:
        options["gradient_accumulation_steps"] = one_of(2, 3)(random)
    excludes = "weight_decay" in options and random.random() < 0.3
    rate = _rate(random)

    def make():
        made = getattr(keras.optimizers, name, CLASSES[name])(
            learning_rate=rate(), **options
        )
        if excludes:
            made.exclude_from_weight_decay(var_names=["bias"])
        return made

    excluding = ", bias excluded" if excludes else ""
    words = f"{name}({rate()}, {options}{excluding})"
    return Inner(words, options, make)


def _multi(random):
    kernels, biases = single(random), single(random)

    def make():
        by_name = keras.optimizers.OptimizerMap(kernels.make())
        by_name[".*bias.*"] = biases.make()
        return keras.optimizers.MultiOptimizer(by_name)

    return Inner(f"MultiOptimizer({kernels}, bias: {biases})", {"members": 2}, make)


def _in_larc(random, found):
    options = {
        "eta": power_of_ten(-3, 0)(random),
        "mode": one_of("clip", "scale")(random),
        "exclude": one_of(None, ["bias"])(random),
    }
    return Inner(
        f"LARC({found}, {options})",
        found.options,
        lambda: keras_lso.LARC(found.make(), **options),
    )


def _rate(random):
    """Returns what makes a learning rate: a number, or a schedule of either kind."""
    rate, steps = power_of_ten(-4, 0)(random), int(random.integers(1, 9))
    of_keras = keras.optimizers.schedules
    schedule = one_of(
        lambda: of_keras.ExponentialDecay(rate, steps, 0.5),
        lambda: schedules.LinearWarmup(of_keras.CosineDecay(rate, 10), steps),
        lambda: schedules.JoinedSchedules(
            [rate, of_keras.InverseTimeDecay(rate, 2, 1)], [steps]
        ),
        lambda: model_garden.PolynomialDecayWithOffset(
            steps, initial_learning_rate=rate, decay_steps=5
        ),
    )(random)
    return schedule if random.random() < 0.25 else lambda: rate
