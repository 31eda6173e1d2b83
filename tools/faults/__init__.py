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
    master_weights,
    plans,
    replicas,
    reports,
    rules,
    schedules,
    spikes,
    state,
    stateless,
)

AREAS = (
    loss_scale_optimizer,
    guards,
    spikes,
    master_weights,
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
