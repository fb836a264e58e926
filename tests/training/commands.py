"""Commands that tests of training call in their own process."""

import pytest

from ls_edge.cli.main import main


def call(*argv):
    """Run a command, and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in argv])
    return caught.value.code
