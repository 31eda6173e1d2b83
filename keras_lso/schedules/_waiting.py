"""The step that OpenSeq2Seq's decays share: they warm up and wait before they decay.

It is apart from `policies_decay.py`, which holds what each of them decays along.
"""

from keras import ops

from keras_lso.schedules._curves import float32, warmed_up
from keras_lso.schedules._declared import Schedule
from keras_lso.schedules._powers import whole


class WaitingDecay(Schedule):
    """Base of all: a decay that has not begun for some steps.

    ```python
    rate = learning_rate * min(1, step / warmup_steps)
    if step > begin: rate = decayed(rate, step - begin)
    ```
    """

    learning_rate: float
    decay_steps: int
    begin_decay_at: int
    min_lr: float
    name: str
    warmup_steps = 0

    @property
    def _begin(self):
        """The step from which the decay counts."""
        return self.begin_decay_at

    def __call__(self, step):
        step = whole(step)
        rate = float32(self.learning_rate)
        if self.warmup_steps > 0:
            rate = warmed_up(step, self.warmup_steps, 0.0, self.learning_rate, rate)
        decaying = step - self._begin
        # `decayed` is defined from one step on; below that its result is unused.
        decayed = self.decayed(rate, ops.maximum(decaying, 1))
        return ops.where(decaying > 0, decayed, rate)

    def decayed(self, rate, step):
        """Returns what becomes of a rate in so many steps, one or more, in float32."""
        raise NotImplementedError


class WarmedUpDecay(WaitingDecay):
    """Base of those that end after `decay_steps`."""

    power: float

    def left_and_done(self, step):
        """Returns the steps of the decay that are left, and those that are done."""
        done = ops.minimum(step, self.decay_steps)
        return self.decay_steps - done, done
