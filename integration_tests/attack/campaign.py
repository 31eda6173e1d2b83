"""Case after case, and what came of them."""

import collections
import dataclasses
import time
import traceback
import warnings
from pathlib import Path

import keras
import numpy as np

from integration_tests.attack import run


@dataclasses.dataclass
class Campaign:
    """Attacks of one mode."""

    mode: str
    seed: int
    faults: list = dataclasses.field(default_factory=list)
    tally: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def case(self, number):
        """Runs a case, and remembers its fault, if it has one."""
        words = []
        random = np.random.default_rng([self.seed, number])
        # Some layers and optimizers draw numbers of their own.
        keras.utils.set_random_seed(number)
        self.tally["cases"] += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.attack(self.mode, random, self.tally, words)
        except Exception as error:
            self.faults.append(error)
            print(self._reproduction(number), *words, "", sep="\n  ")
            traceback.print_exception(error, limit=-4)
            print(flush=True)

    def _reproduction(self, number):
        return (
            f"KERAS_BACKEND={keras.backend.backend()} python -m "
            f"integration_tests.attack --mode {self.mode} --seed {self.seed} "
            f"--case {number}"
        )

    def until(self, end, number=0):
        """Runs cases until `time.monotonic()` is `end`, or the process `is_full`."""
        while time.monotonic() < end:
            self.case(number)
            number += 1
            if is_full():
                break
        return number

    def __str__(self):
        counts = "".join(f"\n{n:10,} {what}" for what, n in sorted(self.tally.items()))
        return (
            f"{keras.backend.backend()}, {self.mode}, seed {self.seed}: "
            f"{len(self.faults)} faults{counts}"
        )


def is_full():
    """Whether half of the memory maps are taken that Linux lets a process have.

    TensorFlow keeps all that XLA ever compiled, each program in three maps, some
    thousand a case. Without a further one XLA ends the process by a segmentation fault.
    """
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        return 2 * len(Path("/proc/self/maps").read_text().splitlines()) > most
    except FileNotFoundError:
        return False
