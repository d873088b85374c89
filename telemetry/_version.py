"""The version, which pyproject.toml and the run folder read from here."""

__version__ = "0.1.0"
