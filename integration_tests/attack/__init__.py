"""A random differential attack: new cases until its time is over.

```sh
KERAS_BACKEND=torch python -m integration_tests.attack --mode eager --minutes 60
KERAS_BACKEND=jax python -m integration_tests.attack --mode jit --part schedules
KERAS_BACKEND=torch python -m integration_tests.attack --seed 0 --case 17
```

Where `properties/` has Hypothesis draw from few values, and compares whole runs, the
attack draws hyperparameters, layouts of gradients and what happens between steps at
random, and judges each step alone: `reference.py` says by what. A case depends on its
seed and its number only, so that the last of these lines repeats it.
"""
