"""Checks the English of pages, docstrings and comments, with proselint and own rules.

    python -m tools.prose

It prints a line for each finding, `file:line: words: what to write`, and exits with 1
if there are any. It reads prose only: no code, no targets of links, no HTML.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Folders whose docstrings and comments are checked.
FOLDERS = ("tools", "examples", "keras_lso")

# proselint's checks that do not fit, and why.
UNFIT = {
    "dates_times": "no page says when; `ResNet-50's` is no decade",
    "typography.diacritical_marks": "it takes the verb `resume` for a `résumé`",
    "typography.symbols": "Markdown's source has straight quotes and three dots",
    "weasel_words.very": "a joke",
}

# Where a sentence begins: in a text, a paragraph, an entry of a list.
_BEGIN = r"(?:\A|\n\s*\n|[.:!?]\s|\n(?=\s*[-*]\s))\s*(?:[-*]\s+)?"
# The house's words: a pattern, and what to write in its place.
HOUSE = (
    (r"\bstands?\b(?!-in|\s+for\b)", "is, is written"),
    (r"\bbeside\b", "next to, compared with, with"),
    (r"\bbesides\b", "also, apart from"),
    (r"\b(?:anew|afresh|once\s+more)\b", "again"),
    (r"\bfor\s+ever\b", "permanently, never ends"),
    (r"\bever\s+after\b", "from then on"),
    (r"\bas\s+ever\b", "as before"),
    (r"\b(?:in|out)side\s+of\b", "inside, outside"),
    (r"\bby\s+(?:itself|themselves)\b", "alone, on its own, automatically"),
    (r"\bbut\s+for\b", "except, apart from"),
    (r"\bof\s+which\b", "two sentences, or `whose`"),
    (
        r"\bwhat\s+(?:is|was|are|were)\s+"
        r"(?:\w+ed|seen|said|told|kept|made|known|written)\b",
        "the noun",
    ),
    (r"\bwhat\s+follows\b", "the noun"),
    (r"\b(?:that|those|none)\s+of\s+(?:it|them)\b", "the noun"),
    (
        r"\bones?\s+that\s+(?:is|are|does|do|has|have|was|were)\s+not\b(?=\s*[.,;:)])",
        "the noun",
    ),
    (_BEGIN + r"(?-i:Of)\s(?!course\b)", "the subject first"),
    (
        _BEGIN + r"(?-i:To)\s(?:(?!\n\s*\n)[^.,:;!?])+?"
        r"\s(?:takes?|costs?|means?|needs?|would|is|was)\b",
        "the verb with -ing (`Finding out takes`)",
    ),
    (r"\bhow\s+many-th\b", "the index"),
    # One word for one thing: there are three kinds, and arguments of the name.
    (
        r"(?:\A|(?<!\S)(?!\W*(?:dtype|loss-scale|learning-rate)\s)\S+\s+)"
        r"polic(?:y|ies)\b(?!:\s)",
        "dtype policy, loss-scale policy or learning-rate policy",
    ),
)

# No prose: comments, fenced and indented code, doctests, HTML, code in a line, targets
# of links, included files and arguments.
CODE = tuple(
    re.compile(pattern, re.DOTALL | re.MULTILINE)
    for pattern in (
        r"<!--.*?-->",
        r"^( *)(`{3,}).*?^\1\2",
        r"^ *>>> .*?(?=\n\s*\n|\Z)",
        r"(?<=\n\n)(?: {4}[^\n]*\n+)+",
        r"</?\w[^>]*>",
        r"(`+)[^`]+\1",
        r"(?<=\])\([^)]*\)",
        r"(?<=\])\[[^]]*\]",
        r"^\[[^]]+\]: .*?$",
        r"https?://\S+",
        r"^--8<--.*?$",
        r"^::: .*?$",
        r"\w+=\S+",
    )
)


def prose_of(text):
    """Returns a text of the same length and lines, with `#` in place of code."""
    for pattern in CODE:
        text = pattern.sub(lambda code: re.sub(r"[^\n]", "#", code[0]), text)
    return text


def by_the_house(prose):
    """Yields where each of the house's patterns is found, the words and the advice."""
    for pattern, write in HOUSE:
        for found in re.finditer(pattern, prose, re.IGNORECASE):
            start = found.end() - len(found[0].lstrip(" \n.:!?-*"))
            yield start, prose[start : found.end()], f"write {write}"


def by_proselint(prose):
    """Yields the same of proselint's checks, without those in `UNFIT`."""
    from proselint.checks import __register__
    from proselint.registry import CheckRegistry
    from proselint.tools import LintFile

    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(__register__)
    for result in LintFile("prose", prose).lint() if prose.strip() else ():
        found = result.check_result
        # Its text has an empty line in front.
        start, end = (place - 1 for place in found.span)
        # A word that ends a heading may begin the paragraph.
        in_one_paragraph = "\n\n" not in prose[start:end]
        if in_one_paragraph and not found.check_path.startswith(tuple(UNFIT)):
            advice = " ".join(found.message.split())
            yield start, prose[start:end], f"{advice} ({found.check_path})"


def findings(file, text, first_line=1, checks=(by_the_house, by_proselint)):
    """Yields file, line and advice for the findings in a text that begins at a line."""
    prose = prose_of(text)
    for check in checks:
        for start, words, write in check(prose):
            line = first_line + prose.count("\n", 0, start)
            yield file, line, f"{' '.join(words.split())}: {write}"


def pages():
    """Yields the name and the text of each page."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for path in [*paths, *sorted((ROOT / "docs").rglob("*.md"))]:
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def strings_and_comments():
    """Yields the file, the text and the first line of docstrings and of comments."""
    for path in sorted(p for f in FOLDERS for p in (ROOT / f).rglob("*.py")):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text()
        for node in ast.walk(ast.parse(source)):
            documented = ast.Module | ast.ClassDef | ast.FunctionDef
            if isinstance(node, documented) and ast.get_docstring(node) is not None:
                yield name, node.body[0].value.value, node.body[0].value.lineno
        yield from ((name, *comment) for comment in comments_of(source))


def comments_of(source):
    """Yields the text and the first line of each block of comments."""
    block, first, last = [], 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield "\n".join(block), first
                block = []
            first, last = first if block else token.start[0], token.start[0]
            block.append(token.string.lstrip("# "))
    if block:
        yield "\n".join(block), first


def main():
    texts = [*pages(), *strings_and_comments()]
    found = sorted({finding for text in texts for finding in findings(*text)})
    for file, line, advice in found:
        print(f"{file}:{line}: {advice}")
    print("The prose has no finding." if not found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
