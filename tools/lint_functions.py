"""Finds functions of the package that are too long to read in one sitting."""

import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Lines of a function, without its docstring, comments and empty lines.
MOST_CODE_LINES = 40


def too_long(path):
    """Yields a message for each function in a file that is longer than it may be."""
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = count_code_lines(node, lines)
            if count > MOST_CODE_LINES:
                yield (
                    f"{path}:{node.lineno}: `{node.name}` has {count} lines of code, "
                    f"and at most {MOST_CODE_LINES} may be."
                )


def count_code_lines(function, lines):
    """Returns how many lines of code are in a function, its signature left out."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    if not body:
        return 0
    inside = lines[body[0].lineno - 1 : function.end_lineno]
    return sum(bool(code) and code[0] != "#" for code in map(str.strip, inside))


def main(folder=ROOT / "keras_lso"):
    found = [m for path in sorted(folder.rglob("*.py")) for m in too_long(path)]
    print("\n".join(found) or "No function is too long.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
