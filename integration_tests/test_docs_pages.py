"""README.md and docs/ are marked up as they should be, and leave out no public name."""

import ast
import importlib
import itertools
import re
import tomllib
import types

import keras
import numpy as np
import pytest

import keras_lso
from integration_tests.docs_blocks import (
    ALL_BLOCKS,
    BACKEND,
    PAGES,
    ROOT,
    anchors_of,
    code_in,
    table_of,
)
from integration_tests.test_docs import SURROUNDINGS

# Not Python, and not run: what the shell takes, what a program prints, settings.
OTHER_LANGUAGES = {"diff", "sh", "text", "toml", "yaml", "mermaid"}


def test_every_code_block_has_known_language_and_directives():
    for block in ALL_BLOCKS:
        assert block.language in {"python", *OTHER_LANGUAGES}, block
        assert block.directives.get("on", BACKEND) in {"tensorflow", "jax", "torch"}
        assert block.directives.get("with", "TF1") in SURROUNDINGS, block
        assert block.language == "python" or not block.directives, block


def test_each_example_on_pages_has_test_and_link():
    page = PAGES["docs/examples.md"].read_text()
    shown = {block.source.strip() for block in ALL_BLOCKS if block.is_snippet}
    tests = " ".join(p.read_text() for p in ROOT.glob("integration_tests/**/test_*.py"))
    for source in shown:
        name = re.fullmatch(r'--8<-- "examples/(\w+)\.py(?::\w+)?"', source)[1]
        assert (ROOT / "examples" / f"{name}.py").exists()
        # For those who read the page where no site is built.
        assert f"][{name}]" in page and f"/blob/main/examples/{name}.py" in page, name
        # Also by parts: f"custom_loop_{BACKEND}.py".
        assert name in tests or re.sub(r"_[a-z]+$", "_{BACKEND}", name) in tests, name


LINK = re.compile(
    r"""\]\(([^)\s]+)\)|^\[[\w-]+\]: (\S+)|src(?:set)?="([^"]+)\"""", re.MULTILINE
)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_root_pages_have_existing_targets(page):
    # Those of docs/ are checked by `make docs`.
    links = ["".join(found) for found in LINK.findall((ROOT / page).read_text())]
    for link in links:
        path, _, _ = link.partition("#")
        assert link.startswith("https://") or (ROOT / path).exists(), link
    assert links


def assert_is_on_site(address):
    """Holds that a page of the site, and its anchor, has a source."""
    path, _, anchor = address.partition("#")
    page = f"docs/{path.removesuffix('.html')}.md"
    assert path.endswith(".html") and page in PAGES, address
    assert not anchor or anchor in anchors_of(page), address


def test_readme_links_to_existing_pages_of_site():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    site = pyproject["tool"]["hatch"]["metadata"]["hooks"]["custom"]["site"]
    assert f'"{site}"' in (ROOT / "mkdocs.yml").read_text()
    text = PAGES["README.md"].read_text()
    # GitHub cannot show all of a source. It shows pictures and the notebook.
    assert not re.findall(r"docs/[\w/-]+\.md", text)
    # `tools/add_site.py` puts the newest release there.
    links = re.findall(rf"{site}/latest/(\S+?)\)?$", text, re.MULTILINE)
    assert len(links) > 10 and len(links) == text.count(site)
    for link in links:
        assert_is_on_site(link)


def strings_of(path):
    """Returns the strings of a source, with "..." for the values in f-strings."""
    for node in ast.walk(ast.parse(path.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        values = [part.value for part in parts if isinstance(part, ast.Constant)]
        yield "...".join(value for value in values if isinstance(value, str))


def test_table_has_messages_of_sources():
    sources = (ROOT / "keras_lso").rglob("*.py")
    messages = [text.replace("`", "") for path in sources for text in strings_of(path)]
    for cell, _ in table_of("docs/troubleshooting.md", "what it says | what to do"):
        [part] = code_in(cell)
        assert any(part in message for message in messages), part


def test_project_is_described_by_one_sentence_everywhere():
    sentence = keras_lso.__doc__
    for name in ("README.md", "docs/index.md", "mkdocs.yml", "pyproject.toml"):
        assert sentence in " ".join((ROOT / name).read_text().split()), name
    assert sentence in " ".join((ROOT / "CITATION.cff").read_text().split())


def test_navigation_lists_every_page_and_pages_show_every_picture():
    # What `make docs` does not check.
    pages = {name.removeprefix("docs/") for name in PAGES} - {"README.md"}
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(pages) == sorted(listed)
    text = "".join(path.read_text() for path in PAGES.values())
    shown = set(re.findall(r"images/([\w.-]+\.png)", text))
    assert shown == {path.name for path in (ROOT / "docs/images").iterdir()}


def test_users_have_few_pages_and_words_to_read():
    # The menu without the API, and without what is for contributors.
    menu, _, _ = (ROOT / "mkdocs.yml").read_text().partition("For contributors:")
    pages = re.findall(r": (?!api/)(\S+\.md)$", menu, re.MULTILINE)
    # As `wc -w` counts, with code, tables and markup, but without the pictures for dark
    # screens, whose words are those of the others.
    dark = re.compile(r"^\[!\[[^]]*\]\([^)]*-dark\.png\S*\)\]\(\S*\)$", re.MULTILINE)
    texts = {p: dark.sub("", (ROOT / "docs" / p).read_text()) for p in pages}
    words = {p: len(text.split()) for p, text in texts.items()}
    assert "troubleshooting.md" in words
    assert len(words) <= 20 and sum(words.values()) <= 25_000, words


def public_names(module, path):
    """Yields the public names below a module, and what they are."""
    for name in getattr(module, "__all__", ()):
        found = getattr(module, name)
        if isinstance(found, types.ModuleType):
            # By its own name: `compat.v1.keras` has `keras_lso.mixed_precision` too.
            yield from public_names(found, f"{path}.{name}")
        else:
            yield f"{path}.{name}", found


def documented():
    """Returns the names that mkdocstrings writes about, and the rows of aliases."""
    text = "\n".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    entries = re.findall(r"^::: (\S+)", text, re.MULTILINE)
    rows = re.findall(r"^\| `([\w.]+)` \| \[`([\w.]+)`\]\[\2\] \|", text, re.MULTILINE)
    return entries, dict(rows)


def resolve(name):
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_api_pages_list_every_public_name():
    entries, aliases = documented()
    names = dict(public_names(keras_lso, "keras_lso"))
    # The modules of OpenSeq2Seq repeat the names of their package.
    above = {n.rpartition(".")[2]: found for n, found in names.items()}
    missing = []
    for name, found in names.items():
        if name in entries or aliases.get(name) in entries:
            continue
        last = name.rpartition(".")[2]
        same = f"keras_lso.compat.open_seq2seq.{last}"
        is_module_twin = "open_seq2seq." in name and same in entries
        if not (is_module_twin and above[last] is found):
            missing.append(name)
    assert not missing


def test_names_on_api_pages_exist_and_are_unique():
    entries, aliases = documented()
    assert len(entries) == len(set(entries))
    for name in entries:
        assert resolve(name) is not None, name
    for alias, name in aliases.items():
        assert resolve(alias) is resolve(name), alias


def test_tests_that_pages_name_exist():
    folders = "tests", "integration_tests"
    files = [p for folder in folders for p in (ROOT / folder).rglob("test_*.py")]
    existing = "".join(path.read_text() for path in files)
    text = "".join(path.read_text() for path in PAGES.values())
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 10
    assert not [name for name in sorted(named) if f"def {name}(" not in existing]


def bytes_of(variables):
    """Returns the bytes that variables take for each element of a weight."""
    elements = [v for v in variables if tuple(v.shape) == (64, 64)]
    return sum(int(re.search(r"\d+$", v.dtype)[0]) // 8 for v in elements)


def test_bytes_of_masters_are_those_of_built_optimizers():
    rows = table_of("docs/bfloat16.md", "dtype policy")
    assert len(rows) == 6
    for policies, kinds, *cells in rows:
        # With float32 slots, and in brackets with those in bfloat16 and in 8 bits.
        numbers = [list(map(int, re.findall(r"\d+", cell))) for cell in cells]
        given = [ast.literal_eval(kind) for kind in code_in(kinds)]
        for policy, kind, slot_dtype in itertools.product(
            code_in(policies),
            given or ["float32", "remainder", "remainder8", "stochastic", False],
            [None, "bfloat16", "int8"][: len(numbers[-1])],
        ):
            dtype = keras.DTypePolicy(ast.literal_eval(policy)).variable_dtype
            weight = keras.Variable(np.zeros((64, 64)), dtype=dtype)
            inner = keras.optimizers.Adam()
            options = {"master_weights": kind, "slot_dtype": slot_dtype}
            optimizer = keras_lso.LossScaleOptimizer(inner, **options)
            optimizer.build([weight])
            # A gradient has the dtype of its weight.
            parts = [weight], optimizer._masters.variables, [weight], inner.variables
            found = list(map(bytes_of, parts))
            number = [None, "bfloat16", "int8"].index(slot_dtype)
            expected = [n[number if n[1:] else 0] for n in numbers]
            assert [*found, sum(found)] == expected, (policy, options)


def test_signatures_on_api_pages_show_values_of_constants():
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(str(ROOT / "docs/_griffe/keras_style.py"))
    package = griffe.load("keras_lso", extensions=extensions, search_paths=[ROOT])
    defaults = {
        "loss_scale_optimizer.LossScaleOptimizer.__init__": {
            "name": "'loss_scale_optimizer'"
        },
        "optimizers.guarded.GuardedOptimizer.__init__": {"name": "'guarded_optimizer'"},
        "loss_scales.dynamic.DynamicLossScale.__init__": {
            "min_scale": "2.0 ** (-14)",
            "max_scale": "2.0 ** 24",
        },
    }
    for path, expected in defaults.items():
        parameters = package[path].parameters
        assert {n: str(parameters[n].default) for n in expected} == expected


def test_page_of_guarded_optimizer_leaves_out_what_scales():
    page = (ROOT / "docs/api/keras_lso.md").read_text()
    [hidden] = re.findall(r'GuardedOptimizer\n    .*\n .*"!(\^\(.*\))"', page)
    members = [name for name in dir(keras_lso.GuardedOptimizer) if name[0] != "_"]
    assert {name for name in members if re.match(hidden, name)} == {
        *("dynamic", "dynamic_counter", "dynamic_growth_steps", "dynamic_scale"),
        *("initial_scale", "min_scale", "max_scale", "step_counter"),
        "loss_scale_factor",
    }
