"""`test_jax_*.py` are run under JAX only, and so on: their engine is JAX's."""

import keras

collect_ignore_glob = [
    f"test_{backend}_*.py"
    for backend in ("tensorflow", "jax", "torch")
    if backend != keras.backend.backend()
]
