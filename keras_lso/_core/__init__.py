"""What happens to a gradient: the optimizers, without what older APIs add to them.

Read `loss_scale_optimizer.py` first; its `apply` is the way of a gradient, from top to
bottom. What it calls stands beside it: `gradients.py` pairs gradients with variables,
`scaling.py` scales and unscales, `counters.py` counts, `state_file.py` saves and loads.

Nothing here knows an annex (`_tf_keras/`, `compat/`, `mixed_precision/`): those build
on it, and a contract of import-linter in `pyproject.toml` holds that.
"""
