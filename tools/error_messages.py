"""Writes docs/error-messages.md, the page of errors and warnings of the package.

    python -m tools.error_messages

The messages are read from the sources, so that the search of the documentation finds
each of them by its words. What belongs to a program, such as the number that came, is
written as "...".
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/error-messages.md"
ANY = "..."

OPENING = """\
# Error messages

This page lists the errors and warnings of the package, except those that only say what
an argument must be. "..." replaces the parts that differ between programs, such as
numbers and names of variables. To find a message, paste it into the field below, or
enter a few of its fixed words in the search above. Messages of Keras and of the
frameworks are on [Troubleshooting](troubleshooting.md).

<input type="search" id="error-message" placeholder="Paste a message"
aria-label="Paste an error message"><p id="error-message-found"></p>
"""

# The heading of a group, what to read about it, and where its messages are raised. The
# first that fits a file counts.
GROUPS = (
    (
        "Saving and loading",
        "See [Saving and resuming](saving.md) and [The checkpoint does not "
        "load](troubleshooting.md#the-checkpoint-does-not-load).",
        "compat/saving compat/tf_keras/h5_models _core/configs _core/state_file",
    ),
    (
        "The loss-scale policy",
        "See [Which scale](policies.md#which-scale).",
        "loss_scales/",
    ),
    (
        "Learning-rate schedules",
        "See [Which schedule?](schedules.md) and "
        "[keras_lso.schedules](api/schedules.md).",
        "schedules/",
    ),
    (
        "LARS, LARC and NovoGrad",
        "See [Large batches](large-batches.md).",
        "optimizers/ lars lamb novograd _core/lars _core/lamb _core/novograd",
    ),
    (
        "Several devices or processes",
        "See [Scaling out](scaling.md).",
        "_backend/framework _backend/jax/axes _backend/torch/shard_checks "
        "_keras_internals/distribution",
    ),
    (
        "Code and files of tf.keras 2 and TF1",
        "See [Coming from tf.keras 2](migrating.md).",
        "compat/tf_keras/ mixed_precision/ compat/v1/ compat/v2/",
    ),
    (
        "OpenSeq2Seq's names",
        "See [Coming from TF1 and OpenSeq2Seq](migrating-tf1.md).",
        "compat/open_seq2seq/ compat/backend/",
    ),
    (
        "Callbacks, reports and pictures",
        "See [Troubleshooting](troubleshooting.md#watch-the-loss-scale) and [Which "
        "scale does a model need?](policies.md#which-scale-does-a-model-need)",
        "callbacks/ diagnostics/underflow diagnostics/recommend plotting",
    ),
    (
        "The optimizer and its steps",
        "See [Choosing a dtype policy and a loss scale](policies.md) and [Loops of "
        "your own](custom-loops.md).",
        "",
    ),
)

# Functions whose strings are messages or parts of one, by their modules.
COMPOSED = {
    "callbacks/loss_scale_monitor": {"_diagnosis": "Warning"},
    "_keras_internals/keras_version": {"_message": "ImportError"},
}
# A message has more words than a key or a unit that it is put together with.
FEWEST_WORDS = 3
# What says no more than what an argument must be, or which name is not there.
BARE = re.compile(
    r"(?:Argument )?`[^`]+` (?:must|takes|holds|describes|has) (?:(?!\. [A-Z`]).)*\.?"
    r"|.*has no attribute.*"
)
# What came, without the advice that may follow.
RECEIVED = r"\.? *(?:Received|It holds)\b(?:(?!\. [A-Z`]).)*"


def group_of(module):
    """Returns the heading of a module's messages."""
    return next(
        heading
        for heading, _, starts in GROUPS
        if not starts or module.startswith(tuple(starts.split()))
    )


def messages_of(source, composed=None):
    """Yields the kind and the text of each error and warning in a source."""
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for scope in [tree, *functions]:
        names = {**assigned(tree), **assigned(scope)}
        for node in own_nodes(scope):
            if isinstance(node, ast.Call):
                found = message_of_call(node, names)
            elif isinstance(node, ast.JoinedStr | ast.Constant):
                kind = (composed or {}).get(getattr(scope, "name", None))
                found = kind and (kind, text_of(node, names))
            else:
                continue
            if found:
                kind, text = found
                text = re.sub(r"\.\.\.(?:\s*\.\.\.)+", ANY, " ".join(text.split()))
                words = re.findall(r"\b[a-z]{2,}\b", text)
                if len(words) >= FEWEST_WORDS and not is_bare(text):
                    yield kind, text


def is_bare(text):
    """Returns whether a message says all that there is to say about it."""
    return BARE.fullmatch(re.sub(RECEIVED, ".", text))


def message_of_call(call, names):
    """Returns the kind and the text of what a call makes or warns of, or None."""
    called = ast.unparse(call.func).rpartition(".")[2]
    if called == "refusal":
        argument, _, requirement, *error = call.args
        kind = ast.unparse(error[0]) if error else "ValueError"
        return kind, (
            f"Argument `{text_of(argument, names)}` must "
            f"{text_of(requirement, names)}. Received: {ANY}"
        )
    if called == "warn" and call.args:
        return "Warning", text_of(call.args[0], names)
    if called.endswith("Error") and call.args:
        return called, text_of(call.args[0], names)
    return None


def assigned(scope):
    """Returns the expressions that a module or a function assigns to a name, once."""
    found = {}
    for node in own_nodes(scope):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, node.value)
    return found


def own_nodes(scope):
    """Yields the nodes of a module or a function, without inner functions.

    For a text that is put together from parts, it yields the whole and not the parts.
    """
    docstring = ast.get_docstring(scope, clean=False) if is_scope(scope) else None
    for child in ast.iter_child_nodes(scope):
        is_docstring = isinstance(child, ast.Expr) and (
            getattr(child.value, "value", child) == docstring
        )
        if is_scope(child) or is_docstring:
            continue
        yield child
        if not isinstance(child, ast.JoinedStr):
            yield from own_nodes(child)


def is_scope(node):
    return isinstance(node, ast.Module | ast.FunctionDef)


def text_of(node, names):
    """Returns the text of an expression; what is not known before it runs is `ANY`."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part, names) for part in parts)
        case ast.FormattedValue(value=ast.Name() as name, conversion=-1):
            return text_of(name, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left, names) + text_of(right, names)
        case ast.Name(id=name) if name in names:
            others = {key: value for key, value in names.items() if key != name}
            return text_of(names[name], others)
    return ANY


def as_markdown(text):
    """Returns a text whose characters with a meaning in Markdown are escaped."""
    parts = text.split("`")
    # The text between two backticks is code, and not escaped.
    parts[::2] = [
        re.sub(r"([\\*_\[\]])", r"\\\1", part).replace("<", "&lt;")
        for part in parts[::2]
    ]
    return "`".join(parts)


def make_page():
    groups = {heading: {} for heading, _, _ in GROUPS}
    for path in sorted((ROOT / "keras_lso").rglob("*.py")):
        module = path.relative_to(ROOT / "keras_lso").with_suffix("").as_posix()
        found = messages_of(path.read_text(), COMPOSED.get(module))
        for kind, text in found:
            # As a dict: the same message may be raised in two places.
            groups[group_of(module)][f"- **{kind}:** {as_markdown(text)}"] = None
    parts = [OPENING]
    for heading, see, _ in sorted(GROUPS, key=lambda group: group[2] != ""):
        lines = "\n".join(sorted(groups[heading]))
        parts.append(f"## {heading}\n\n{see}\n\n{lines}\n")
    return "\n".join(parts)


def main():
    PAGE.write_text(make_page())
    print(f"Wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
