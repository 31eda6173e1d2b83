"""The site's page of the notebook is what the notebook makes."""

import pytest

# A source distribution has no tools.
notebook_page = pytest.importorskip("tools.notebook_page")

pytestmark = pytest.mark.one_backend


def test_notebook_page_matches_notebook():
    page, pictures = notebook_page.make_page()
    assert notebook_page.PAGE.read_text() == page, "Run `python -m tools.notebook_page`"
    assert len(pictures) == 1
    for path, content in pictures.items():
        assert path.read_bytes() == content, "Run `python -m tools.notebook_page`"
