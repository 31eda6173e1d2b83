"""The version. A build takes it from here; a checkout may have no metadata."""

__version__ = "0.3.0.dev0"
