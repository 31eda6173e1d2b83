"""Takes from Python what the sources do not show: what decorators and tables make.

A decorator gives a schedule its constructor and the shared text of its docstring, and
OpenSeq2Seq's learning-rate policies are the rows of a table. All else is read from the
sources. `keras_style.py`, which comes after it, reads the result.
"""

import inspect

import griffe

DECORATOR = "keras_lso.schedules._declared.declared"
TABLE = "keras_lso.compat.open_seq2seq.lr_policies"


class MadeByPython(griffe.Extension):
    """Completes the schedules, and the functions in the table."""

    def on_object(self, *, obj, **kwargs):
        if obj.is_class and any(d.callable_path == DECORATOR for d in obj.decorators):
            made = griffe.dynamic_import(obj.path)
            obj.docstring.value = inspect.getdoc(made)
            obj.set_member("__init__", as_function("__init__", made.__init__, obj))
        elif obj.path == TABLE:
            module = griffe.dynamic_import(TABLE)
            for name in module.__all__:
                made = getattr(module, name)
                function = as_function(name, made, obj)
                function.docstring = griffe.Docstring(
                    inspect.getdoc(made), parent=function
                )
                obj.set_member(name, function)


def as_function(name, made, parent):
    """Returns what griffe has for a function of the sources."""
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
