"""The faults, area by area."""

from tools.faults import (
    accumulation,
    arguments,
    averages,
    backend_jax,
    backend_tensorflow,
    backend_torch,
    compat,
    files,
    keras_internals,
    loss_scale_optimizer,
    loss_scales,
    optimizers,
    people,
    plans,
    processes,
    rules,
    schedules,
    state,
)

AREAS = (
    loss_scales,
    loss_scale_optimizer,
    plans,
    accumulation,
    averages,
    arguments,
    optimizers,
    rules,
    keras_internals,
    state,
    files,
    schedules,
    compat,
    people,
    processes,
    backend_torch,
    backend_jax,
    backend_tensorflow,
)
ALL = [fault for area in AREAS for fault in area.FAULTS]
