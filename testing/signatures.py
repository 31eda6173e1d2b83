"""Signatures as text, for tests that compare them."""

import ast
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


def for_type_checkers(module):
    """Returns a dict of the names that a module defines only for type checkers.

    They are in the body of its last `if TYPE_CHECKING:`, which is run here.
    """
    found = [
        node
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    body = ast.Module(body=found[-1].body, type_ignores=[])
    defined: dict = {}
    exec(compile(body, module.__file__, "exec"), vars(module), defined)
    return defined
