"""Schedules of other libraries, as docs/api/schedules.md calls them.

Each function returns the names that a call of that page may use, and a function that
computes the rates of some steps, in float64, from the result of the call. In place of a
library that is not installed there are functions with its arguments and formulas.
"""

import importlib.machinery
import importlib.util
import math
import sys
import types
import warnings

import numpy as np

# A run of `n` steps. The page explains each letter.
NUMBERS = {"lr": 0.7, "w": 6, "s": 9, "d": 10, "n": 40, "t": 15, "h": 7}
NUMBERS |= {"m": 0.01, "i": 0.02, "r": 0.1, "g": 0.9}


def _of_a_scheduler(scheduler, steps):
    """Returns the rates of a scheduler of PyTorch, which counts the steps itself."""
    found = []
    for _ in range(max(steps) + 1):
        found.append(float(scheduler.get_last_lr()[0]))
        scheduler.optimizer.step()
        with warnings.catch_warnings():
            # `SequentialLR` calls a deprecated function.
            warnings.simplefilter("ignore")
            scheduler.step()
    return np.array(found)[steps]


def _optimizer_of_torch():
    import torch

    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], NUMBERS["lr"])


def torch():
    from torch.optim import lr_scheduler

    return vars(lr_scheduler) | {"optimizer": _optimizer_of_torch()}, _of_a_scheduler


def transformers():
    """Loads one file, since the package would import others that are not needed."""
    name = "transformers.optimization"
    [folder] = importlib.util.find_spec("transformers").submodule_search_locations
    spec = importlib.machinery.PathFinder.find_spec(name, [folder])
    module = importlib.util.module_from_spec(spec)
    # The imports that the schedules do not use.
    unused = {
        "transformers": {},
        "transformers.trainer_pt_utils": dict.fromkeys(
            ["LayerWiseDummyOptimizer", "LayerWiseDummyScheduler"]
        ),
        "transformers.trainer_utils": {"SchedulerType": _AnyName()},
        "transformers.utils": {
            "logging": types.SimpleNamespace(get_logger=lambda name: None)
        },
    }
    before = {n: sys.modules.get(n) for n in unused}
    for stand_in, content in unused.items():
        sys.modules[stand_in] = types.ModuleType(stand_in)
        vars(sys.modules[stand_in]).update(content)
    try:
        spec.loader.exec_module(module)
    finally:
        for stand_in, old in before.items():
            if old is None:
                del sys.modules[stand_in]
            else:
                sys.modules[stand_in] = old
    return vars(module) | {"optimizer": _optimizer_of_torch()}, _of_a_scheduler


class _AnyName:
    """An enum with any member."""

    def __getattr__(self, name):
        return name


def _of_a_function(schedule, steps):
    return np.array([float(schedule(step)) for step in steps])


def optax():
    import optax

    return vars(optax), _of_a_function


def timm():
    """https://github.com/huggingface/pytorch-image-models, scheduler/cosine_lr.py."""

    def cosine(
        optimizer, t_initial, lr_min, warmup_t, warmup_lr_init, warmup_prefix=False
    ):
        def rate(t):
            if t < warmup_t:
                return warmup_lr_init + t * (optimizer - warmup_lr_init) / warmup_t
            t = t - warmup_t if warmup_prefix else t
            if t >= t_initial:
                return lr_min
            half = 1 + math.cos(math.pi * t / t_initial)
            return lr_min + 0.5 * (optimizer - lr_min) * half

        return rate

    return {"CosineLRScheduler": cosine, "optimizer": NUMBERS["lr"]}, _of_a_function


def levanter():
    """https://github.com/stanford-crfm/levanter, optim/config.py: it joins optax's."""
    import optax

    def config(lr, lr_schedule, warmup, min_lr_ratio, stable=0):
        end = lr * min_lr_ratio
        decay_steps = NUMBERS["n"] - warmup - stable

        def inverse_root(count):
            root = 1.0 / math.sqrt(max(count + warmup, 1) / 10_000)
            return max(lr * min(1.0, root), end)

        decay = {
            "cosine": optax.cosine_decay_schedule(lr, decay_steps, min_lr_ratio),
            "linear": optax.linear_schedule(lr, end, decay_steps),
            "inv_sqrt": inverse_root,
        }[lr_schedule]
        warm = optax.linear_schedule(0.0, lr, warmup)

        def rate(step):
            if step < warmup:
                return warm(step)
            return lr if step < warmup + stable else decay(step - warmup - stable)

        return rate

    return {"AdamConfig": config}, _of_a_function


def addons():
    """https://github.com/tensorflow/addons, optimizers/cyclical_learning_rate.py."""

    def cyclical(scale_of):
        def make(initial, maximal, step_size, gamma=1.0):
            def rate(step):
                cycle = math.floor(1 + step / (2 * step_size))
                x = abs(step / step_size - 2 * cycle + 1)
                scale = scale_of(cycle, step, gamma)
                return initial + (maximal - initial) * max(0, 1 - x) * scale

            return rate

        return make

    names = {
        "Triangular": lambda cycle, step, gamma: 1.0,
        "Triangular2": lambda cycle, step, gamma: 1 / 2.0 ** (cycle - 1),
        "Exponential": lambda cycle, step, gamma: gamma**step,
    }
    classes = {f"{n}CyclicalLearningRate": cyclical(f) for n, f in names.items()}
    return classes, _of_a_function


# By the heading of the first column of their table.
ORIGINALS = {
    "torch.optim.lr_scheduler": torch,
    "timm.scheduler": timm,
    "optax": optax,
    "levanter.optim": levanter,
    "tfa.optimizers": addons,
}


def rates(make, call, steps):
    """Returns the rates of an original, called as on the page."""
    names, rates_of = make()
    return rates_of(eval(call, {**names, **NUMBERS}), steps)
