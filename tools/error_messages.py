"""Writes the errors and warnings of the package, for the field of Troubleshooting.

    python -m tools.error_messages

The messages are read from the sources. What belongs to a program, such as the number
that came, is written as "...". `docs/javascripts/error-messages.js` searches them; as a
script, not as JSON, they load from a file as well, without a server.
"""

import ast
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "docs/javascripts/error-messages-data.js"
ANY = "..."

# Where to read about a group of messages, titles and addresses of pages, and where its
# messages are raised. The first that fits a file counts.
GROUPS = (
    (
        {
            "Saving and resuming": "saving.html",
            "The checkpoint does not load": (
                "troubleshooting.html#the-checkpoint-does-not-load"
            ),
        },
        "compat/saving _core/configs _core/state_file",
    ),
    (
        {
            "It skipped every step": "troubleshooting.html#it-skipped-every-step",
            "Every step on record": "long-runs.html#every-step-on-record",
        },
        "_core/counters",
    ),
    (
        {
            "It skipped every step": "troubleshooting.html#it-skipped-every-step",
            "Watch the loss scale": "troubleshooting.html#watch-the-loss-scale",
        },
        "callbacks/loss_scale_monitor",
    ),
    (
        {
            "Without a loss scale": "which-setup.html#without-a-loss-scale",
            "Loops of your own": "custom-loops.html",
        },
        "loss_scale_optimizer optimizers/guarded",
    ),
    ({"Which loss scale?": "which-setup.html#which-loss-scale"}, "loss_scales/"),
    (
        {
            "Which schedule?": "schedules.html",
            "keras_lso.schedules": "api/schedules.html",
        },
        "schedules/",
    ),
    (
        {"Large batches": "large-batches.html"},
        "optimizers/base optimizers/lamb optimizers/lar optimizers/novograd",
    ),
    (
        {"Scaling out": "scaling.html"},
        "_backend/replicas _backend/tensorflow/replicas _backend/jax/axes "
        "_backend/torch/shards _keras_internals/distribution",
    ),
    (
        {"Coming from tf.keras 2": "migrating.html"},
        "compat/tf_keras mixed_precision/ compat/v1/ compat/v2/",
    ),
    (
        {"Coming from TF1 and OpenSeq2Seq": "migrating-tf1.html"},
        "compat/open_seq2seq/ compat/backend/",
    ),
    (
        {
            "Watch the loss scale": "troubleshooting.html#watch-the-loss-scale",
            "Which scale does a model need?": (
                "which-setup.html#which-scale-does-a-model-need"
            ),
        },
        "callbacks/ diagnostics/underflow diagnostics/recommend plotting",
    ),
    (
        {
            "Which set-up do I need?": "which-setup.html",
            "Loops of your own": "custom-loops.html",
        },
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
    """Returns the index of the group of a module's messages."""
    return next(
        i
        for i, (_, starts) in enumerate(GROUPS)
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


def groups():
    """Returns the pages and the sorted messages of each group."""
    found = [set() for _ in GROUPS]
    for path in sorted((ROOT / "keras_lso").rglob("*.py")):
        module = path.relative_to(ROOT / "keras_lso").with_suffix("").as_posix()
        for kind, text in messages_of(path.read_text(), COMPOSED.get(module)):
            found[group_of(module)].add(f"{kind}: {text}")
    return [
        {"see": pages, "messages": sorted(messages)}
        for (pages, _), messages in zip(GROUPS, found, strict=True)
        if messages
    ]


def make_data():
    messages = json.dumps(groups(), indent=1)
    return f"// By tools/error_messages.py.\nwindow.kerasLsoMessages = {messages};\n"


def main():
    DATA.write_text(make_data())
    print(f"Wrote {DATA.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
