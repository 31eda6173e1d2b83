"""A run on two replicas stalls and goes on, and is restarted by hand.

Prints what the monitor said, and whether both have the same numbers.
"""

import json

import numpy as np

from integration_tests.distributed.two_replicas import strategy
from integration_tests.test_restore import make_model, train_and_restart, values_of

with strategy.scope():
    model, other = make_model(), make_model()
told, _, _ = train_and_restart(model, other)
found, right = values_of(model), values_of(other)
print("TOLD", json.dumps(told))
same = [bool(np.array_equal(*pair)) for pair in zip(found, right, strict=True)]
print("SAME", json.dumps(same))
print("FINITE", json.dumps(bool(all(np.isfinite(v).all() for v in found))))
