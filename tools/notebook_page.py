"""Writes docs/quickstart.md, the site's page of the notebook docs/quickstart.ipynb.

    python -m tools.notebook_page

nbconvert turns the notebook into Markdown, with what it printed and drew, so that the
theme, the search and the checks of the links treat it like any other page. The pictures
go to docs/images, where `python -m integration_tests.quickstart` puts the dark ones.
"""

import pathlib

import nbconvert
import nbformat

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
NOTEBOOK = DOCS / "quickstart.ipynb"
PAGE = NOTEBOOK.with_suffix(".md")


def make_page():
    """Returns the page, and a dict of its pictures: the bytes of each by its path."""
    text, resources = nbconvert.MarkdownExporter().from_filename(str(NOTEBOOK))
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    pictures = {}
    for name, content in resources["outputs"].items():
        # output_CELL_OUTPUT.png; the text that stands for it is the cell's metadata.
        alt = cells[int(name.split("_")[1])].metadata["alt"]
        path = DOCS / "images" / f"quickstart-{len(pictures) + 1}.png"
        text = text.replace(f"![png]({name})", "\n".join(_shown(alt, path)))
        pictures[path] = content
    title, _, rest = text.lstrip().partition("\n")
    lines = [line.rstrip() for line in rest.rstrip().splitlines()]
    download = f"[Download this notebook]({NOTEBOOK.name})"
    return "\n".join([title, "", download, *lines, ""]), pictures


def _shown(alt, path):
    """Yields the Markdown of a picture, for a light page and for a dark one."""
    for mode, suffix in (("light", ""), ("dark", "-dark")):
        yield f"![{alt}](images/{path.stem}{suffix}.png#gh-{mode}-mode-only)"


def main():
    page, pictures = make_page()
    PAGE.write_text(page)
    for path, content in pictures.items():
        path.write_bytes(content)


if __name__ == "__main__":
    main()
