"""The version, where pyproject.toml and the run folder both find it."""

__version__ = "0.1.0"
