"""A random differential attack: new cases until its time is over.

```sh
KERAS_BACKEND=torch python -m integration_tests.attack --mode eager --minutes 60
KERAS_BACKEND=jax python -m integration_tests.attack --mode jit
KERAS_BACKEND=torch python -m integration_tests.attack --mode long --steps 100000
KERAS_BACKEND=torch python -m integration_tests.attack --seed 0 --case 17
```

A case depends on its seed and its number only, so that the last of these lines repeats
it. An optimizer, a loss-scale policy or none, a spike guard, records, variables,
gradients and what happens between steps are all drawn at random, from the tables of
`cases.py`, `optimizers.py` and `policies.py`. `reference.py` compares each step with
the bare optimizer's from the same state; the scale, the counters, the outliers and the
records are compared with NumPy's. A run that was saved and loaded goes on as the one
that was not, or with another kind of masters.

The mode `long` is one run of many steps, of which each scale and counter is compared
with NumPy. At the end the process must not have grown.
"""
