"""The version of ls-edge, which ``pyproject.toml`` reads too."""

__version__ = "0.1.0"
