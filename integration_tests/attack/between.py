"""What happens to a run between its steps."""

import numpy as np

from integration_tests.attack import optimizers
from integration_tests.attack.cases import BACKEND, special
from integration_tests.attack.execution import array, tensor
from integration_tests.attack.optimizers import CLIPS, HYPERPARAMETERS, one_of


def disturb(run, random):
    """Does one of the `DISTURBANCES` now and then; returns words for it or None."""
    if random.random() < 0.6:
        return None
    happens = one_of(*DISTURBANCES)(random)
    told = happens(run, random)
    return None if told is False else f"{happens.__name__}: {told}"


def assigned_rate(run, random):
    if not run.has_rate:
        return False
    run.optimizer.learning_rate = float(10 ** random.uniform(-4, 0))


def rate_that_is_not_finite(run, random):
    """Until the step is over."""
    if not run.has_rate or random.random() < 0.7:
        return False
    run.rate_after = float(array(run.optimizer.learning_rate))
    run.optimizer.learning_rate = float(random.choice([np.inf, np.nan]))


def assigned_iterations(run, random):
    options = run.case.inner.options
    if "gradient_accumulation_steps" in options or "members" in options:
        return False
    now = int(one_of(0, 1, 7, 1000, 2**24 + 1)(random))
    run.optimizer.iterations.assign(now)
    counters = run.counters
    counters.attempted += now - counters.applied
    counters.applied = now
    return now


def assigned_attribute(run, random):
    """A compiled step would not see it."""
    options = run.case.inner.options
    if run.case.execution != "eager" or "members" in options:
        return False
    has = lambda name: isinstance(getattr(run.optimizer, name, None), float)  # noqa: E731
    names = [name for name in optimizers.CHANGEABLE if has(name)]
    # Keras's config takes one of them.
    clips = [name for name in CLIPS if has(name)] or list(CLIPS)
    name = one_of(*names, *clips)(random)
    if name == "momentum" and not run.optimizer.momentum:
        return False
    value = {**HYPERPARAMETERS, **CLIPS}[name](random)
    setattr(run.optimizer, name, value)
    run.settings[name] = value
    return f"{name} = {value}"


def assigned_weight(run, random):
    variable = one_of(*run.variables)(random)
    values = np.asarray(random.normal(size=variable.shape))
    if random.random() < 0.2:
        values = special(random, values, variable.dtype)
    if random.random() < 0.5:
        # Some elements only.
        keep = random.random(size=variable.shape) < 0.5
        values = np.where(keep, array(variable), values)
    variable.assign(tensor(values, variable.dtype))


def written_weight(run, random):
    """As PyTorch does not count it."""
    if BACKEND != "torch":
        return False
    variable = one_of(*run.variables)(random)
    variable.value.data.mul_(0.5)


def moved_memory(run, random):
    """Of a weight, a master or a slot: as `module.to(...)` replaces it."""
    if BACKEND != "torch":
        return False
    import torch

    for variable in run.trained:
        value = variable.value
        if not value.is_floating_point() or random.random() < 0.5:
            continue
        memory = torch.zeros((*value.shape, 2), dtype=value.dtype)
        memory[..., 0] = value.data
        is_strided = random.random() < 0.5
        variable.value.data = memory[..., 0] if is_strided else value.data.clone()


DISTURBANCES = [
    assigned_rate,
    rate_that_is_not_finite,
    assigned_iterations,
    assigned_attribute,
    assigned_weight,
    written_weight,
    moved_memory,
]
