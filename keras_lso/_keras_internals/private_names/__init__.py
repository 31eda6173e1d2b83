"""The private attributes of Keras and of the frameworks that the package relies on.

The list is checked before any module that uses these attributes is imported. With an
untested version, the user then gets an error that names the missing attributes instead
of an `AttributeError` during a step.
"""
