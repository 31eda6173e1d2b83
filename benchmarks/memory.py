"""The most memory that a step needs besides what is there before and after it."""

import contextlib
import ctypes
import gc
import pathlib

_PROCESS = pathlib.Path("/proc/self")


def peak_extra_bytes(run):
    """Returns by how much the process grows while `run` runs, or None.

    Linux only: it keeps the largest size that a process had, and forgets it when "5"
    is written to `clear_refs`. What allocators keep for later is given back first;
    what they do not give back is not seen.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (_PROCESS / "clear_refs").write_text("5")
        before = _status("VmRSS")
        run()
        return max(0, _status("VmHWM") - before)
    except (OSError, KeyError):
        return None


def _status(name):
    """Returns a size from /proc/self/status, which has them in kB."""
    lines = (_PROCESS / "status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return int(values[name].split()[0]) * 1024
