"""Makes rows of `results/steps/`, of which pages show some: see `pages.py`.

The words of a row come first, then its numbers.
"""

from functools import partial

from benchmarks import evidence, masters
from benchmarks.tables import digits, ratio

BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
ALONE = ("inner", "keras", "ours")


def groups(part, on_gpu=False):
    """Yields pairs of a backend, and a group of a part of its newest results."""
    files = map(evidence.read, (evidence.RESULTS / "steps").glob("*.json"))
    dated = sorted(files, key=lambda result: result["machine"]["date"])
    newest = {
        result["backend"]: result[part]
        for result in dated
        if result.get(part) and (result["machine"]["gpu"] is not None) == on_gpu
    }
    for backend, found in sorted(newest.items()):
        yield from ((backend, group) for group in found)


def row_of(group, of):
    """Returns the fastest row with a role or a name, or None."""
    rows = [row for row in group["rows"] if of in (row["role"], row["name"])]
    return min(rows, key=lambda row: row["ms"], default=None)


def times(group, *of, unit=1.0):
    """Returns the milliseconds, or parts of them, of rows with a role or a name."""
    rows = [row_of(group, name) for name in of]
    return [digits(row["ms"] * unit) if row else "" for row in rows]


def peer(group, unit=1.0):
    """Returns the time of the fastest peer, and its name."""
    row = row_of(group, "peer")
    return f"{digits(row['ms'] * unit)}, {row['name']}" if row else ""


def steps(on_gpu=False):
    """The milliseconds of a step: alone, with Keras's wrapper, ours, and a peer's."""
    for backend, group in groups("groups", on_gpu):
        kind = {"float16": "float16 with masters"}.get(group["kind"], group["kind"])
        where = backend if on_gpu else f"{backend} {group['mode']}"
        yield [
            *(where, f"{group['shapes']}, {kind}", group["inner"]),
            *times(group, *ALONE, *["keras_lso, CUDA graph"] * on_gpu),
            peer(group),
        ]


def ratios():
    """The time of a step on a ResNet-50 in units of the inner optimizer's own."""
    for backend, group in groups("groups"):
        # XLA is TensorFlow's other mode.
        where = group["shapes"], group["kind"], group["mode"] == "XLA"
        if where == ("resnet50", "float32", False):
            words = group["inner"].replace("+", " with "), BACKENDS[backend]
            rows = [row_of(group, role) for role in ("ours", "keras", "peer")]
            # The others are no loss scalers of their own.
            rows = rows[: 3 if backend == "torch" else 2]
            numbers = [f"{ratio(row, group, 'inner'):.2f}" for row in rows]
            yield [*words, *numbers, *[""] * (3 - len(numbers))]


def kinds_of_masters():
    """The milliseconds of a step on bfloat16 weights; compiled in parentheses."""
    for backend, group in groups("masters"):
        eager = times(group, *masters.ROWS)
        compiled = times(group, *(f"{name}, compiled" for name in masters.ROWS))
        both = zip(eager, compiled, strict=True)
        cells = [e + (f" ({c})" if c else "") for e, c in both]
        if group["dtype"] == "bfloat16":
            yield [f"{backend} {group['mode']}", group["inner"], *cells]


def batches():
    """The milliseconds of a batch in `fit`."""
    for backend, group in groups("fit"):
        yield [backend, group["model"], *times(group, *ALONE, "monitored")]


def host_times():
    """The microseconds that the host needs for an eager step with 160 tensors."""
    for _, group in groups("host"):
        if group["tensors"] == 160:
            yield [group["inner"], *times(group, *ALONE, unit=1e3), peer(group, 1e3)]


def participants():
    """The milliseconds of a step of two participants."""
    for backend, two in groups("participants"):
        for group in two["groups"]:
            numbers = times(group, *ALONE, "keras_lso, plain tensors")
            yield [backend, group["engine"], group["inner"], *numbers]


_STEPS = "backend | tensors | inner | inner alone | Keras's | keras_lso"
TABLES = {
    f"{_STEPS} | the fastest peer": steps,
    f"{_STEPS} | in a CUDA graph": partial(steps, on_gpu=True),
    "step | backend": ratios,
    "backend | inner | without": kinds_of_masters,
    "backend | model": batches,
    "inner | inner alone": host_times,
    "backend | two": participants,
}
"""What makes the rows of each table, by its first headings."""
