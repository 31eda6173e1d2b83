"""Prints its folder, unless fewer than so many have died of a segmentation fault yet.

Its arguments are a folder of its own, a file in which each death leaves a letter, and
how many there are to be.
"""

import os
import pathlib
import signal
import sys

folder, file, count = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
deaths = file.read_text()
if len(deaths) < count:
    file.write_text(deaths + "x")
    os.kill(os.getpid(), signal.SIGSEGV)
print(folder)
