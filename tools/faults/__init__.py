"""The faults, area by area."""

from tools.faults import (
    accumulation,
    averages,
    backend_jax,
    backend_tensorflow,
    backend_torch,
    backend_torch_triton,
    compat,
    guards,
    loss_scale_optimizer,
    master_kinds,
    master_weights,
    plans,
    replicas,
    reports,
    rules,
    schedules,
    state,
    stateless,
)

AREAS = (
    loss_scale_optimizer,
    guards,
    master_weights,
    master_kinds,
    plans,
    accumulation,
    averages,
    rules,
    schedules,
    state,
    stateless,
    reports,
    compat,
    replicas,
    backend_torch,
    backend_torch_triton,
    backend_jax,
    backend_tensorflow,
)
ALL = [fault for area in AREAS for fault in area.FAULTS]
