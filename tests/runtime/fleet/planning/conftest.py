"""Parts of planning problems."""

import pytest

from ls_edge.runtime.fleet.planning.problem import PlannedDevice


@pytest.fixture
def make_source():
    """Return a source that runs stem and head in ``stem_ms``."""

    def make(stem_ms, **more):
        return PlannedDevice("source", 1.0, 0, stem_ms=stem_ms, **{"watts": 0.0, **more})

    return make
