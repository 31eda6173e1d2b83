"""Makes a page of each Jupyter notebook in docs/, by nbconvert, with what it printed.

A notebook is converted to Markdown, so that the theme, the search and the checks of
the links treat it like any other page. Pages link to the notebook's file, which leads
somewhere in the repository as well.
"""

import posixpath

import nbconvert
import nbformat
from mkdocs.structure.files import File


class Notebook(File):
    """A notebook that is a page."""

    def is_documentation_page(self):
        return True


def on_files(files, config):
    """Puts a page, its pictures and the notebook itself in a notebook's place."""
    for file in [f for f in files if f.src_uri.endswith(".ipynb")]:
        files.remove(file)
        page = Notebook(
            file.src_uri, file.src_dir, config.site_dir, config.use_directory_urls
        )
        folder = posixpath.splitext(file.src_uri)[0] + "_files"
        text, pictures = to_markdown(file.abs_src_path, posixpath.basename(folder))
        pictures[posixpath.basename(file.src_uri)] = file.content_bytes
        page.content_string = text
        files.append(page)
        for name, content in pictures.items():
            uri = posixpath.join(folder, name)
            files.append(File.generated(config, uri, content=content))
    return files


def to_markdown(path, folder):
    """Returns the Markdown of a notebook, and a dict of its pictures by their names."""
    text, resources = nbconvert.MarkdownExporter().from_filename(path)
    cells = nbformat.read(path, as_version=4).cells
    for name in resources["outputs"]:
        # output_CELL_OUTPUT.png; the text that stands for it is the cell's metadata.
        alt = cells[int(name.split("_")[1])].metadata["alt"]
        text = text.replace(f"![png]({name})", f"![{alt}]({folder}/{name})")
    download = f"[Download this notebook]({folder}/{posixpath.basename(path)})"
    title, _, rest = text.lstrip().partition("\n")
    return f"{title}\n\n{download}\n{rest}", resources["outputs"]
