"""Which files of `keras_lso/_backend/` are of one backend: their names say so."""

PREFIXES = {
    "tensorflow": ("_tensorflow", "_tf_"),
    "jax": ("_jax",),
    "torch": ("_torch", "_triton"),
}


def prefixes_of_others(backend):
    """Returns how the names of files begin that are imported under no such backend."""
    return tuple(
        prefix
        for other, prefixes in PREFIXES.items()
        if other != backend
        for prefix in prefixes
    )
