"""Waiting for holders before the first image."""

import pytest

from ls_edge.cli.holder_check import wait_for_holders
from ls_edge.core.errors import LinkError
from ls_edge.core.parts import HEAD
from ls_edge.runtime.source.source import Source


def test_nobody_is_told_to_skip_the_head(serve_peers, wait_until):
    with Source.open(serve_peers({"a": "stem, 0-5"}).path) as source:
        wait_until(lambda: source.snapshot.missing_blocks == (HEAD,), 30.0, "the other parts")
        with pytest.raises(LinkError, match="the head has no holder") as raised:
            wait_for_holders(source, 0.0)
    assert "answer without" not in str(raised.value)
