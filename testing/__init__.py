"""Plugins of pytest that the tests in `tests/` and `integration_tests/` share."""
