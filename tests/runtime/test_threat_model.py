"""``docs/threat-model.md`` speaks of tests that exist, and of bounds that are those of the code."""

import inspect
import re
from pathlib import Path

from ls_edge.core import records
from ls_edge.data import decoding
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.routing import claims
from ls_edge.runtime.routing.peer import engine_queue, orphans
from ls_edge.runtime.routing.source import ended_requests
from ls_edge.runtime.routing.state import held_request
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.serve import application, inference_protocol, live_page, scrape_server, service
from ls_edge.runtime.serve.http import access, bodies, connection, listener, server
from ls_edge.runtime.source import audit, peer_monitor
from ls_edge.runtime.store import installer
from ls_edge.runtime.transport import connections, handshake, keys, links, node, problems

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
HOMES = {
    "audit": audit, "connections": connections, "links": links, "node": node, "handshake": handshake, "wire": wire,
    "records": records, "keys": keys, "claims": claims, "held_request": held_request, "ended_requests": ended_requests,
    "problems": problems, "framing": framing,
    "engine_queue": engine_queue, "orphans": orphans, "Limits": Limits(), "peer_monitor": peer_monitor,
    "decoding": decoding, "installer": installer, "access": access, "application": application,
    "bodies": bodies, "connection": connection,
    "inference_protocol": inference_protocol, "listener": listener, "live_page": live_page,
    "scrape_server": scrape_server, "server": server, "service": service,
}  # fmt: skip


def test_tests_that_are_named_exist():
    named = set(re.findall(r"`((?:[\w/]+/)?test_\w+\.py)`", TEXT))
    assert len(named) > 10
    for name in named:
        found = [ROOT / name] if "/" in name else [*(ROOT / "tests" / "runtime").rglob(name)]
        assert [path.is_file() for path in found] == [True], name


def test_checks_of_claims_are_named_beside_their_attacks():
    named = set(re.findall(r"`claims\.(\w+)`", TEXT.split("## Bounds")[0]))
    assert named == {
        name
        for name, value in vars(claims).items()
        if inspect.isfunction(value) and value.__module__ == claims.__name__ and not name.startswith("_")
    } - {"blocks_run"}


def test_bounds_are_those_of_the_code():
    table = TEXT.split("## Bounds")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 20
    for what, values, constants in rows:
        names = re.findall(r"`([\w.]+)`", constants)
        said = [value.strip() for value in values.split(",")]
        actual = [str(getattr(HOMES[name.rpartition(".")[0]], name.rpartition(".")[2])) for name in names]
        assert said == actual, what
