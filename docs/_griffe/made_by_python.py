"""Imports from Python what the sources do not show: what a table makes, for example.

OpenSeq2Seq's learning-rate policies, as functions, are the rows of a table. Optimizers
take some methods from other modules. Everything else is read from the sources.
`keras_style.py` runs afterwards, on the result.
"""

import ast
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
            # The sources have their signatures, for type checkers.
            module = griffe.dynamic_import(TABLE)
            for name in module.__all__:
                describe(obj.members[name], getattr(module, name))


def is_taken_over(member):
    """Whether a member of a class is a method that another module defines."""
    value = str(member.value) if member.is_attribute else ""
    return value == "OfTFKeras()" or value.startswith("methods.")


def document(parent, name, made):
    """Makes a function, with its signature and docstring, a member of `parent`."""
    function = as_function(name, made, parent)
    describe(function, made)
    parent.set_member(name, function)


def describe(function, made):
    """Gives griffe's function the docstring that it has in Python."""
    function.docstring = griffe.Docstring(
        inspect.getdoc(made),
        parent=function,
        parser="google",
        parser_options={"warn_missing_types": False},
    )


def as_function(name, made, parent):
    """Returns the function as griffe represents one of the sources."""
    types = types_in_source(made, parent)
    parameters = [
        griffe.Parameter(
            each.name,
            annotation=types.get(each.name),
            kind=griffe.ParameterKind(each.kind.description),
            default=None if each.default is each.empty else repr(each.default),
        )
        for each in inspect.signature(made).parameters.values()
    ]
    return griffe.Function(
        name,
        parameters=griffe.Parameters(*parameters),
        returns=types["return"],
        parent=parent,
    )


def types_in_source(made, parent):
    """Returns a dict of a method's parameters, and "return", to types as written.

    In Python they have other names, those of the modules that define them.
    """
    [function] = ast.parse(inspect.getsource(made)).body
    arguments = function.args.args[1:] + function.args.kwonlyargs
    types = {each.arg: each.annotation for each in arguments}
    types["return"] = function.returns
    return {
        name: griffe.safe_get_annotation(written, parent=parent)
        for name, written in types.items()
    }
