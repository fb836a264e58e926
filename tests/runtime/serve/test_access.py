"""Tokens, host names, and pages of other sites."""

import contextlib

import pytest
from aiohttp.test_utils import make_mocked_request

from ls_edge.runtime.serve.access import Access
from ls_edge.runtime.serve.replies import Refusal
from tests.runtime.serve.serving import TOKENS, Server, bearer, picture, status_of


@pytest.fixture(scope="module")
def server(ls_edge_of_module, swarm, bundle):
    """A server that no test changes."""
    return Server(ls_edge_of_module, swarm.path, bundle)


def test_every_path_but_health_and_the_page_needs_a_token(swarm, bundle, ls_edge, tokens):
    server = Server(ls_edge, swarm.path, bundle, "--token-file", tokens)
    for token in TOKENS:
        assert status_of(server, "GET", "/status", bearer(token))[0] == 200
        assert server.predict(picture(), headers={"Content-Type": "image/png", **bearer(token)})[0] == 200
    for headers in ({}, bearer(TOKENS[0][:-1]), bearer(TOKENS[0] + "x"), {"Authorization": TOKENS[0]},
                    {"Authorization": f"Basic {TOKENS[0]}"}, bearer(""), bearer("ä" * 16)):  # fmt: skip
        for method, path in (("GET", "/status"), ("GET", "/metrics"), ("GET", "/events"), ("POST", "/predict"),
                             ("POST", "/v2/models/tiny/infer"), ("GET", "/v2")):  # fmt: skip
            status, reply = status_of(server, method, path, {k: v.encode() for k, v in headers.items()})
            assert status == 401
            assert reply["WWW-Authenticate"] == "Bearer"
    for path in ("/health/live", "/health/ready", "/v2/health/live"):  # probes have no token
        assert status_of(server, "GET", path, {})[0] == 200
    # With a token, the name of the host does not matter: a proxy may pass on its own.
    assert status_of(server, "GET", "/status", {"Host": "example.com", **bearer(TOKENS[0])})[0] == 200


@pytest.mark.parametrize("content", ["", "# none\n", "short\n", "a token with spaces of some length\n", "ä" * 20])
def test_files_without_tokens_are_refused(swarm, bundle, command, tmp_path, content):
    path = tmp_path / "tokens.txt"
    path.write_text(content, encoding="utf-8")
    code, _, error = command("serve", "--peers", swarm.path, "--bundle", bundle, "--token-file", path)
    assert code == 2
    assert error.startswith(f"ls-edge: --token-file {path} ")
    assert error.count("\n") == 1


def test_other_hosts_and_pages_of_other_sites_are_refused(server):
    port = server.address[1]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost", f"[::1]:{port}"):
        assert status_of(server, "GET", "/status", {"Host": host})[0] == 200
    for host in ("example.com", f"example.com:{port}", "127.0.0.1.example.com", "[::1", "localhost@example.com"):
        assert status_of(server, "GET", "/status", {"Host": host})[0] in (400, 403)
    body = picture()
    for origin, status in ((f"http://127.0.0.1:{port}", 200), ("https://example.com", 403), ("null", 403)):
        assert status_of(server, "POST", "/predict", {"Content-Type": "image/png", "Origin": origin}, body)[0] == status


def test_names_of_allow_host_are_accepted_and_no_others(swarm, bundle, ls_edge, command):
    server = Server(ls_edge, swarm.path, bundle, "--allow-host", "Edge.example", "--allow-host", "10.0.0.7")
    for host in ("edge.example", "EDGE.example:8443", "10.0.0.7", "localhost"):
        assert status_of(server, "GET", "/status", {"Host": host})[0] == 200
    for host in ("example", "a.edge.example", "edge.example.org", "10.0.0.70"):
        assert status_of(server, "GET", "/status", {"Host": host})[0] == 403
    for origin, status in (("https://edge.example:8443", 200), ("https://edge.example.org", 403)):
        headers = {"Host": "edge.example", "Content-Type": "image/png", "Origin": origin}
        assert status_of(server, "POST", "/predict", headers, picture())[0] == status
    for name in ("https://edge.example", "edge.example:80", "*", ""):
        code, _, error = command("serve", "--peers", swarm.path, "--bundle", bundle, "--allow-host", name)
        assert (code, error.count("\n")) == (2, 1)
        assert repr(name) in error


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost:8080", True),
        ("LOCALHOST.:8080", True),
        ("edge.localhost:8080", True),
        ("edge.localhost.", True),
        ("[::1]:8080", True),
        ("edge-localhost:8080", False),
        ("localhost.evil.example", False),
        (".", False),
    ],
)
def test_names_of_the_loopback_need_no_flag(host, is_allowed):
    """Browsers and curl resolve ``edge.localhost`` to the loopback without asking a name server."""
    request = make_mocked_request("GET", "/status", {"Host": host})
    with contextlib.nullcontext() if is_allowed else pytest.raises(Refusal, match="does not accept that host name"):
        Access(loopback_only=True).check(request)
