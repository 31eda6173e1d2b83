"""What happens to a gradient: the optimizers, without what older APIs add to them.

Read `loss_scale_optimizer.py` first; its `apply` is the way of a gradient, from top to
bottom. What it calls stands beside it: `gradients.py` pairs gradients with variables,
`step.py` scales, unscales and steps, `counters.py` counts, `state_file.py` saves and
loads.

Nothing here imports `compat/` or `mixed_precision/`, which build on it: a contract of
import-linter in `pyproject.toml` holds that.
"""
