"""A run on two replicas stalls and goes on, and is restarted by hand.

Prints what the monitor said, and whether both have the same numbers.
"""

import json

import numpy as np

from integration_tests.distributed.two_replicas import strategy
from integration_tests.test_restore import (
    callbacks,
    data,
    fit,
    halve,
    make_model,
    monitor,
    values_of,
)

x, y = data()
with strategy.scope():
    model, other = make_model(), make_model()
record = callbacks.StepRecord()
history, told = fit(model, x, y, monitor(), record)
steps = history.history["step_record"][0]["step"]
[at] = np.flatnonzero(np.diff(steps) < 0) + 1
first = steps[at]
fit(other, x[: first - 1], y[: first - 1])
halve(other)
fit(other, x[at:], y[at:])
found, right = values_of(model), values_of(other)
print("TOLD", json.dumps(told))
same = [bool(np.array_equal(*pair)) for pair in zip(found, right, strict=True)]
print("SAME", json.dumps(same))
print("FINITE", json.dumps(bool(all(np.isfinite(v).all() for v in found))))
