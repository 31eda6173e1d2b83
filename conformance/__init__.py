"""What loss scaling promises, asked of this package and of its peers by programs.

`properties.py` asks; an `Adapter` for each participant answers, used as its
documentation says. `benchmarks/pages.py` writes the answers into the pages.
"""
