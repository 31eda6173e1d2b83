"""The figures in README.md and docs/ that come from benchmarks/results/.

    python -m integration_tests.docs_figures

prints them as they stand there, to be pasted after `make bench`; `test_docs_pages.py`
compares.
"""

import json
import pathlib

from benchmarks.tables import make_tables, ratio

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
# Those of most rows; other shapes are named.
USUAL_SHAPES = "resnet50"


def read_results():
    """Returns what was measured, a dict for each backend."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def table_rows(results, *titles):
    """Returns the rows of some of the tables that `make bench` prints, as Markdown."""
    tables = {table.title: table for table in make_tables(results)}
    return [
        markdown_row(cells)
        for title in titles
        for _, rows in tables[title].sections
        for cells in rows
    ]


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


# --- docs/large-batches.md: a step of LARS ------------------------------------------


def lars_rows(results):
    """Returns a row for each way to compile a step: LARS, guarded, the fastest peer."""
    rows = []
    for result, group in _groups(results, inner="LARS"):
        inner, ours = (_one(group, role)["ms"] for role in ("inner", "ours"))
        peers = [row for row in group["rows"] if row["role"] == "peer"]
        peer = min(peers, key=lambda row: row["ms"])
        cells = [f"{ms:.0f} ms" for ms in (inner, ours, peer["ms"])]
        cells[-1] += f", {peer['name']}"
        rows.append(markdown_row([f"{result['backend']} {group['mode']}", *cells]))
    return rows


def lars_shapes(results):
    """Returns how many tensors and parameters those steps have."""
    [(tensors, parameters)] = {
        (group["tensors"], group["parameters"])
        for _, group in _groups(results, inner="LARS")
    }
    return f"{tensors} tensors of a ResNet-50 ({parameters / 1e6:.1f} M parameters)"


def _groups(results, inner):
    return [
        (result, group)
        for result in results
        for group in result["groups"]
        if group["inner"] == inner
    ]


def _one(group, role):
    [row] = [row for row in group["rows"] if row["role"] == role]
    return row


# --- docs/benchmarks.md: from the best row to the worst -----------------------------


def ranges(results):
    """Returns the least and the most that our steps cost, in units of the inner one.

    A dict with an item for each way to compile a step, each dtype of the weights,
    `LogMaxLossScale`, and each engine for two participants.
    """
    ratios: dict = {}
    for result in results:
        for group in result["groups"]:
            for row in group["rows"]:
                if "keras_lso" in row["name"]:
                    where = f"{result['backend']} {group['mode']}, {_kind(group, row)}"
                    found = ratio(row, group, "inner"), _inner(group)
                    ratios.setdefault(where, []).append(found)
        for group in (g for m in result["participants"] for g in m["groups"]):
            inner = [row["ms"] for row in group["rows"] if row["role"] == "inner"]
            if inner:
                where = f"{result['backend']}, two: {group['engine']}"
                found = _one(group, "ours")["ms"] / inner[0], _inner(group)
                ratios.setdefault(where, []).append(found)
    return {where: (min(found), max(found)) for where, found in ratios.items()}


def range_rows(results):
    """Returns a row for each item of `ranges`."""
    return [
        markdown_row([where, *(f"{value:.2f} ({inner})" for value, inner in found)])
        for where, found in ranges(results).items()
    ]


def _kind(group, row):
    kind = "float16 with masters" if group["kind"] == "float16" else group["kind"]
    return f"{kind}, LogMax" if "LogMax" in row["name"] else kind


def _inner(group):
    usual = group["shapes"] == USUAL_SHAPES
    return group["inner"] if usual else f"{group['inner']}, {group['shapes']}"


def fit_range(results):
    """Returns from what to what a batch in `fit` takes, in units of Keras's class."""
    ratios = [
        ratio(_one(group, "ours"), group, "keras")
        for result in results
        for group in result["fit"]
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def first_step_most(results):
    """Returns what our first step takes at most beyond the inner optimizer's."""
    excesses = [
        _one(group, "ours")["first_s"] - _one(group, "inner")["first_s"]
        for result in results
        for group in result["groups"]
    ]
    return f"up to {max(excesses):.1f} s more"


def first_steps_of_many(results):
    """Returns the first steps of a thousand tensors on TensorFlow without ours."""
    [group] = [
        group
        for result in results
        for group in result["groups"]
        if (result["backend"], group["shapes"]) == ("tensorflow", "many-small")
    ]
    inner, peer = (_one(group, role)["first_s"] for role in ("inner", "peer"))
    return (
        f"The inner optimizer alone takes {inner:.1f} s there\n"
        f"  and tf.keras {peer:.1f}"
    )


def main():
    results = read_results()
    for page, lines in {
        "README.md": [fit_range(results)],
        "docs/large-batches.md": [lars_shapes(results), *lars_rows(results)],
        "docs/performance.md": [
            *comparison_rows(results),
            fit_range(results),
            first_step_most(results),
        ],
        "docs/benchmarks.md": [
            *range_rows(results),
            first_steps_of_many(results),
            "and what `python -m benchmarks.report` prints",
        ],
    }.items():
        print(page, *lines, "", sep="\n")


if __name__ == "__main__":
    main()
