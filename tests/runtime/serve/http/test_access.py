"""Tokens, host names, pages of other sites, and addresses of clients behind proxies."""

import contextlib

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from ls_edge.core.errors import UsageError
from ls_edge.runtime.serve.http.access import Access
from ls_edge.runtime.serve.http.replies import Refusal
from tests.browser import Browser, needs_browser
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


@pytest.mark.parametrize("proxies", [["192.0.2.0/24"], ["192.0.2.1", "2001:db8::1"]])
@pytest.mark.parametrize(
    ("remote", "forwarded", "client"),
    [
        ("192.0.2.1", ["198.51.100.7"], "198.51.100.7"),
        ("192.0.2.1", ["203.0.113.9, 198.51.100.7"], "198.51.100.7"),  # the first one is the client's own claim
        ("192.0.2.1", ["203.0.113.9", "198.51.100.7"], "198.51.100.7"),
        ("192.0.2.1", ["198.51.100.7, 192.0.2.1"], "198.51.100.7"),
        ("192.0.2.1", ["2001:db8::7"], "2001:db8::7"),
        ("192.0.2.1", ["198.51.100.7:4711"], "198.51.100.7"),  # as Azure's proxies write it
        ("192.0.2.1", ["[2001:db8::7]:4711"], "2001:db8::7"),
        ("192.0.2.1", ["[2001:db8::7]"], "2001:db8::7"),
        ("192.0.2.1", ["2001:0:0:1:0:0:0:7"], "2001:0:0:1::7"),
        ("192.0.2.1", ["198.51.100.7, ::ffff:192.0.2.1"], "198.51.100.7"),  # as a socket for both families names it
        ("::ffff:192.0.2.1", ["198.51.100.7"], "198.51.100.7"),
        ("192.0.2.1", ["198.51.100.7:x"], "192.0.2.1"),
        ("192.0.2.1", ["a name\n"], "192.0.2.1"),
        ("192.0.2.1", [""], "192.0.2.1"),
        ("192.0.2.1", [], "192.0.2.1"),
        ("198.51.100.7", ["203.0.113.9"], "198.51.100.7"),
    ],
)
def test_client_is_the_last_address_that_is_not_a_trusted_proxy(proxies, remote, forwarded, client):
    headers = CIMultiDict([("X-Forwarded-For", value) for value in forwarded])
    access = Access(loopback_only=True, proxies=proxies)
    assert access.client_of(make_mocked_request("GET", "/", headers).clone(remote=remote)) == client


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


@pytest.mark.parametrize("proxy", ["edge.example", "10.0.0.0/33", "", "10.0.0.1:80"])
def test_trusted_proxies_are_addresses(proxy):
    with pytest.raises(UsageError, match="--trusted-proxy"):
        Access(loopback_only=True, proxies=[proxy])


PAGE = "https://app.example"


@pytest.fixture(scope="module")
def shared(ls_edge_of_module, swarm, bundle, tokens_of_module):
    """A server that pages of another site may use, with tokens."""
    return Server(ls_edge_of_module, swarm.path, bundle, "--cors", PAGE, "--token-file", tokens_of_module)


def test_browsers_are_told_which_pages_may_use_the_server(shared):
    names = "authorization,cache-control,content-type,tracestate,x-requested-with"
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
    status, reply = status_of(shared, "OPTIONS", "/predict", asked)  # without a token, as browsers ask
    assert status == 204
    assert reply["Access-Control-Allow-Origin"] == PAGE
    assert "POST" in reply["Access-Control-Allow-Methods"]
    assert names in reply["Access-Control-Allow-Headers"]
    for origin in (f"{PAGE}:444", "http://app.example", "https://app.example.org", "null", "*"):
        status, reply = status_of(shared, "OPTIONS", "/predict", {**asked, "Origin": origin})
        assert status in (401, 405)
        assert "Access-Control-Allow-Origin" not in reply
        assert reply["Vary"] == "Origin"  # so that no cache gives it to another page


def test_pages_of_cors_may_read_answers_and_errors(shared):
    image = {"Content-Type": "image/png", **bearer(TOKENS[0])}
    for headers, status in (({**image, "Origin": PAGE}, 200), ({"Origin": PAGE}, 401)):
        found, reply = status_of(shared, "POST", "/predict", headers, picture())
        assert found == status
        assert reply["Access-Control-Allow-Origin"] == PAGE
    assert status_of(shared, "POST", "/predict", {**image, "Origin": "https://other.example"}, picture())[0] == 403


@pytest.mark.parametrize("origin", ["", "*", "null", "app.example", f"{PAGE}/", f"{PAGE}/path", "https://*.example"])
def test_cors_names_origins(origin):
    with pytest.raises(UsageError, match="--cors"):
        Access(loopback_only=True, origins=[origin])


@needs_browser
def test_page_of_another_site_uses_the_server(ls_edge, swarm, bundle, tmp_path, serve_routes):
    async def show(_request):
        return web.Response(text="<title>another site</title>", content_type="text/html")

    site = serve_routes([("GET", "/", show)])
    origin = f"http://localhost:{site[1]}"
    with Browser(tmp_path / "profile") as browser:
        browser.show(origin, 390, 400)
        for cors, seen in ((), "refused"), (("--cors", origin), "200"):
            server = Server(ls_edge, swarm.path, bundle, *cors)
            url = f"http://127.0.0.1:{server.address[1]}/status"
            browser.evaluate(
                f"window.seen = null; fetch('{url}', "
                "{credentials: 'include', headers: {'X-Request-ID': 'page', tracestate: 'a=b'}})"
                ".then(reply => seen = `${reply.status}`, () => seen = 'refused')"
            )
            browser.wait_for("window.seen")
            assert browser.evaluate("window.seen") == seen
