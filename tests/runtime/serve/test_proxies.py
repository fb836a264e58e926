"""nginx and Caddy in front of a server: the configurations of ``docs/serve.md``, and where requests end."""

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
from aiohttp import web

from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.runtime.serve.listener import open_listener
from ls_edge.runtime.serve.server import HttpServer
from tests.runtime.serve import proxies
from tests.runtime.serve.serving import Server, picture

DOCUMENT = Path(__file__).parents[3] / "docs" / "serve.md"
ORIGIN = "https://edge.example"
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
    return Server(ls_edge_of_module, swarm.path, bundle, *flags.split())


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
    """An HTTPS connection to the name of the document."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection("edge.example", timeout=30, context=context)
    with socket.create_connection(address, timeout=30) as plain:
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


GET = b"GET /get HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /post HTTP/1.1\r\nHost: localhost\r\n"
LENGTH, CHUNKED = b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"
BODY = b"5\r\nimage\r\n0\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
END = b"GET /end HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
INSIDE = b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A function that sends bytes to nginx, in front of a server; it returns the requests that the server saw."""
    seen = []

    async def note(request):
        seen.append((request.method, request.path, await request.read()))
        return web.Response(body=b"understood")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", note)
    (port,) = free_ports(1)
    listener = open_listener("127.0.0.1:0", "--http")
    http = f"""
        client_header_timeout 1s; client_body_timeout 1s; keepalive_timeout 1s; lingering_timeout 1s;
        upstream server {{ server 127.0.0.1:{listener.getsockname()[1]}; keepalive 4; keepalive_timeout 50ms; }}
        server {{
          listen 127.0.0.1:{port};
          location / {{
            proxy_pass http://server; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_request_buffering off;
          }}
        }}
    """

    def send(data):
        seen.clear()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(data)
            with contextlib.suppress(ConnectionError):
                while connection.recv(1 << 16):
                    pass
        return list(seen)

    with HttpServer(listener, application), proxies.nginx(tmp_path_factory.mktemp("smuggling"), port, http):
        yield send


@pytest.mark.parametrize(
    "data",
    [
        POST + LENGTH + b"\r\nimage", POST + CHUNKED + b"\r\n" + BODY, POST + INSIDE, GET * 3,
        POST + LENGTH + CHUNKED + b"\r\n" + BODY + SMUGGLED, POST + LENGTH * 2 + b"\r\nimage",
        POST + b"Content-Length: +5\r\n\r\nimage", POST + b"Content-Length : 5\r\n\r\nimage",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n" + BODY, POST + b"X: a\r\n " + CHUNKED + LENGTH + b"\r\nimage",
        POST + CHUNKED + b"\r\n5;a\nimage\r\n0\r\n\r\n", POST + CHUNKED + b"\r\n3\r\nimage\r\n0\r\n\r\n",
        POST + H2C + INSIDE, POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + BODY, POST + LENGTH + b"\nimage",
        POST + CHUNKED + b"\r\n5\r\nimage\r\n0\r\nContent-Length: 9\r\n\r\n",
    ],
)  # fmt: skip
def test_no_request_is_smuggled_through_nginx(recorded, data):
    """The server sees the requests that nginx forwarded, and none that is the body of another."""
    requests = recorded(data + END)
    assert {(method, path) for method, path, _ in requests} <= {("POST", "/post"), ("GET", "/get"), ("GET", "/end")}
    assert {body for _, _, body in requests} <= {b"", b"image", SMUGGLED}
    assert recorded(END) == [("GET", "/end", b"")]  # on a connection that the server kept
