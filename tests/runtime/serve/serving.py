"""``ls-edge serve`` as a process, for tests, and what it should answer."""

import http.client
import io
import json
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from ls_edge.core.bundle import Bundle
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.pipeline import Pipeline

PLACEMENT = {"a": [0, 1, 2], "b": [1, 2, 3], "c": [0, 3]}
"""Of a bundle of four blocks, each of which has two holders."""
TOKENS = ["first-token-of-sixteen", "second-token-of-sixteen"]
OCTETS = {"Content-Type": "application/octet-stream"}


def picture(seed=0, kind="PNG", size=(40, 30)):
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def turned(orientation, kind="JPEG"):
    """A picture whose EXIF says how to turn it."""
    stream, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.open(io.BytesIO(picture())).save(stream, kind, exif=exif)
    return stream.getvalue()


class Server:
    """``ls-edge serve`` as a process, on a free port."""

    def __init__(self, ls_edge, peers, bundle, *arguments):
        has_bundle = () if bundle is None else ("--bundle", bundle)
        address = () if "--http" in arguments else ("--http", "127.0.0.1:0")
        self.process = ls_edge.start("serve", "--peers", peers, *has_bundle, *address, *arguments)
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"serving.*http://([\d.]+):(\d+)", line):
                break
        else:
            pytest.fail("".join(self.log))
        self.address = found[1], int(found[2])

    def ask(self, method, path, body=None, headers=OCTETS, timeout=30):
        """Status, headers and body of one request on a connection of its own."""
        connection = http.client.HTTPConnection(*self.address, timeout=timeout)
        try:
            connection.request(method, path, body, headers if body is not None else {})
            reply = connection.getresponse()
            return reply.status, reply.headers, reply.read()
        finally:
            connection.close()

    def get(self, path):
        status, _, body = self.ask("GET", path)
        return status, json.loads(body)

    def predict(self, image, query="", **options):
        """Status and document; every answer is JSON of one line, and none may be used by a page of another site."""
        status, headers, body = self.ask("POST", f"/predict{query}", image, **options)
        assert headers["Content-Type"] == "application/json"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert not [name for name in headers if name.lower().startswith("access-control")]
        document = json.loads(body)
        if status != 200:
            assert set(document) == {"error"}
            assert "\n" not in document["error"]
            assert "Traceback" not in document["error"]
            assert (headers["Retry-After"] is not None) == (status == 503)
        return status, document

    def raw(self, data):
        """What comes first for bytes."""
        with socket.create_connection(self.address, timeout=30) as connection:
            connection.sendall(data)
            return connection.recv(1 << 16)

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(20)


def expected(bundle, image):
    """Logits of an image in one process."""
    opened = Bundle.open(bundle)
    with Pipeline.open(opened, threads=1) as chain:
        return chain.forward(Preprocessor(opened.manifest.image)(image)[np.newaxis])[0]


def samples(server):
    text = server.ask("GET", "/metrics")[2].decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def status_of(server, method, path, headers, body=None):
    status, reply, _ = server.ask(method, path, b"" if body is None else body, headers)
    return status, reply


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def together(*calls):
    """Results of calls that run at the same time, in their order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
