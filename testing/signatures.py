"""Signatures as text, for tests that compare them."""

import inspect


def without_types(function):
    """Returns the signature of a function or class, without its annotations."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(
        signature.replace(parameters=parameters, return_annotation=signature.empty)
    )
