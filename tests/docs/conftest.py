"""Commands and bundles of the tests of the command line."""

from tests.cli.conftest import _complaints, _make_bundle, command, ls_edge  # noqa: F401
