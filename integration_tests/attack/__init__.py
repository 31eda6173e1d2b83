"""A random differential attack on the package: new programs until its time is over.

```sh
KERAS_BACKEND=torch python -m integration_tests.attack --minutes 60
KERAS_BACKEND=jax python -m integration_tests.attack --mode jit
KERAS_BACKEND=torch python -m integration_tests.attack --mode long --steps 100000
```

`machine.py` says what is promised: Hypothesis draws programs from its rules, and
shrinks one that finds a fault. Its database `.hypothesis/` stores that program, with
which the next run of the mode begins. `setups.py`, `optimizers.py`, `policies.py` and
`gradients.py` say what is drawn. `steps.py` and `reference.py` compare each step with
the bare optimizer's from the same state; the scale, the counters, the outliers and the
records are compared with NumPy's (`policies.py`, `runs.py`).

The mode `long` is one run of many steps, of which each scale and counter is compared
with NumPy. At the end the process must not have grown.
"""
