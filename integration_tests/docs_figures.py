"""The figures in README.md and docs/ that come from benchmarks/results/.

    python -m integration_tests.docs_figures

prints them as they stand there, to be pasted after `make bench`; `test_docs_pages.py`
compares.
"""

import json
import pathlib

from benchmarks.accelerators import __main__ as accelerators
from benchmarks.tables import ratio

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
# Those of most rows; other shapes are named.
USUAL_SHAPES = "resnet50"
# Of `masters`, what the page shows.
MASTERS_INNER = ("SGD+momentum", "Adam")
MASTERS_ROLES = ("bare", "masters", "remainder", "stochastic")


def read_results():
    """Returns what was measured, a dict for each backend."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def markdown_row(cells):
    return f"| {' | '.join(cells)} |"


# --- docs/performance.md: a step, next to Keras's wrapper and GradScaler ------------


def comparison_rows(results):
    """Returns a row for each backend with SGD and momentum, and with Adam."""
    modes = {"tensorflow": "graph", "jax": "jit", "torch": "eager"}
    names = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
    rows = []
    for inner, title in (("SGD+momentum", "SGD with momentum"), ("Adam", "Adam")):
        for backend, mode in modes.items():
            [group] = [
                {row["name"]: row["ms"] for row in group["rows"]}
                for result in results
                if result["backend"] == backend
                for group in result["groups"]
                if (group["mode"], group["shapes"], group["inner"], group["kind"])
                == (mode, USUAL_SHAPES, inner, "float32")
            ]
            cells = [
                f"{group[row] / group['inner alone']:.2f}" if row in group else ""
                for row in ("Keras's wrapper", "GradScaler + fused", "keras_lso")
            ]
            rows.append(markdown_row([title, names[backend], *cells]))
    return rows


def fit_range(results):
    """Returns from what to what a batch in `fit` takes, in units of Keras's class."""
    ratios = [
        ratio(_one(group, "ours"), group, "keras")
        for result in results
        for group in result["fit"]
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def protected_range(results):
    """Returns from what to what a batch takes with protected statistics."""
    ratios = [
        ratio(_one(group, "protected"), group, "unprotected")
        for _, group in _groups(results, "protected")
    ]
    return f"{min(ratios):.3f} to {max(ratios):.3f}"


def first_step_most(results):
    """Returns what our first step takes at most beyond the inner optimizer's."""
    excesses = [
        _one(group, "ours")["first_s"] - _one(group, "inner")["first_s"]
        for result in results
        for group in result["groups"]
    ]
    return f"up to {max(excesses):.1f} s more"


# --- docs/benchmarks.md -------------------------------------------------------------


def benchmark_tables(results):
    """Returns the rows of each table of the page, by the heading that it is below."""
    return {
        "## The steps": step_rows(results),
        "## Masters of 16-bit weights": masters_rows(results),
        "## In `fit`": fit_rows(results),
        "## The host's time": host_rows(results),
        "## Two participants": participants_rows(results),
        "## What a step moves on a GPU or TPU": moved_rows(),
    }


def most(results):
    """Returns the most that our steps cost, in units of the inner optimizer's alone.

    A dict with an item for each way to compile a step, each dtype of the weights,
    `LogMaxLossScale`, and each engine for two participants.
    """
    ratios: dict = {}
    for result, group in _groups(results, "groups"):
        for row in group["rows"]:
            if "keras_lso" in row["name"]:
                where = f"{result['backend']} {group['mode']}, {_kind(group, row)}"
                found = ratio(row, group, "inner"), _inner(group)
                ratios.setdefault(where, []).append(found)
    for result, group in _groups_of_two(results):
        inner = [row["ms"] for row in group["rows"] if row["role"] == "inner"]
        if inner:
            where = f"{result['backend']}, two: {group['engine']}"
            found = _one(group, "ours")["ms"] / inner[0], _inner(group)
            ratios.setdefault(where, []).append(found)
    return {where: max(found) for where, found in ratios.items()}


def step_rows(results):
    rows = []
    for result, group in _groups(results, "groups"):
        ours = _one(group, "ours")
        peer = min(_all(group, "peer"), key=lambda row: row["ms"])
        extra = ours["extra_bytes"]
        cells = [
            f"{result['backend']} {group['mode']}",
            f"{group['shapes']}, {_kind(group, ours)}",
            group["inner"],
            *(_digits(_one(group, role)["ms"]) for role in ("inner", "keras")),
            _digits(ours["ms"]),
            f"{_digits(peer['ms'])}, {peer['name']}",
            "" if extra is None else _digits(extra / 1e6),
            f"{ours['first_s']:.1f}",
        ]
        rows.append(markdown_row(cells))
    return rows


def masters_rows(results):
    return [
        _ms_row(
            [f"{r['backend']} {g['mode']}", g["dtype"], g["inner"]], g, *MASTERS_ROLES
        )
        for r, g in _groups(results, "masters")
        if g["inner"] in MASTERS_INNER
    ]


def fit_rows(results):
    roles = ("inner", "keras", "ours", "monitored")
    return [
        _ms_row([r["backend"], g["model"]], g, *roles)
        for r, g in _groups(results, "fit")
    ]


def host_rows(results):
    """Returns those of an ordinary model's number of tensors, in microseconds."""
    rows = []
    for _, group in _groups(results, "host"):
        if group["shapes"] == "160-of-4":
            [peer] = _all(group, "peer")
            roles = ("inner", "keras", "ours", "peer")
            cells = [f"{_one(group, role)['ms'] * 1e3:.0f}" for role in roles]
            cells[-1] += f", {peer['name']}"
            rows.append(markdown_row([group["inner"], *cells]))
    return rows


def participants_rows(results):
    roles = ("inner", "keras", "ours", "more")
    return [
        _ms_row([r["backend"], g["engine"], g["inner"]], g, *roles)
        for r, g in _groups_of_two(results)
    ]


def moved_rows():
    """Returns the bytes that our step moves and, in brackets, what it is beside."""
    targets = accelerators.read(accelerators.RESULTS).values()
    rows = []
    for recipe in dict.fromkeys(row["recipe"] for rows in targets for row in rows):
        found = [[r for r in rows if r["recipe"] == recipe] for rows in targets]
        cells = [
            "{:.1f} ({:.1f})".format(*(r["bytes"] for r in pair)) if pair else ""
            for pair in found
        ]
        # PyTorch, the first, has all recipes.
        rows.append(markdown_row([recipe, *cells, f"{found[0][0]['least']:.1f}"]))
    return rows


def _groups(results, part):
    return [(result, group) for result in results for group in result[part]]


def _groups_of_two(results):
    return [
        (r, g)
        for r, measured in _groups(results, "participants")
        for g in measured["groups"]
    ]


def _all(group, role):
    return [row for row in group["rows"] if row["role"] == role]


def _one(group, role):
    [row] = _all(group, role) if role != "peer" else _all(group, role)[:1]
    return row


def _ms_row(first, group, *roles):
    """Returns some cells, and the milliseconds of each role that the group has."""
    times = [
        " ".join(_digits(row["ms"]) for row in _all(group, role)) for role in roles
    ]
    return markdown_row([*first, *times])


def _digits(value):
    """Returns it with three digits: 0.123, 1.23, 12.3, 123, 1234."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def _kind(group, row):
    kind = "float16 with masters" if group["kind"] == "float16" else group["kind"]
    return f"{kind}, LogMax" if "LogMax" in row["name"] else kind


def _inner(group):
    usual = group["shapes"] == USUAL_SHAPES
    return group["inner"] if usual else f"{group['inner']}, {group['shapes']}"


def main():
    results = read_results()
    print("README.md", fit_range(results), "", sep="\n")
    figures = [f(results) for f in (fit_range, protected_range, first_step_most)]
    print("docs/performance.md", *comparison_rows(results), *figures, "", sep="\n")
    for heading, rows in benchmark_tables(results).items():
        print(heading, *rows, "", sep="\n")


if __name__ == "__main__":
    main()
