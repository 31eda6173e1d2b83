"""Adds to each pin the hashes of its files on an index.

    python -m tools.lock_hashes build/frozen.txt requirements/dev.txt

pip then refuses a file that the index did not have when the versions were chosen.
PyTorch has no hash, because each index has its own build. requirements/torch.txt has
its version. The script needs uv, which reads the hashes from the index.
"""

import pathlib
import re
import subprocess
import sys

# `torch==2.13.0+cpu` is what an index for CPUs calls `torch==2.13.0`.
_LOCAL = re.compile(r"\+cpu\b")


def lock(frozen):
    """Returns pins with hashes, a string, of what `pip freeze` has printed."""
    lines = _LOCAL.sub("", frozen).splitlines(keepends=True)
    pins = [line for line in lines if not line.startswith("torch==")]
    command = ["uv", "pip", "compile", "-", "--generate-hashes", "--no-deps", "--quiet"]
    command += ["--no-header", "--no-annotate", "--python", sys.executable]
    finished = subprocess.run(
        command, input="".join(pins), capture_output=True, text=True
    )
    if finished.returncode:
        raise SystemExit(finished.stderr)
    return finished.stdout


if __name__ == "__main__":
    _source, _target = map(pathlib.Path, sys.argv[1:])
    _target.write_text(lock(_source.read_text()))
