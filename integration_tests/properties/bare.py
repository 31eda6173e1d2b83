"""The inner optimizer alone: what a run is held against."""

import keras
import numpy as np
from keras import ops

from integration_tests.properties.cases import STATELESS
from integration_tests.properties.execution import (
    array,
    compiled,
    stateless_apply,
    tensors,
)
from integration_tests.properties.runs import make_variables


class Bare:
    """The inner optimizer alone, on what the optimizer of a case trains."""

    def __init__(self, case, run):
        self.case = case
        self.has_master = [
            v is not trained
            for v, trained in zip(
                run.variables, run.optimizer._masters.trained, strict=True
            )
        ]
        self.variables = make_variables(
            map(array, run.variables),
            [
                "float32" if has_master else dtype
                for has_master, dtype in zip(self.has_master, case.dtypes, strict=True)
            ],
        )
        self.optimizer = case.inner.make()
        self.optimizer.build(self.variables)
        self.apply = compiled(
            self._apply, [*self.variables, *self.optimizer.variables], case.execution
        )
        self.largest = [np.abs(array(v)).max(initial=0) for v in self.trained]

    def _apply(self, gradients):
        # By the same call: on PyTorch, Keras's ScheduleFreeAdamW holds a tensor that
        # `apply` changes under its hands, and `stateless_apply` does not.
        if self.call == STATELESS:
            stateless_apply(self.optimizer, self.variables, gradients)
        else:
            self.optimizer.apply(gradients, self.variables)

    @property
    def trained(self):
        return [*self.variables, *self.optimizer.variables]

    def step(self, unscaled, call):
        self.call, gradients = call, tensors(unscaled)
        if "gradient_accumulation_steps" in self.case.inner.options:
            # Its accumulators are of these dtypes.
            gradients = [
                None if g is None else ops.cast(g, v.dtype)
                for g, v in zip(gradients, self.variables, strict=True)
            ]
        self.apply(gradients)
        for i, v in enumerate(self.trained):
            now = np.abs(array(v))
            finite = now[np.isfinite(now)]
            self.largest[i] = max(self.largest[i], finite.max(initial=0))

    def expected_weights(self):
        """What the model holds: float32 masters, rounded."""
        return [
            ops.cast(ops.clip(v, -65504.0, 65504.0), dtype)
            if has_master and dtype == "float16"
            else ops.cast(v, dtype)
            for v, has_master, dtype in zip(
                self.variables, self.has_master, self.case.dtypes, strict=True
            )
        ]

    def compare(self, run, share):
        """Holds a run against it: bit for bit, or within a share of the largest."""
        optimizer = run.optimizer
        found = [
            *optimizer._masters.trained,
            *optimizer.inner_optimizer.variables,
        ]
        pairs = list(zip(found, self.trained, strict=True))
        if not share:
            weights = zip(run.variables, self.expected_weights(), strict=True)
            for v, e in [*pairs, *weights]:
                np.testing.assert_array_equal(array(v), array(e))
                is_negative = np.signbit(array(v)), np.signbit(array(e))
                are_numbers = ~np.isnan(array(e))
                np.testing.assert_array_equal(*(s[are_numbers] for s in is_negative))
            return
        for (v, e), largest in zip(pairs, self.largest, strict=True):
            e, dtype = array(e), keras.backend.standardize_dtype(v.dtype)
            if "int" in dtype:
                np.testing.assert_array_equal(array(v), e)
                continue
            # Neighbours of a narrow dtype are further from each other.
            narrow = {"float16": 2.0**-9, "bfloat16": 2.0**-6}.get(dtype, 0.0)
            np.testing.assert_allclose(
                array(v), e, rtol=0, atol=(share + narrow) * largest, err_msg=v.path
            )
