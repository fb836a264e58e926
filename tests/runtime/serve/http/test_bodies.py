"""Bodies of requests: encodings, limits before and after decompression, and expectations."""

import base64
import gzip
import socket
import zlib

import pytest
from aiohttp import web

from ls_edge.runtime.serve.http.bodies import BodyReader

MOST = 1 << 16
PLAIN = bytes(range(256)) * 100
EMPTY = gzip.compress(b"", mtime=0)  # a test has the same name in every process


@pytest.fixture
def address(serve_routes):
    bodies = BodyReader(MOST, 30.0)

    async def echo(request):
        with await bodies.read(request) as body:
            body.seek(0)
            return web.Response(body=body.read())

    return serve_routes([("POST", "/", echo)])


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("identity", PLAIN),
        ("", PLAIN),
        ("gzip", gzip.compress(PLAIN, mtime=0)),
        ("GZIP", gzip.compress(PLAIN, mtime=0)),
        ("x-gzip", gzip.compress(PLAIN, mtime=0)),
        ("deflate", zlib.compress(PLAIN)),
        ("deflate", zlib.compress(PLAIN)[2:-4]),  # without header and checksum
        ("gzip", EMPTY),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_compressed_bodies_are_unpacked(address, ask, encoding, packed, chunked):
    body = iter([packed[:10], packed[10:]]) if chunked else packed
    status, _, reply = ask(address, "POST", "/", body, {"Content-Encoding": encoding})
    assert (status, reply) == (200, b"" if packed == EMPTY else PLAIN)


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "gzip, deflate", "x"])
def test_other_encodings_are_refused(address, ask, encoding):
    status, headers, reply = ask(address, "POST", "/", gzip.compress(PLAIN, mtime=0), {"Content-Encoding": encoding})
    assert (status, headers["Accept-Encoding"]) == (415, "gzip, deflate")
    assert b"use gzip, deflate" in reply


@pytest.mark.parametrize(
    ("encoding", "body", "words"),
    [
        ("gzip", PLAIN, "the body is not valid gzip"),
        ("deflate", gzip.compress(PLAIN, mtime=0), "the body is not valid deflate"),
        ("gzip", gzip.compress(PLAIN, mtime=0)[:-9], "is not a single complete"),
        ("gzip", gzip.compress(PLAIN, mtime=0) + b"more", "is not a single complete"),
        ("gzip", b"", "is not a single complete"),
    ],
)
def test_bodies_that_cannot_be_unpacked_are_refused(address, ask, encoding, body, words):
    status, _, reply = ask(address, "POST", "/", body, {"Content-Encoding": encoding})
    assert status == 400
    assert words in reply.decode()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_small_body_that_unpacks_to_a_large_one_is_refused(address, ask, encoding):
    packed = (gzip.compress if encoding == "gzip" else zlib.compress)(bytes(50 * MOST))
    assert len(packed) < MOST
    status, _, reply = ask(address, "POST", "/", packed, {"Content-Encoding": encoding})
    assert (status, reply) == (413, b'{"error": "the body has more than 65536 bytes; send a smaller one"}\n')


def test_compressed_body_is_limited_as_it_is_sent(address, ask):
    status, _, _ = ask(address, "POST", "/", iter([bytes(MOST)] * 3), {"Content-Encoding": "gzip"})
    assert status == 400  # not gzip
    empty = gzip.compress(b"")
    status, _, _ = ask(address, "POST", "/", iter([empty] + [bytes(MOST)] * 3), {"Content-Encoding": "gzip"})
    assert status == 413


def expecting(address, expectation, length, path="/"):
    """What comes first for a request that expects something."""
    with socket.create_connection(address, timeout=30) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nExpect: {expectation}\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode())
        return connection.recv(1 << 16)


def test_client_that_waits_for_100_gets_a_refusal_instead_of_it(address):
    assert expecting(address, "100-continue", 100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert expecting(address, "100-Continue", 100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    for given, status in (
        (("100-continue", MOST + 1), 413),
        (("100-continue", 10, "/no/such/path"), 404),
        (("200-ok", 10), 417),
    ):
        reply = expecting(address, *given)
        assert int(reply.split()[1]) == status
        assert b"Connection: close" in reply


@pytest.mark.parametrize(
    ("coding", "packed", "status"),
    [
        ("base64", base64.b64encode(PLAIN), 200),
        ("Base64", base64.encodebytes(PLAIN), 200),
        ("binary", PLAIN, 200),
        ("uuencode", PLAIN, 400),
    ],
)
def test_file_of_a_form_is_decoded(serve_routes, ask, coding, packed, status):
    """Clients made for mail, and curl with ``;encoder=base64``, encode the parts of a form."""
    bodies = BodyReader(MOST, 30.0)

    async def echo(request):
        with await bodies.read(request, form=True) as body:
            body.seek(0)
            return web.Response(body=body.read())

    headers = f'Content-Disposition: form-data; name="f"; filename="f"\r\nContent-Transfer-Encoding: {coding}'
    form = b"--x\r\n" + headers.encode() + b"\r\n\r\n" + packed + b"\r\n--x--\r\n"
    address = serve_routes([("POST", "/", echo)])
    found, _, reply = ask(address, "POST", "/", form, {"Content-Type": "multipart/form-data; boundary=x"})
    assert found == status
    assert reply == PLAIN if status == 200 else b"the form cannot be read" in reply


@pytest.mark.parametrize("is_missing", [True, False])
def test_body_without_room_on_the_disk_is_named(serve_routes, ask, small_disk, monkeypatch, caplog, is_missing):
    """A container with a read-only root answered "the server failed to answer" to every photo of half a megabyte."""
    bodies = BodyReader(8 << 20, 30.0)

    async def size(request):
        with await bodies.read(request) as body:
            return web.Response(text=str(body.seek(0, 2)))

    address, folder = serve_routes([("POST", "/", size)]), small_disk(1)
    monkeypatch.setattr("tempfile.tempdir", str(folder / "none" if is_missing else folder))
    status, headers, reply = ask(address, "POST", "/", bytes(3 << 20))
    assert (status, headers["Retry-After"]) == (503, "1")
    assert b"the server has no room to store the body" in reply
    assert "cannot store the body of a request" in caplog.text
    assert ask(address, "POST", "/", bytes(1 << 10))[0] == 200
    monkeypatch.setattr("tempfile.tempdir", str(folder.parent))
    assert ask(address, "POST", "/", bytes(3 << 20))[2] == b"3145728"
