"""The choice of kernels for the steps: the environment variable `KERAS_LSO_KERNELS`.

- `framework`, the default: the kernels of the framework.
- `generic`: no kernels, which is the reference of the tests.
"""

import os

CHOICES = ("framework", "generic")

KERNELS = os.environ.get("KERAS_LSO_KERNELS", "framework")
if KERNELS not in CHOICES:
    raise ValueError(
        "The environment variable KERAS_LSO_KERNELS must be 'framework' or 'generic'. "
        f"Received: KERAS_LSO_KERNELS={KERNELS!r}"
    )
