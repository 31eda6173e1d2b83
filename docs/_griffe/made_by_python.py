"""Imports from Python what the sources do not show: what a table makes, for example.

OpenSeq2Seq's learning-rate policies, as functions, are the rows of a table. Optimizers
take some methods from other modules. Everything else is read from the sources.
`keras_style.py` runs afterwards, on the result.
"""

import inspect

import griffe

TABLE = "keras_lso.compat.open_seq2seq.lr_policies"


class MadeByPython(griffe.Extension):
    """Adds the functions of the table, and methods of other modules."""

    def on_object(self, *, obj, **kwargs):
        if obj.is_class:
            taken = [name for name, m in obj.members.items() if is_taken_over(m)]
            made = griffe.dynamic_import(obj.path) if taken else None
            for name in taken:
                if inspect.isfunction(getattr(made, name)):
                    document(obj, name, getattr(made, name))
        elif obj.path == TABLE:
            module = griffe.dynamic_import(TABLE)
            for name in module.__all__:
                document(obj, name, getattr(module, name))


def is_taken_over(member):
    """Whether a member of a class is a method that another module defines."""
    value = str(member.value) if member.is_attribute else ""
    return value == "OfTFKeras()" or value.startswith("methods.")


def document(parent, name, made):
    """Makes a function, with its signature and docstring, a member of `parent`."""
    function = as_function(name, made, parent)
    function.docstring = griffe.Docstring(inspect.getdoc(made), parent=function)
    parent.set_member(name, function)


def as_function(name, made, parent):
    """Returns the function as griffe represents one of the sources."""
    signature = inspect.signature(made)
    parameters = [
        griffe.Parameter(
            each.name,
            kind=griffe.ParameterKind(each.kind.description),
            default=None if each.default is each.empty else repr(each.default),
        )
        for each in signature.parameters.values()
    ]
    return griffe.Function(
        name, parameters=griffe.Parameters(*parameters), parent=parent
    )
