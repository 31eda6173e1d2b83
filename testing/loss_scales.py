"""A user-defined loss-scale policy, and a helper that builds policies."""

import keras
from keras import ops

from keras_lso.loss_scales import LossScale


def built(policy):
    policy.build()
    return policy


@keras.saving.register_keras_serializable("keras_lso_tests")
class CountingOverflows(LossScale):
    """Aims the largest gradient at a target, and counts the overflows."""

    needs_amax = True

    def __init__(self, target=64.0, **arguments):
        super().__init__(initial_loss_scale=8.0, **arguments)
        self.target = target

    def build(self, add_variable=None):
        if not self.built:
            super().build(add_variable)
            self.overflows = self.add_variable("overflows", 0, dtype="int")

    def step(self, finite, amax=None):
        self.assign_scale(ops.where(finite, self.target / amax, self.value / 2))
        overflow = ops.cast(ops.logical_not(finite), self.overflows.dtype)
        self.overflows.assign_add(overflow)

    def get_config(self):
        config = super().get_config()
        del config["initial_loss_scale"]
        return {**config, "target": self.target}
