"""The fenced blocks of README.md and docs/, with their directives.

A comment before a block is a directive:

    <!-- on: torch -->                it runs on this backend only
    <!-- with: a process group -->    it needs something around it: see `test_docs.py`
"""

import dataclasses
import itertools
import pathlib
import re

import keras
import markdown_it

ROOT = pathlib.Path(__file__).parents[1]
BACKEND = keras.backend.backend()
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
DIRECTIVE = re.compile(r"<!-- ((?:on|with): .*) -->")


@dataclasses.dataclass
class Block:
    """A fenced block, with the heading and the paragraph before it."""

    page: str
    line: int
    language: str
    source: str
    heading: str
    paragraph: str
    directives: dict

    def __str__(self):
        return f"{self.page}:{self.line}"

    @property
    def is_snippet(self):
        """Whether it shows a file, and has nothing to run of its own."""
        return self.source.startswith("--8<--")

    @property
    def runs_here(self):
        return self.runs_on(BACKEND)

    def runs_on(self, backend):
        """Whether it runs on a backend."""
        on = self.directives.get("on", backend)
        return not self.is_snippet and on == backend


def blocks_of(page):
    """Returns the fenced blocks of a page."""
    blocks, heading, text, directives = [], "", "", {}
    for token in markdown_it.MarkdownIt().parse(PAGES[page].read_text()):
        if token.type == "html_block" and (found := DIRECTIVE.match(token.content)):
            parts = found[1].split(", ") if "on: " in found[1] else [found[1]]
            directives = dict(part.split(": ", 1) for part in parts)
        elif token.type == "inline":
            heading = token.content if text == "#" else heading
            text = token.content
        elif token.type == "heading_open":
            text = "#"
        elif token.type == "fence":
            # The fence is a line of its own above the code.
            line = token.map[0] + 1
            blocks.append(
                Block(page, line, token.info, token.content, heading, text, directives)
            )
            directives = {}
    return blocks


def anchors_of(page):
    """Returns the anchors of the headings of a page, and of the names of the API."""
    text = PAGES[page].read_text()
    tokens = markdown_it.MarkdownIt().parse(text)
    headings = [
        "".join(child.content for child in after.children)
        for token, after in itertools.pairwise(tokens)
        if token.type == "heading_open"
    ]
    # As `markdown.extensions.toc` does.
    words = [re.sub(r"[^\w\s-]", "", heading).strip() for heading in headings]
    anchors = {re.sub(r"[-\s]+", "-", each).lower() for each in words}
    return anchors | set(re.findall(r"^::: (\S+)", text, re.MULTILINE))


def table_of(page, first_heading):
    """Returns the rows of the table whose first column has this heading: lists."""
    start = f"| {first_heading} |"
    lines = PAGES[page].read_text().splitlines()
    [first] = [i for i, line in enumerate(lines) if line.startswith(start)]
    # A line of dashes is below the heading.
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def code_in(cell):
    """Returns the pieces of code in a cell of a table."""
    return re.findall(r"`([^`]+)`", cell)


ALL_BLOCKS = [block for page in PAGES for block in blocks_of(page)]
