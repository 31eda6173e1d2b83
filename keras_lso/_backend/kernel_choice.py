"""Which kernels the steps are to use: the environment variable `KERAS_LSO_KERNELS`.

- `auto`, the default: those of the frameworks.
- `generic`: none, which is the reference of the tests.
- `triton`: as `auto`, but on PyTorch our own for the rules that have one, where the
  tensors are on a GPU. TensorFlow and JAX compile their steps, and ignore it.
"""

import os

CHOICES = ("auto", "generic", "triton")

KERNELS = os.environ.get("KERAS_LSO_KERNELS", "auto")
if KERNELS not in CHOICES:
    raise ValueError(
        "The environment variable KERAS_LSO_KERNELS must be 'auto', 'generic' or "
        f"'triton'. Received: KERAS_LSO_KERNELS={KERNELS!r}"
    )
