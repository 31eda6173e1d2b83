"""The English of the pages: which words are found, and what is no prose."""

import pytest

# A wheel has no tools.
prose = pytest.importorskip("tools.prose")

pytestmark = pytest.mark.one_backend


def by_the_house(text):
    found = prose.check("page.md", text, checks=[prose.by_the_house])
    return [(finding.line, finding.words) for finding in found]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The value stands here.", "stands"),
        ("A file beside it.", "beside"),
        ("Besides, it fails.", "Besides"),
        ("It is made anew.", "anew"),
        ("It stays NaN for\never.", "for ever"),
        ("It is inside of it.", "inside of"),
        ("It runs by itself.", "by itself"),
        ("All layers but for one.", "but for"),
        ("Two sums, of which one is kept.", "of which"),
        ("Averages change what is seen.", "what is seen"),
        ("What follows is long.", "What follows"),
        ("The norms and those of it.", "those of it"),
        ("A scale, or one that is not.", "one that is not"),
        ("It ends. Of a network we see one.", "Of"),
        ("To find it out takes longer.", "To find it out takes"),
        ("- To keep the\n  values costs nothing.", "To keep the values costs"),
        ("Policy is a word.", "Policy"),
        ("A loss-scale\npolicy. It is a\npolicy.", "a policy"),
    ],
)
def test_house_style_check_finds_discouraged_words(text, words):
    assert [found for _, found in by_the_house(text)] == [words]


@pytest.mark.parametrize(
    "text",
    [
        "A stand-in stands for a variable.",
        "You understand it.",
        "Of course.",
        "The sum of the gradients.",
        "To clip, give the optimizer a norm. It takes one.",
        "To clip\n\n## It takes a norm",
        "See [the file](beside.md) and `stands`.",
        "```python\nx = beside  # anew\n```",
        "The text.\n\n    anew = beside\n",
        "<!-- anew -->",
        ">>> anew\nfor ever\n",
        "A [dtype policy](policy.md), loss-scale\n  policies, (learning-rate policy).",
        "Args:\n    policy: A dtype policy.\n    x: A policy=1.",
    ],
)
def test_house_style_check_ignores_other_words_and_code(text):
    assert by_the_house(text) == []


def test_finding_names_file_line_and_replacement():
    text = "# A page\n\n```\ncode\n```\n\nIt stays so\nfor ever.\n"
    [found] = prose.check("page.md", text, 10, [prose.by_the_house])
    assert str(found) == "page.md:17: for ever: write permanently, never ends"


def test_comments_on_consecutive_lines_form_one_text():
    source = 'x = 1  # One.\n\n# Two is\n# beside one.\ny = "# none"\n'
    assert list(prose.comments_of(source)) == [("One.", 1), ("Two is\nbeside one.", 3)]


def test_docstrings_and_comments_are_checked_but_other_strings_are_not(tmp_path):
    source = """'''A module.

It is made anew.
'''

TEXT = "anew"  # Nothing beside it.


def function():
    '''It runs by itself.'''
"""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "module.py").write_text(source)
    texts = prose.strings_and_comments(["folder"], tmp_path)
    found = [f for text in texts for f in prose.check(*text, [prose.by_the_house])]
    assert sorted((f.file, f.line, f.words) for f in found) == [
        ("folder/module.py", 3, "anew"),
        ("folder/module.py", 6, "beside"),
        ("folder/module.py", 10, "by itself"),
    ]


def written(tmp_path, page):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(page)
    for name in ("README.md", "CONTRIBUTING.md"):
        (tmp_path / name).write_text("# A page\n")


def test_exit_status_is_1_with_findings_and_0_without(tmp_path, monkeypatch, capsys):
    pytest.importorskip("proselint")
    written(tmp_path, "A very unique page of the the loss.\n\nIt begins anew.\n")
    texts = list(prose.pages(tmp_path))
    monkeypatch.setattr(prose, "pages", lambda: texts)
    monkeypatch.setattr(prose, "FOLDERS", ())
    assert prose.main() == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in printed] == [
        ["docs/page.md:1", "the the"],
        ["docs/page.md:1", "very unique"],
        ["docs/page.md:3", "anew"],
    ]
    monkeypatch.setattr(prose, "EXCEPTIONS", [("docs/page.md", "anew", "a quotation")])
    unfit = {"lexical_illusions": "", "uncomparables": "", "weasel_words": ""}
    monkeypatch.setattr(prose, "UNFIT", unfit)
    assert prose.main() == 0


def test_exceptions_occur_in_their_pages():
    paths = {
        path.relative_to(prose.ROOT).as_posix(): path for path in prose.all_pages()
    }
    for file, words, _ in prose.EXCEPTIONS:
        assert words in " ".join(paths[file].read_text().split())
