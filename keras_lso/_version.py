"""The version: the metadata of a build has it from here, a checkout may have none."""

__version__ = "0.3.0.dev0"
