"""The core of the optimizers, without the additions for older APIs.

Read `keras_lso/loss_scale_optimizer.py` first; its `apply` is the path of a gradient.
`gradients.py` pairs gradients with variables, `step.py` scales, unscales and steps,
and `counters.py` counts. Nothing here imports `compat/` or `mixed_precision/`, which
build on it.
"""
