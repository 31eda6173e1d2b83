"""Says how many cases there were."""

from integration_tests.properties import budget


def pytest_terminal_summary(terminalreporter):
    if not budget.counts:
        return
    terminalreporter.section("cases of properties")
    for name, count in budget.counts.items():
        terminalreporter.write_line(f"{count:6,} {name}")
    terminalreporter.write_line(
        f"{budget.counts.total():6,} in all, under {budget.BACKEND}"
    )
