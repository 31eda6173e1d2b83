"""Which kernels the steps are to use: the environment variable `KERAS_LSO_KERNELS`.

- `auto`, the default: those of the frameworks, and on PyTorch on a GPU our own in
  Triton, for the rules that have one, where Triton is installed and the kernel has
  passed a trial (`_torch_triton_trial.py`).
- `framework`: those of the frameworks alone.
- `triton`: as `auto`, but it is an error if Triton is missing, or if a kernel fails.
- `generic`: none, which is the reference of the tests.

TensorFlow and JAX compile their steps: of these they know `generic` alone.
"""

import os

CHOICES = ("auto", "framework", "triton", "generic")

KERNELS = os.environ.get("KERAS_LSO_KERNELS", "auto")
if KERNELS not in CHOICES:
    raise ValueError(
        "The environment variable KERAS_LSO_KERNELS must be 'auto', 'framework', "
        f"'triton' or 'generic'. Received: KERAS_LSO_KERNELS={KERNELS!r}"
    )
