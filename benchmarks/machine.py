"""The machine: its facts, and how fast it copies memory.

No names of hosts and no paths: the results are published.
"""

import datetime
import functools
import importlib.metadata
import os
import pathlib
import platform
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf_keras", "tf-models-official"),
    "jax": ("jax", "jaxlib", "jax-cuda13-plugin", "libtpu", "optax", "jmp"),
    "torch": ("torch", "torchao", "triton"),
}


def facts(backend, gpu=None):
    """Returns what there is to know of the machine and of what is installed.

    Args:
        backend: String. Keras's backend.
        gpu: String. The name of the GPU that it uses. Defaults to `None`.
    """
    import keras

    import keras_lso
    from keras_lso._backend import KERNELS

    return {
        "processor": _processor(),
        "cores": _cores(),
        "memory_gib": round(_memory_bytes() / 2**30),
        "gpu": gpu,
        "system": f"{_system()}, {platform.machine()}",
        "python": platform.python_version(),
        "keras_lso": keras_lso.__version__,
        "kernels": KERNELS,
        # Of a nightly build the package has another name.
        "packages": {
            "keras": keras.__version__,
            **_versions(("numpy", *_PACKAGES[backend])),
        },
        "date": datetime.date.today().isoformat(),
    }


def short_name(machine):
    """Returns a name for a file: of the GPU, or of the processor and its cores."""
    return slug(machine["gpu"] or f"{machine['processor']} {machine['cores']} cores")


def slug(name):
    """Returns a name in lower case, with hyphens between its words."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@functools.cache
def streams(bytes_):
    """Returns ways to move memory on all cores, and the bytes that each moves.

    `copy` is a `memcpy`. `in place` changes the sign of each number where it stands, as
    a step changes its weights. Both read and write each byte once; which of them is
    faster depends on the processor.

    Args:
        bytes_: Int. How many to move; far more than caches hold.
    """
    source, target = np.ones(bytes_ // 4, "float32"), np.zeros(bytes_ // 4, "float32")
    cores = _cores()
    sources, targets = np.array_split(source, cores), np.array_split(target, cores)
    pool = ThreadPoolExecutor(cores)

    def copy():
        list(pool.map(np.copyto, targets, sources))

    def negate():
        list(pool.map(np.negative, sources, sources))

    return {"copy": copy, "in place": negate}, 2 * bytes_


def _processor():
    """Returns the model's name, on Linux from /proc/cpuinfo."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.processor() or platform.machine()


def _cores():
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _memory_bytes():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _system():
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()


def _versions(packages):
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
