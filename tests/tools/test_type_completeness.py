"""What is made of a report of basedpyright about the types of the package."""

import pytest

# A source distribution has no tools.
pytest.importorskip("tools")

from tools import type_completeness

pytestmark = pytest.mark.one_backend

FILE = str(type_completeness.ROOT / "keras_lso/plotting.py")


def symbol(name, *diagnostics, known=True, ambiguous=False):
    return {
        "name": name,
        "isTypeKnown": known,
        "isTypeAmbiguous": ambiguous,
        "diagnostics": list(diagnostics),
    }


def diagnostic(message, severity="error", **place):
    return {"message": message, "severity": severity, **place}


def at(line):
    return {"file": FILE, "range": {"start": {"line": line, "character": 0}}}


def report(*symbols, general=()):
    return {
        "generalDiagnostics": list(general),
        "typeCompleteness": {"symbols": list(symbols)},
    }


KNOWN = symbol("keras_lso.LARS", diagnostic("No docstring", "warning"))
MISSING = symbol(
    "keras_lso.plotting.plot_record",
    diagnostic("Return type annotation is missing", **at(41)),
    known=False,
)
GUESSED = symbol(
    "keras_lso.plotting.SIZE", diagnostic("could be inferred differently", **at(7))
)
GUESSED["isTypeAmbiguous"] = True
OF_A_BASE = symbol("keras_lso.LAMB", known=False)
COMMAND = symbol("keras_lso.__main__.main", diagnostic("missing"), known=False)


def run(monkeypatch, capsys, found):
    monkeypatch.setattr(type_completeness, "report", lambda: found)
    status = type_completeness.main()
    return status, capsys.readouterr().out.splitlines()


def test_report_with_all_types_known_has_exit_status_0(monkeypatch, capsys):
    status, lines = run(monkeypatch, capsys, report(KNOWN, COMMAND))
    assert status == 0
    assert lines == ["1 of 1 types are known."]


def test_missing_types_are_printed_with_file_and_line(monkeypatch, capsys):
    found = report(KNOWN, MISSING, GUESSED, OF_A_BASE)
    status, lines = run(monkeypatch, capsys, found)
    assert status == 1
    assert lines == [
        "keras_lso/plotting.py:42: keras_lso.plotting.plot_record: Return type "
        "annotation is missing",
        "keras_lso/plotting.py:8: keras_lso.plotting.SIZE: could be inferred "
        "differently",
        "keras_lso.LAMB: Type unknown",
        "1 of 4 types are known.",
    ]


def test_report_without_types_has_exit_status_1(monkeypatch, capsys):
    """As of a package that the checker does not find."""
    general = [diagnostic('No py.typed file found for "keras_lso"')]
    status, lines = run(monkeypatch, capsys, report(general=general))
    assert status == 1
    assert lines[0] == 'No py.typed file found for "keras_lso"'
    assert run(monkeypatch, capsys, report())[0] == 1
