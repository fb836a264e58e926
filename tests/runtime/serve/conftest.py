"""Commands and bundles of the tests of commands, and servers in this process."""

import contextlib
import http.client
import shutil
import subprocess

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from ls_edge.runtime.serve.access import Access
from ls_edge.runtime.serve.listener import open_listener
from ls_edge.runtime.serve.middleware import Middleware, add_headers
from ls_edge.runtime.serve.server import HttpServer
from tests.cli.conftest import _make_bundle, bundle, command, ls_edge, ls_edge_of_module, process, slow, swarm  # noqa: F401
from tests.runtime.serve.serving import TOKENS


@pytest.fixture
def serve_routes():
    """Start a server in this process: ``serve_routes([web.get("/path", handler)])`` is its address."""
    with contextlib.ExitStack() as stack:

        def start(routes, most=1 << 20, tls=None):
            middleware = Middleware(Access(loopback_only=True), CollectorRegistry())
            application = web.Application(middlewares=[middleware.answer], client_max_size=most)
            application.on_response_prepare.append(add_headers)
            application.add_routes(routes)
            listener = open_listener("127.0.0.1:0", "--http")
            address = listener.getsockname()
            stack.enter_context(HttpServer(listener, application, tls=tls))
            return address

        yield start


@pytest.fixture
def ask():
    """Ask a server: ``ask(address, "GET", "/path")`` is status, headers and body."""

    def request(address, method, path, body=None, headers=()):
        with contextlib.closing(http.client.HTTPConnection(*address, timeout=30)) as connection:
            connection.request(method, path, body, dict(headers))
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read()

    return request


def _write_tokens(folder):
    path = folder / "tokens.txt"
    path.write_text("# of two clients\n" + "\n".join(TOKENS) + "\n\n")
    return path


@pytest.fixture
def tokens(tmp_path):
    return _write_tokens(tmp_path)


@pytest.fixture(scope="module")
def tokens_of_module(tmp_path_factory):
    return _write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def make_certificate():
    """Paths of a new certificate and its key, in a folder."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    return _make_certificate


@pytest.fixture(scope="module")
def certificate(make_certificate, tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


def _make_certificate(folder):
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout", key],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return cert, key
