"""Inner optimizers with any options: Keras's, and ours."""

import dataclasses

import keras
from hypothesis import strategies as st

import keras_lso
from integration_tests.keras_optimizers import keras_optimizers
from keras_lso import schedules


def _wrapped(optimizer, **larc):
    return lambda **options: keras_lso.LARC(optimizer(**options), **larc)


def _with(optimizer, **fixed):
    return lambda **options: optimizer(**fixed, **options)


OURS = {
    "LARS": _with(keras_lso.LARS, eeta=0.5),
    "LARS, popular": _with(keras_lso.LARS, eeta=0.5, classic_momentum=False),
    "LARS, paper": _with(
        keras_lso.LARS, eeta=0.5, nesterov=True, trust_ratio="paper", trust_clip=True
    ),
    "LAMB": keras_lso.LAMB,
    "LAMB, bounded": _with(
        keras_lso.LAMB, bias_correction=False, min_trust_ratio=0.5, max_trust_ratio=2.0
    ),
    "NovoGrad": keras_lso.NovoGrad,
    "NovoGrad, averaged": _with(keras_lso.NovoGrad, grad_averaging=True),
}
LARCS = {
    "LARC(SGD)": _wrapped(_with(keras.optimizers.SGD, momentum=0.9)),
    "LARC(Adam)": _wrapped(keras.optimizers.Adam, mode="scale", exclude=["bias"]),
    "LARC(LARS)": _wrapped(keras_lso.LARS, eta=0.25),
}
VARIANTS = {
    "momentum": _with(keras.optimizers.SGD, momentum=0.9),
    "Nesterov": _with(keras.optimizers.SGD, momentum=0.9, nesterov=True),
    "AMSGrad": _with(keras.optimizers.Adam, amsgrad=True),
    "RMSprop, centered": _with(keras.optimizers.RMSprop, momentum=0.5, centered=True),
}
OPTIMIZERS = {**keras_optimizers(), **VARIANTS, **OURS, **LARCS}

# Their step holds sums over a whole tensor. Under XLA the order of a sum is its own,
# and of nothing there is no mean.
REDUCING = {"Adafactor", "Lamb", "Muon", *OURS, *LARCS}

# Their step adds two products. XLA rounds one of the two and the sum at once, in the
# program of a guarded step perhaps the other one.
ADDING_PRODUCTS = {
    "Adadelta",
    "Ftrl",
    "Lion",
    "Nadam",
    "RMSprop",
    "RMSprop, centered",
    "ScheduleFreeAdamW",
    "momentum",
    "Nesterov",
}


@dataclasses.dataclass
class Inner:
    """An optimizer that can be made again and again.

    Args:
        name: String, one of `OPTIMIZERS`.
        options: Dict of its arguments, among them the name of a learning rate.
    """

    name: str
    options: dict

    def make(self):
        options = dict(self.options)
        options["learning_rate"] = RATES[options["learning_rate"]]()
        return OPTIMIZERS[self.name](**options)

    @property
    def reduces(self):
        """Whether there are sums over tensors in a step."""
        return self.name in REDUCING or bool(
            {"clipnorm", "global_clipnorm"} & set(self.options)
        )

    @property
    def clips_by_the_norm_of_all(self):
        """Whether a step is skipped if the norm of all gradients overflows."""
        return "global_clipnorm" in self.options

    @property
    def adds_products(self):
        """Whether a step adds two products, of which XLA rounds one with the sum."""
        return self.name in ADDING_PRODUCTS or "use_ema" in self.options


RATES = {
    "constant": lambda: 0.125,
    "decay": lambda: keras.optimizers.schedules.ExponentialDecay(0.25, 2, 0.5),
    "warm-up": lambda: schedules.LinearWarmup(
        keras.optimizers.schedules.CosineDecay(0.25, 10), 3
    ),
}


def mostly(value, *others):
    return st.sampled_from([value] * 2 * len(others) + list(others))


CLIPS = mostly({}, {"clipnorm": 0.5}, {"clipvalue": 0.125}, {"global_clipnorm": 1.0})
AVERAGES = mostly(
    {},
    {"use_ema": True, "ema_momentum": 0.5},
    {"use_ema": True, "ema_overwrite_frequency": 2},
)


@st.composite
def inners(draw, names=tuple(OPTIMIZERS)):
    name = draw(st.sampled_from(names))
    options = {"learning_rate": draw(st.sampled_from(list(RATES)))}
    # Ours have a decay of their own.
    own_decay = ["weight_decay_rate"] if name in OURS else []
    decay = draw(st.sampled_from([None, None, "weight_decay", *own_decay]))
    if decay:
        options[decay] = 0.25
    options |= draw(CLIPS) | draw(AVERAGES)
    if draw(mostly(False, True)):
        options["gradient_accumulation_steps"] = draw(st.integers(2, 3))
    return Inner(name, options)
