"""The choice of kernels for the steps: the environment variable `KERAS_LSO_KERNELS`.

- `framework`, the default: the kernels of the framework.
- `triton`: on PyTorch with a GPU, the Triton kernels of this package, for the rules
  that have one. If Triton is missing, or if a kernel fails its trial
  (`torch/triton/trial.py`), an error is raised.
- `auto`: like `triton`, but with the kernels of the framework in place of an error.
- `generic`: no kernels, which is the reference of the tests.

TensorFlow and JAX compile their steps. For them, only `generic` makes a difference.
"""

import os

CHOICES = ("framework", "triton", "auto", "generic")

KERNELS = os.environ.get("KERAS_LSO_KERNELS", "framework")
if KERNELS not in CHOICES:
    raise ValueError(
        "The environment variable KERAS_LSO_KERNELS must be 'framework', 'triton', "
        f"'auto' or 'generic'. Received: KERAS_LSO_KERNELS={KERNELS!r}"
    )
