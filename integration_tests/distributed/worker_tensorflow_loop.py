"""Trains on two replicas of which some overflow; writes their states.

    python -m integration_tests.distributed.worker_tensorflow_loop FOLDER
    python -m integration_tests.distributed.worker_tensorflow_loop FOLDER RANK PORT PORT
"""

import functools
import sys

from integration_tests.distributed import problem, tensorflow_cluster
from integration_tests.distributed.tensorflow_loop import (
    CASES,
    PATTERNS_OF,
    Loop,
    batches_of,
)

folder, *address = sys.argv[1:]
rank, *ports = [int(a) for a in address] or [None]
strategy = tensorflow_cluster.join(rank, *ports)

for case in CASES:
    loop = Loop(case, strategy)
    for pattern in PATTERNS_OF[case]:
        loop.restart()
        recorded = loop.record(functools.partial(batches_of, pattern, 2))
        for replica, states in enumerate(recorded, start=rank or 0):
            problem.save(f"{folder}/{case} {pattern} {replica}.npz", states)
