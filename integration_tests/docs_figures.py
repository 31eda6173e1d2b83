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


def _one(group, role):
    [row] = [row for row in group["rows"] if row["role"] == role]
    return row


# --- docs/benchmarks.md: from the best row to the worst -----------------------------


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


def main():
    results = read_results()
    for page, lines in {
        "README.md": [fit_range(results)],
        "docs/performance.md": [
            *comparison_rows(results),
            fit_range(results),
            first_step_most(results),
        ],
        "docs/benchmarks.md": ["what `python -m benchmarks.report` prints"],
    }.items():
        print(page, *lines, "", sep="\n")


if __name__ == "__main__":
    main()
