"""The core of the optimizers, without the additions for older APIs.

Read `keras_lso/loss_scale_optimizer.py` first; its `apply` is the path of a gradient,
from top to bottom. It calls the modules here: `gradients.py` pairs gradients with
variables, `step.py` scales, unscales and steps, `counters.py` counts, and
`state_file.py` saves and loads.

Nothing here imports `compat/` or `mixed_precision/`, which build on it, not by name
either. A contract of import-linter in `pyproject.toml` enforces the former.
"""
