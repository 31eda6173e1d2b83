"""Which kernels the steps are to use: the environment variable `KERAS_LSO_KERNELS`.

- `framework`, the default: those of the frameworks.
- `triton`: on PyTorch on a GPU our own in Triton, for the rules that have one. It is an
  error if Triton is missing, or if a kernel fails its trial (`torch/triton/trial.py`).
- `auto`: as `triton`, but those of the framework where that would be an error.
- `generic`: none, which is the reference of the tests.

TensorFlow and JAX compile their steps: of these they know `generic` alone.
"""

import os

CHOICES = ("framework", "triton", "auto", "generic")

KERNELS = os.environ.get("KERAS_LSO_KERNELS", "framework")
if KERNELS not in CHOICES:
    raise ValueError(
        "The environment variable KERAS_LSO_KERNELS must be 'framework', 'triton', "
        f"'auto' or 'generic'. Received: KERAS_LSO_KERNELS={KERNELS!r}"
    )
