"""Bodies of requests: encodings, limits before and after decompression, memory, and forms."""

import gzip
import socket
import zlib

import pytest
from aiohttp import web

from ls_edge.runtime.serve import bodies as module
from ls_edge.runtime.serve.bodies import Bodies

MOST = 1 << 16
PLAIN = bytes(range(256)) * 100
PACKED = gzip.compress(PLAIN, mtime=0)  # a test has the same name in every process
FORM = {"Content-Type": "multipart/form-data; boundary=x"}


def part(content, *headers, file='; filename="f"'):
    lines = [f'--x\r\nContent-Disposition: form-data; name="f"{file}', *headers, "", ""]
    return "\r\n".join(lines).encode() + content + b"\r\n"


@pytest.fixture
def address(serve_routes):
    bodies = Bodies(MOST, 1.0)

    async def echo(request):
        async with bodies.read(request, form="Content-Type" in request.headers) as body:
            return web.Response(body=body)

    return serve_routes([web.post("/", echo)], MOST)


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, PLAIN, PLAIN),
        ({}, iter([PLAIN[:10], PLAIN[10:]]), PLAIN),
        ({"Content-Encoding": "gzip"}, PACKED, PLAIN),
        ({"Content-Encoding": "deflate"}, zlib.compress(PLAIN), PLAIN),
        ({"Content-Encoding": "identity"}, PLAIN, PLAIN),
        ({"Content-Encoding": "gzip"}, PLAIN, "the body is not valid"),
        ({"Content-Encoding": "x-gzip"}, PACKED, "the content encoding 'x-gzip' is not supported"),
        ({"Content-Encoding": "gzip, gzip"}, PACKED, "the content encoding 'gzip, gzip' is not supported"),
        ({"Content-Encoding": "gzip"}, gzip.compress(bytes(50 * MOST)), "the body has more than 65536 bytes"),
        ({}, bytes(MOST + 1), "the body has more than 65536 bytes"),
        ({}, iter([bytes(MOST)] * 3), "the body has more than 65536 bytes"),
        (FORM, part(PLAIN) + b"--x--\r\n", PLAIN),
        (FORM, part(b"a cat", file="") + part(PLAIN) + b"--x--\r\n", PLAIN),
        (FORM, part(PLAIN, "Content-Type: image/png", "Content-Transfer-Encoding: binary") + b"--x--\r\n", PLAIN),
        (FORM, b"lines\r\n" * 9 + part(PLAIN) + b"--x--\r\nmore", PLAIN),
        (FORM, part(PLAIN), "the form cannot be read"),  # cut off
        (FORM, part(b"a", file="") * 200 + part(PLAIN) + b"--x--\r\n", "the form cannot be read"),
        (FORM, part(b"a cat", file="") + b"--x--\r\n", "the form has 0 files"),
        (FORM, part(b"a") * 2 + b"--x--\r\n", "the form has 2 files"),
        (FORM, part(bytes(2 * MOST)) + b"--x--\r\n", "the body has more than 65536 bytes"),
        (FORM, PLAIN, "the form cannot be read"),
        ({"Content-Type": "multipart/form-data"}, PLAIN, "the form cannot be read"),
    ],
)  # fmt: skip
def test_bodies_are_taken_or_refused_in_one_line(address, ask, headers, body, expected):
    status, _, reply = ask(address, "POST", "/", body, headers)
    if isinstance(expected, bytes):
        assert (status, reply) == (200, expected)
    else:
        assert (status, reply.startswith(b'{"error": "' + expected.encode())) == (
            413 if "more than" in expected else 415 if "encoding" in expected else 400,
            True,
        )


def test_slow_body_is_refused(address):
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n12345")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def test_bodies_of_all_clients_fit_in_memory(serve_routes, ask, monkeypatch):
    monkeypatch.setattr(module, "MOST_HELD", 3 * MOST)
    bodies, address = Bodies(MOST), []

    async def nested(request):
        async with bodies.read(request) as body:
            if int(request.headers["X-Left"]) == 0:
                return web.Response(body=body)
            left = {"X-Left": str(int(request.headers["X-Left"]) - 1)}
            status, _, reply = await web.asyncio.to_thread(ask, address[0], "POST", "/", body, left)
            return web.Response(status=status, body=reply)

    address.append(serve_routes([web.post("/", nested)], MOST))
    assert ask(address[0], "POST", "/", bytes(MOST), {"X-Left": "2"})[0] == 200
    status, _, reply = ask(address[0], "POST", "/", bytes(MOST), {"X-Left": "3"})
    assert (status, b"fill 0 MiB; try again" in reply) == (503, True)
    assert ask(address[0], "POST", "/", bytes(MOST), {"X-Left": "2"})[0] == 200
