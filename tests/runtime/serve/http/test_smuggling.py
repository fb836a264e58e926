"""Requests whose end two servers could see in different places: refused, or understood as nginx understands them."""

import contextlib
import re
import socket

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.runtime.serve.http.access import Access
from ls_edge.runtime.serve.http.bodies import BodyReader
from ls_edge.runtime.serve.http.connection import Connections
from ls_edge.runtime.serve.http.listener import open_listener
from ls_edge.runtime.serve.http.router import Route, Router
from ls_edge.runtime.serve.http.server import HttpServer
from tests.runtime.serve import proxies

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
END = b"GET /end HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
POST = b"POST /post HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
BODY = b"5\r\nimage\r\n0\r\n\r\n"


def length(count):
    return b"Content-Length: %d\r\n" % count


UNDERSTOOD = {
    "length": POST + length(5) + b"\r\nimage",
    "chunks": POST + CHUNKED + b"\r\n" + BODY,
    "chunks in capitals": POST + b"TRANSFER-ENCODING: CHUNKED\r\n\r\n" + BODY,
    "pipeline": POST
    + length(5)
    + b"\r\nimage"
    + POST
    + CHUNKED
    + b"\r\n"
    + BODY
    + b"GET /get HTTP/1.1\r\nHost: x\r\n\r\n",
    "no body": POST + length(0) + b"\r\n",
    "body of a request in a request": POST + length(len(SMUGGLED)) + b"\r\n" + SMUGGLED,
    "upgrade to h2c with a length": POST + H2C + length(len(SMUGGLED)) + b"\r\n" + SMUGGLED,
    "upgrade to h2c with chunks": POST + H2C + CHUNKED + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED),
    "upgrade to websocket": POST
    + b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    + length(len(SMUGGLED))
    + b"\r\n"
    + SMUGGLED,
    "upgrade to TLS": POST + b"Connection: upgrade\r\nUpgrade: TLS/1.0\r\n" + length(5) + b"\r\nimage",
    "upgrade without a body": b"GET /get HTTP/1.1\r\nHost: x\r\n" + H2C + b"\r\n",
    "upgrade of a pipeline": POST + H2C + length(5) + b"\r\nimage" + b"GET /get HTTP/1.1\r\nHost: x\r\n\r\n",
    "spaces around values": POST + b"Content-Length:   5  \r\n\r\nimage",
    "GET with a body": b"GET /get HTTP/1.1\r\nHost: x\r\n" + length(len(SMUGGLED)) + b"\r\n" + SMUGGLED,
    "two spaces": b"GET  /get HTTP/1.1\r\nHost: x\r\n\r\n",
    "empty line before": b"\r\n" + POST + length(5) + b"\r\nimage",
}
"""Requests that are answered, and whose body has five bytes or is a request."""
REFUSED = {
    "length and chunks": POST + length(4) + CHUNKED + b"\r\n" + BODY,
    "chunks and length": POST + CHUNKED + length(4) + b"\r\n" + BODY,
    "length and chunks in HTTP/1.0": POST.replace(b"1.1", b"1.0") + length(5) + CHUNKED + b"\r\n" + BODY,
    "chunks in HTTP/1.0": POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + BODY,
    "two lengths": POST + length(5) + length(0) + b"\r\nimage",
    "the same length twice": POST + length(5) * 2 + b"\r\nimage",
    "a list of lengths": POST + b"Content-Length: 5, 5\r\n\r\nimage",
    "length with a sign": POST + b"Content-Length: +5\r\n\r\nimage",
    "negative length": POST + b"Content-Length: -5\r\n\r\nimage",
    "length in hexadecimal": POST + b"Content-Length: 0x5\r\n\r\nimage",
    "length with an underscore": POST + b"Content-Length: 1_0\r\n\r\nimageimage",
    "no length": POST + b"Content-Length:\r\n\r\nimage",
    "length beyond 64 bits": POST + b"Content-Length: 18446744073709551621\r\n\r\nimage",
    "length in other digits": POST + b"Content-Length: \xd9\xa5\r\n\r\nimage",
    "space before a colon": POST + b"Content-Length : 5\r\n\r\nimage",
    "space before chunked's colon": POST + b"Transfer-Encoding : chunked\r\n\r\n" + BODY,
    "tab before a colon": POST + b"Transfer-Encoding\t: chunked\r\n\r\n" + BODY,
    "unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + BODY,
    "two codings": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + BODY,
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + BODY,
    "two fields of codings": POST + CHUNKED + b"Transfer-Encoding: identity\r\n\r\n" + BODY,
    "identity": POST + b"Transfer-Encoding: identity\r\n" + length(5) + b"\r\nimage",
    "quoted coding": POST + b'Transfer-Encoding: "chunked"\r\n\r\n' + BODY,
    "vertical tab": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + BODY,
    "folded line": POST + b"X: a\r\n " + CHUNKED + length(5) + b"\r\nimage",
    "folded coding": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + BODY,
    "first line folded": POST[:-2] + b"\r\n X: y\r\n" + length(5) + b"\r\nimage",
    "space before the first field": b"POST /post HTTP/1.1\r\n Host: localhost\r\n" + length(5) + b"\r\nimage",
    "lines that end with LF": (POST + length(5) + b"\r\n").replace(b"\r\n", b"\n") + b"image",
    "one line that ends with LF": POST + b"X: y\n" + length(5) + b"\r\nimage",
    "header that ends with LF": POST + length(5) + b"\nimage",
    "CR in a value": POST + b"X: y\r" + length(5) + b"\r\nimage",
    "null in a value": POST + b"X: \x00\r\n" + length(5) + b"\r\nimage",
    "null in a name": POST + b"Content-Length\x00: 5\r\n\r\nimage",
    "chunk that ends with LF": POST + CHUNKED + b"\r\n5\nimage\n0\n\n",
    "chunk of a signed size": POST + CHUNKED + b"\r\n+5\r\nimage\r\n0\r\n\r\n",
    "chunk of 0x5": POST + CHUNKED + b"\r\n0x5\r\nimage\r\n0\r\n\r\n",
    "chunk of a size beyond 64 bits": POST + CHUNKED + b"\r\n10000000000000005\r\nimage\r\n0\r\n\r\n",
    "chunk with a space": POST + CHUNKED + b"\r\n5 \r\nimage\r\n0\r\n\r\n",
    "chunk longer than its size": POST + CHUNKED + b"\r\n3\r\nimage\r\n0\r\n\r\n",
    "chunk shorter than its size": POST + CHUNKED + b"\r\n7\r\nimage\r\n0\r\n\r\n",
    "extension with LF": POST + CHUNKED + b"\r\n5;a\nimage\r\n0\r\n\r\n",
    "extension with CR": POST + CHUNKED + b"\r\n5;a\rb\r\nimage\r\n0\r\n\r\n",
    "HTTP/1.2": POST.replace(b"1.1", b"1.2") + length(5) + b"\r\nimage",
    "HTTP/2.0": POST.replace(b"1.1", b"2.0") + length(5) + b"\r\nimage",
    "HTTP/0.9": b"GET /get\r\n\r\n",
    "no host": b"GET /get HTTP/1.1\r\n\r\n",
    "two hosts": POST + b"Host: other\r\n" + length(5) + b"\r\nimage",
    "method in small letters": b"get /get HTTP/1.1\r\nHost: x\r\n\r\n",
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "CONNECT": b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n" + SMUGGLED,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}
"""Requests that are refused, after which the connection is closed."""


class Recorder:
    """A server that notes the requests that it understands."""

    def __init__(self):
        self.requests = []
        bodies = BodyReader(1 << 20, 1.0)

        async def note(request):
            with await bodies.read(request) as body:
                body.seek(0)
                self.requests.append((request.method, request.path, body.read()))
            return web.Response(body=b"understood")

        routes = [
            Route("POST", "/post", note),
            *(Route("GET", f"/{path}", note) for path in ("get", "smuggled", "end")),
        ]
        router = Router(routes, Access(loopback_only=False), CollectorRegistry(), access_log=False)
        listener = open_listener("127.0.0.1:0", "--http")
        self.address = listener.getsockname()
        self.server = HttpServer(listener, router, Connections(64, idle_s=1.0, receive_s=1.0))

    def ask(self, data, address=None):
        """The requests that are understood of bytes, and the statuses of the responses."""
        self.requests.clear()
        received = b""
        with (
            socket.create_connection(address or self.address, timeout=30) as connection,
            contextlib.suppress(ConnectionError),
        ):
            connection.sendall(data)
            while part := connection.recv(1 << 16):
                received += part
        return list(self.requests), [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", received)]


@pytest.fixture(scope="module")
def recorder():
    one = Recorder()
    with one.server:
        yield one


@pytest.fixture(scope="module")
def nginx(recorder, tmp_path_factory):
    """Address of nginx in front of the server, with connections that it uses again."""
    (port,) = free_ports(1)
    # nginx soon closes connections that it does not use, for which the check for leaks waits.
    http = f"""
        client_header_timeout 1s; client_body_timeout 1s; keepalive_timeout 1s; lingering_timeout 1s;
        upstream server {{ server 127.0.0.1:{recorder.address[1]}; keepalive 4; keepalive_timeout 50ms; }}
        server {{
          listen 127.0.0.1:{port};
          location / {{
            proxy_pass http://server; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_request_buffering off;
          }}
        }}
    """
    with proxies.nginx(tmp_path_factory.mktemp("nginx"), port, http) as address:
        yield address


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_requests_end_where_they_say(recorder, name):
    requests, statuses = recorder.ask(UNDERSTOOD[name] + END)
    assert ("GET", "/smuggled", b"") not in requests
    # Behind an upgrade that came together with other requests, the connection is closed.
    assert requests[-1] == ("GET", "/end", b"") or "pgrade" in name
    assert {body for _, _, body in requests} <= {b"", b"image", SMUGGLED}
    assert statuses == [200] * len(requests)
    assert requests


@pytest.mark.parametrize("name", REFUSED)
def test_requests_that_could_end_elsewhere_are_refused(recorder, name):
    requests, statuses = recorder.ask(REFUSED[name] + END)
    assert requests == []
    assert len(statuses) <= 1
    assert set(statuses) <= {400, 404, 405, 408, 501, 505}


@pytest.mark.parametrize("name", [*UNDERSTOOD, *REFUSED])
def test_nginx_understands_requests_alike(recorder, nginx, name):
    _compare(recorder, nginx, (UNDERSTOOD | REFUSED)[name])


LINE = st.sampled_from(
    [length(5), length(0), length(len(SMUGGLED)), CHUNKED, H2C, b"Connection: close\r\n", b"Connection: keep-alive\r\n",
     b"Content-Length: 5\n", b"Transfer-Encoding:chunked\r\n", b" folded\r\n", b"Transfer-Encoding: identity\r\n",
     b"Content-Length: 05\r\n", b"Expect: 100-continue\r\n", b"X: \r\n", b"Content_Length: 9\r\n",
     b"Trailer: Content-Length\r\n", b"Upgrade: h2c\r\n", b"X: \x01\r\n", b"X: \xff\r\n"]
)  # fmt: skip
REST = st.sampled_from(
    [b"image", b"", BODY, b"5\r\nimage\r\n0\r\nContent-Length: 9\r\n\r\n", b"5;a=b\r\nimage\r\n0;c\r\n\r\n", SMUGGLED,
     b"0\r\n\r\n" + SMUGGLED, b"00000005\r\nimage\r\n0\r\n\r\n", b"5\r\nimage\r\n0\r\n", b"0\r\nX: y\r\n\r\n"]
)  # fmt: skip
FIRST = st.sampled_from(
    [
        b"POST /post HTTP/1.1\r\n",
        b"GET /get HTTP/1.1\r\n",
        b"POST /post HTTP/1.0\r\n",
        b"POST http://x/post HTTP/1.1\r\n",
    ]
)
REQUEST = st.builds(
    lambda first, lines, rest: first + b"Host: localhost\r\n" + b"".join(lines) + b"\r\n" + rest,
    FIRST,
    st.lists(LINE, max_size=3),
    REST,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(REQUEST, min_size=1, max_size=3).map(b"".join))
def test_nginx_understands_combinations_alike(recorder, nginx, data):
    _compare(recorder, nginx, data)


def test_connection_is_kept_behind_an_ignored_upgrade(recorder):
    recorder.requests.clear()
    with socket.create_connection(recorder.address, timeout=30) as connection:
        for body in (b"image", bytes(300_000)) * 2:
            connection.sendall(POST + H2C + length(len(body)) + b"\r\n" + body)
            assert connection.recv(1 << 16).endswith(b"understood")
    assert [len(body) for _, _, body in recorder.requests] == [5, 300_000] * 2


def _compare(recorder, nginx, data):
    """What both understand is the same, and where one understands less, it has closed the connection."""
    direct, direct_statuses = recorder.ask(data + END)
    proxied, proxied_statuses = recorder.ask(data + END, nginx)
    shorter = min(len(direct), len(proxied))
    assert direct[:shorter] == proxied[:shorter]
    # Behind nginx, each request that it forwards is one of the server's, and no more.
    assert proxied_statuses.count(200) in (len(proxied), len(proxied) - 1), (direct_statuses, proxied_statuses)
