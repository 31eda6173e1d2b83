"""What OpenSeq2Seq's decays have in common: they warm up and wait before they decay."""

from keras import ops
from keras.optimizers.schedules import LearningRateSchedule

from keras_lso._checks import (
    LARGEST_STEP,
    check_factor,
    check_int,
    check_rate,
    check_real,
)
from keras_lso.schedules._members import check_name, elapsed, float32, straight_line
from keras_lso.schedules._powers import whole


def _check_steps(argument, value, at_least):
    return check_int(argument, value, at_least, at_most=LARGEST_STEP)


class WaitingDecay(LearningRateSchedule):
    """Base of all: a decay that has not begun for some steps.

    ```python
    rate = learning_rate * min(1, step / warmup_steps)
    if step > begin: rate = decayed(rate, step - begin)
    ```
    """

    warmup_steps = 0

    def __init__(self, learning_rate, decay_steps, begin_decay_at, min_lr, name):
        self.learning_rate = check_rate("learning_rate", learning_rate)
        self.decay_steps = _check_steps("decay_steps", decay_steps, at_least=1)
        self.begin_decay_at = _check_steps("begin_decay_at", begin_decay_at, at_least=0)
        self.min_lr = check_rate("min_lr", min_lr)
        self.name = check_name(name, self)

    @property
    def _begin(self):
        """The step from which the decay counts."""
        return self.begin_decay_at

    def __call__(self, step):
        step = whole(step)
        rate = self._warmed_up(step)
        decaying = step - self._begin
        # No decay is asked for what it is at zero steps or fewer.
        decayed = self.decayed(rate, ops.maximum(decaying, 1))
        return ops.where(decaying > 0, decayed, rate)

    def _warmed_up(self, step):
        rate = float32(self.learning_rate)
        if self.warmup_steps == 0:
            return rate
        line = straight_line(elapsed(step), self.warmup_steps, 0.0, self.learning_rate)
        return ops.where(step < self.warmup_steps, line, rate)

    def decayed(self, rate, step):
        """Returns what becomes of a rate in so many steps, one or more, in float32."""
        raise NotImplementedError

    def get_config(self):
        return {
            "learning_rate": self.learning_rate,
            "decay_steps": self.decay_steps,
            "begin_decay_at": self.begin_decay_at,
            "min_lr": self.min_lr,
            "name": self.name,
        }


class WarmedUpDecay(WaitingDecay):
    """Base of those that warm up first and have a power."""

    def __init__(
        self,
        learning_rate,
        decay_steps,
        power=1.0,
        begin_decay_at=0,
        min_lr=0.0,
        warmup_steps=0,
        name=None,
    ):
        super().__init__(learning_rate, decay_steps, begin_decay_at, min_lr, name)
        self.power = check_factor("power", check_real("power", power), above=0.0)
        self.warmup_steps = _check_steps("warmup_steps", warmup_steps, at_least=0)

    def left_and_done(self, step):
        """Returns the steps of the decay that are left, and those that are done."""
        done = ops.minimum(step, self.decay_steps)
        return self.decay_steps - done, done

    def get_config(self):
        return {
            **super().get_config(),
            "power": self.power,
            "warmup_steps": self.warmup_steps,
        }
