"""The configurations of ``docs/serving.md`` for nginx and Caddy, run in front of a server."""

import contextlib
import http.client
import json
import re
import socket
import ssl
import time
from pathlib import Path
from urllib.parse import urljoin

import pytest

from ls_edge.runtime.fleet.local_cluster import free_ports
from tests.runtime.serve import proxies
from tests.runtime.serve.serving import Server, picture

DOCUMENT = Path(__file__).parents[3] / "docs" / "serving.md"
ORIGIN = "https://edge.example"
CLIENT = "127.0.0.2"
EVERY_S = 0.5
"""Interval of events."""


def documented(language, replaced):
    """A configuration from the document, with these replacements."""
    ((text),) = re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.S)
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, str(new))
    return text


@pytest.fixture(scope="module")
def server(ls_edge_of_module, swarm, bundle):
    ((flags),) = re.findall(r"(--allow-host.*)\n", DOCUMENT.read_text())[:1]
    return Server(ls_edge_of_module, swarm.path, bundle, "--access-log", *flags.split())


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def proxy(request, server, certificate, tmp_path_factory):
    """Address of a proxy in front of the server."""
    (port,) = free_ports(1)
    cert, key = certificate
    replaced = {"cert.pem": cert, "key.pem": key, "127.0.0.1:8080": "{}:{}".format(*server.address)}
    if request.param == "nginx":
        start, text = proxies.nginx, documented("nginx", {**replaced, "listen 443": f"listen 127.0.0.1:{port}"})
    else:
        start, text = proxies.caddy, documented("caddyfile", {**replaced, ORIGIN: f"{ORIGIN}:{port}"})
    with start(tmp_path_factory.mktemp(request.param), port, text) as address:
        yield address


@contextlib.contextmanager
def connection_to(address):
    """An HTTPS connection from CLIENT, to the name of the document."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("edge.example", timeout=30, context=context)
    with socket.create_connection(address, timeout=30, source_address=(CLIENT, 0)) as plain:
        connection.sock = context.wrap_socket(plain, server_hostname="edge.example")
        with contextlib.closing(connection):
            yield connection


def ask(address, method, path, body=None, headers=()):
    with connection_to(address) as connection:
        connection.request(method, path, body, {"Host": f"edge.example:{address[1]}", **dict(headers)})
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()


def test_page_and_answers_come_through(proxy):
    status, headers, page = ask(proxy, "GET", "/edge/")
    assert status == 200
    assert headers["Content-Type"].startswith("text/html")
    assert b'fetch("events"' in page  # relative, so below the same path
    origin = {"Origin": f"{ORIGIN}:{proxy[1]}"}
    assert ask(proxy, "POST", "/edge/predict", picture(), origin)[0] == 200
    assert ask(proxy, "POST", "/edge/predict", picture(), {"Origin": "https://other.example"})[0] == 403
    (found,) = json.loads(ask(proxy, "GET", "/edge/openapi.json")[2])["servers"]
    assert urljoin("/edge/openapi.json", found["url"]) == "/edge/"
    assert ask(proxy, "GET", "/edge/status/")[0] == 404
    assert ask(proxy, "GET", "/edge/predict")[0] == 405
    status, headers, _ = ask(proxy, "GET", "/edge")
    assert status in (301, 302)
    assert headers["Location"].endswith("/edge/")


def test_name_of_another_host_is_refused(server, proxy):
    assert ask(proxy, "GET", "/edge/status")[0] == 200
    assert server.ask("GET", "/status", b"", {"Host": "other.example"})[0] == 403


def test_bodies_have_the_limit_of_the_server(proxy):
    assert ask(proxy, "POST", "/edge/predict", bytes(16 << 20))[0] == 400
    with contextlib.suppress(OSError):  # refused before all of it is sent
        assert ask(proxy, "POST", "/edge/predict", bytes(17 << 20))[0] == 413


def test_events_are_not_collected(server, proxy):
    with connection_to(proxy) as connection:
        connection.request("GET", "/edge/events", headers={"Host": f"edge.example:{proxy[1]}"})
        events = connection.getresponse()
        assert events.readline().startswith(b"data: ")
        read = time.monotonic()
        server.predict(picture())
        old = int((time.monotonic() - read) / EVERY_S) + 1  # events without the answer
        # nginx would collect events for some seconds, and then send all of them.
        lines = [line for _ in range(old + 1) for line in (events.readline(), events.readline())]
    assert any(json.loads(line[6:])["answers"] for line in lines if line.strip())


def test_access_log_has_the_client(server, proxy):
    for count, forged in enumerate(("", "192.0.2.1", "127.0.0.1")):
        request_id = f"client-{proxy[1]}-{count}"
        ask(proxy, "GET", "/edge/health/live", None, {"X-Request-ID": request_id, "X-Forwarded-For": forged})
        line = next(line for line in server.process.stderr if request_id in line)
        assert f"client={CLIENT} " in line
