"""docs/which-setup.md: each row leads to a few lines, and each few lines have a row."""

import re

from integration_tests.docs_blocks import blocks_of, table_of

PAGE = "docs/which-setup.md"
# What the others begin with.
BEGINNINGS = {"Which set-up do I need?", "A loop of your own"}


def anchor_of(heading):
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def rows():
    return [*table_of(PAGE, "hardware"), *table_of(PAGE, "framework")]


def code_lines(block):
    """The lines to write, without the empty ones and imports."""
    lines = filter(None, map(str.strip, block.source.splitlines()))
    return [line for line in lines if not line.startswith(("import ", "from "))]


def test_each_table_row_links_to_code_and_all_code_has_row():
    links = [link for row in rows() for link in re.findall(r"\]\((\S+)\)", row[-1])]
    # But for the row that leads to the next table.
    assert len(links) == len(rows()) - 1
    here = {link[1:] for link in links if link.startswith("#")}
    sections = {b.heading for b in blocks_of(PAGE)} - BEGINNINGS
    assert here == set(map(anchor_of, sections))
    for link in links:
        if not link.startswith("#"):
            page, anchor = link.split("#")
            headings = {anchor_of(b.heading) for b in blocks_of(f"docs/{page}")}
            assert anchor in headings, link


def test_table_rows_are_unique():
    cells = [tuple(row[:-1]) for row in rows()]
    assert len(set(cells)) == len(cells)


def test_each_section_has_few_lines_of_code():
    counts = {b.heading: len(code_lines(b)) for b in blocks_of(PAGE)}
    # JAX's step has a function of its own for the loss.
    assert counts.pop("A loop on JAX") <= 11
    assert max(counts.values()) <= 7
