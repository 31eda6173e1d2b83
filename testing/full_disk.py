"""A disk without space."""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(size=0):
    """Lets no file of this process grow beyond a number of bytes."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
