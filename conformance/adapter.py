"""What a property asks a participant for: to scale a loss and step, and its state."""

import dataclasses

import numpy as np

RATE = 0.125
"""The learning rate of Adam, which each participant trains by."""


class NotOffered(Exception):
    """The interface of the participant cannot express what a property asks."""


@dataclasses.dataclass
class State:
    """Copies in NumPy of what is there after a step.

    `slots` are the moments and counters of the inner optimizer. `scale` is None where
    there is no loss scale. `skipped` is what the participant says of the last step.
    """

    weights: list
    slots: list
    scale: float | None
    skipped: bool | None = None

    def bits(self):
        """Returns the bytes of all but `skipped`: -0.0 is not 0.0."""
        arrays = [*self.weights, *self.slots, np.float64(self.scale or 0)]
        return [np.asarray(a).tobytes() for a in arrays]

    def equals(self, other):
        """Whether the values of weights and slots are equal: -0.0 is 0.0."""
        pairs = zip(self.weights + self.slots, other.weights + other.slots, strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)


class Adapter:
    """Weights that a participant trains. A subclass has

    - `start(**options)`, which makes them, and `step(slopes, gain)`: it scales the
      loss `loss_of(weights, slopes, gain)`, differentiates it, and lets the
      participant step;
    - `state()`; `save()` and `load(saved)`, a checkpoint of all but the weights;
    - `offers`: the options of `start`, and what they are called there. `floor`, the
      least loss scale; `fixed`, a scale that stays; `micro_batches`, of how many
      gradients a step applies the mean; `observed`, somebody looks at gradients;
      `guard`, against outliers. Also `skipped`: what tells of a skipped step;
    - `packages`, on whose versions the answers depend.
    """

    name, packages, offers = "", (), {}

    def __init__(self, weights, scale=2.0**15, growth_steps=2000, **options):
        for option in options:
            if option not in self.offers:
                raise NotOffered(option)
        self.weights, self.scale, self.growth_steps = weights, scale, growth_steps
        self.start(**options)


def loss_of(weights, slopes, gain):
    """A loss with the gradients `gain * slopes`.

    Its derivative multiplies the loss scale by the gain, and then by the slopes.
    """
    return sum((w * s).sum() for w, s in zip(weights, slopes, strict=True)) * gain
