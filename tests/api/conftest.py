"""Commands of the tests of the command line."""

from tests.cli.conftest import command  # noqa: F401
