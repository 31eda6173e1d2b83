"""The lists of private attributes hold all that the package's source uses, and no more.

The source is read, not run. A name counts as another package's if nothing in ours
defines it, or if Keras's own classes have one like it.
"""

import ast
import collections
import dis
import functools
import inspect
import itertools
import pathlib
import re

import keras
from keras_lso._keras_internals.private_names import of_frameworks, of_keras
from keras_lso._keras_internals.private_names.probes import methods_of

import keras_lso

PACKAGE = pathlib.Path(keras_lso.__file__).parent
LISTS = PACKAGE / "_keras_internals" / "private_names"
PRIVATE = re.compile(r"_[a-z]\w*")

# What looks like another package's, and is not.
NO_ATTRIBUTES_OF_OTHERS = {
    "_replace": "of Python's named tuples",
    "_slots_added_by_name": "set in an instance's `__dict__`, under this name",
    "_accumulated_gradient": "the end of a name of our own variables",
    "_second_moment": "the end of a name of our own variables",
    "_module_state_mapping": "imported where there is one: without it an error is lost",
    "_gradient_accumulator": "the end of a name: the probe of `build` looks for it",
    "_average": "the end of a name: the probe of `build` looks for it",
    # Keras has attributes of these names, of other classes than those that we use them
    # of, or they are of functions of ours.
    "_called": "of our own lists of variables",
    "_compute_loss": "of our own training op",
    "_dtype": "a function of ours",
    "_model": "of our own training op",
    "_name": "a function of ours",
}
# Names of others that are also our own.
OUR_OWN = {
    "_accumulators",
    "_value",
    "_iterations",
    "_version",
    "_variables",
}


# Files out of `_keras_internals/` in which a listed name occurs, and why.
ELSEWHERE = {
    "_core/fused_step.py": "names of our own attributes",
    "_backend/jax/framework.py": "names of our own attributes",
    "_backend/torch/shard_checks.py": "asked of layers, on PyTorch alone",
    "compat/tf_keras/checkpoints.py": "keys of the files that tf.keras wrote",
    "compat/tf_keras/state.py": "names of our own variables",
    "diagnostics/statistics.py": "names of our own attributes",
    "loss_scales/loss_scale.py": "names of our own attributes",
}


class Names(ast.NodeVisitor):
    """The private names that a file uses, and those that it defines."""

    def __init__(self):
        self.used, self.defined = set(), set()

    def visit_Attribute(self, node):
        self._use(node.attr)
        of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        if of_self and isinstance(node.ctx, ast.Store):
            self.defined.add(node.attr)
        self.generic_visit(node)

    def visit_Constant(self, node):
        # In `getattr` or a table of slots.
        if isinstance(node.value, str):
            self._use(node.value)

    def visit_FunctionDef(self, node):
        self._use(node.name)
        self.defined.add(node.name)
        self.generic_visit(node)

    visit_ClassDef = visit_FunctionDef

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Store):
            self.defined.add(node.id)

    def visit_ImportFrom(self, node):
        ours = (node.module or "").startswith("keras_lso")
        for alias in node.names:
            if node.module and node.module.startswith("keras.src"):
                self.used.add(alias.name)
            elif not ours:
                self._use(alias.name)

    def _use(self, name):
        if PRIVATE.fullmatch(name):
            self.used.add(name)


@functools.cache
def names_of_the_package():
    """Returns a dict of private names to files that use them, and those it defines."""
    used, defined = collections.defaultdict(set), set()
    for file in sorted(PACKAGE.rglob("*.py")):
        defined |= {file.stem, file.parent.name}
        if file.parent == LISTS:
            continue
        names = Names()
        names.visit(ast.parse(file.read_text()))
        defined |= names.defined
        for name in names.used:
            used[name].add(file.relative_to(PACKAGE).as_posix())
    return used, defined


@functools.cache
def names_of_keras():
    """Returns the names that Keras's classes have, of those that the package uses."""
    optimizers = inspect.getmembers(keras.optimizers, inspect.isclass)
    classes = [
        *(cls for _, cls in optimizers if issubclass(cls, keras.Optimizer)),
        keras.Variable,
        keras.Model,
        keras.callbacks.Callback,
        keras.optimizers.schedules.LearningRateSchedule,
    ]
    # Many stand above several of them.
    classes = {cls for each in classes for cls in each.__mro__} - {object}
    return set().union(*map(_set_by, classes))


def _set_by(cls):
    instructions = itertools.chain(*map(dis.get_instructions, methods_of(cls)))
    return {i.argval for i in instructions if i.opname == "STORE_ATTR"} | set(vars(cls))


def listed():
    """Returns the listed private names."""
    return {
        probe.name
        for probe in (*of_keras.PROBES, *of_frameworks.PROBES)
        if PRIVATE.fullmatch(probe.name) or probe.owner.startswith("keras.src")
    }


def used_of_others():
    """Returns a dict of the names of other packages to the files that use them."""
    used, defined = names_of_the_package()
    return {
        name: files
        for name, files in used.items()
        if name not in NO_ATTRIBUTES_OF_OTHERS
        and (name not in defined or name in OUR_OWN or name in names_of_keras())
    }


def test_every_used_private_attribute_is_listed():
    unlisted = used_of_others().keys() - listed()
    assert not unlisted, "Add a probe to private_names/, or say why not."


def test_every_listed_private_attribute_is_used():
    # Those of modules rather than of attributes are found by their import.
    modules = {"optimizers", "GraphOrParentsInXlaContext"}
    assert listed() - modules <= used_of_others().keys()


def test_private_keras_attributes_are_used_only_in_known_files():
    of_keras_alone = listed() & {probe.name for probe in of_keras.PROBES}
    files = set().union(*map(used_of_others().get, of_keras_alone - {"optimizers"}))
    elsewhere = {f for f in files if not f.startswith("_keras_internals/")}
    assert elsewhere == ELSEWHERE.keys()


def test_every_listed_exception_is_still_needed():
    used, defined = names_of_the_package()
    for name in NO_ATTRIBUTES_OF_OTHERS:
        assert name in used, name
    assert listed() & used.keys() >= OUR_OWN


def test_names_visitor_finds_used_and_defined_private_names():
    names = Names()
    names.visit(
        ast.parse(
            "from keras.src.backend import any_symbolic_tensors\n"
            "def f(optimizer):\n"
            "    optimizer._a(getattr(optimizer, '_b', None))\n"
            "    self._c = torch._foreach_d\n"
        )
    )
    assert names.used == {"any_symbolic_tensors", "_a", "_b", "_c", "_foreach_d"}
    assert names.defined == {"f", "_c"}
