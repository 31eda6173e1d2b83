"""The private attributes of Keras and of the frameworks that the package leans on.

Apart from the modules that use them, and importing none of these, because the list is
gone through before them: beside a version that the package was not tested with, an
error is to name what that version lacks, in place of an `AttributeError` in some step.
"""
