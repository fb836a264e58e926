"""Cameras of the tests' own: JPEGs over HTTP, and over RTSP (RFC 2326) as RTP (RFC 2435)."""

import contextlib
import io
import itertools
import re
import socketserver
import struct
import threading
import time

from PIL import Image

SIDES = (640, 480)


def jpeg(shade):
    """Return a picture with this much blue."""
    encoded = io.BytesIO()
    Image.new("RGB", SIDES, (0, 0, shade)).save(encoded, "JPEG", quality=95, subsampling="4:2:0")
    return encoded.getvalue()


class Camera:
    """A server that sends ``count`` frames, one every ``pause`` seconds; then it ends, or sends nothing more."""

    scheme = "http"

    def __init__(self, count, pause=0.01, *, stalls=False):
        self.count, self.pause, self.stalls = count, pause, stalls
        self.sent = 0
        self.asked = threading.Event()
        self.stopped = threading.Event()
        camera = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                camera.asked.set()
                with contextlib.suppress(OSError, ValueError):  # the reader left
                    camera.serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self.server = Server(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()
        self.address = f"127.0.0.1:{self.server.server_address[1]}/video"
        self.url = f"{self.scheme}://{self.address}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.stopped.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def shades(self):
        """Yield the shade of each frame at its time; wait at the end for a camera that stalls."""
        while self.sent < self.count and not self.stopped.wait(self.pause):
            yield self.sent
            self.sent += 1
        if self.stalls:
            self.stopped.wait(120)

    def serve(self, connection):
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=frame\r\n\r\n")
        for shade in self.shades():
            body = jpeg(shade)
            head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(head + body + b"\r\n")


class File(Camera):
    """A server that answers with a file."""

    def __init__(self, kind, content, status="200 OK"):
        self._head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        self._content = content
        super().__init__(0)

    def serve(self, connection):
        connection.recv(65536)
        connection.sendall(self._head + self._content)


class Rtsp(Camera):
    """An RTSP camera; ``media`` is that of its session description."""

    scheme = "rtsp"

    def __init__(self, count, pause=0.04, *, stalls=False, media="video 0 RTP/AVP 26"):
        self.media = media
        super().__init__(count, pause, stalls=stalls)

    def serve(self, connection):
        stream = connection.makefile("rb")
        while request := stream.readline().decode():
            headers = dict(
                re.findall(r"^([\w-]+): *(.*)\r$", "".join(iter(lambda: stream.readline().decode(), "\r\n")), re.M)
            )
            method = request.split()[0]
            answers = {
                "OPTIONS": "Public: DESCRIBE, SETUP, PLAY\r\n\r\n",
                "SETUP": "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 1\r\n\r\n",
                "PLAY": "Session: 1\r\n\r\n",
            }
            sdp = f"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nt=0 0\r\nm={self.media}\r\na=control:0\r\n"
            described = f"Content-Type: application/sdp\r\nContent-Length: {len(sdp)}\r\n\r\n{sdp}"
            head = f"RTSP/1.0 200 OK\r\nCSeq: {headers['CSeq']}\r\n"
            connection.sendall((head + answers.get(method, described)).encode())
            if method == "PLAY":
                (self.play if "video" in self.media else self.talk)(connection)
                return

    def talk(self, connection):
        for number in itertools.takewhile(lambda _: not self.stopped.wait(0.02), itertools.count()):
            rtp = struct.pack(">BBHII", 0x80, 0, number & 0xFFFF, number * 160, 7) + bytes(160)
            connection.sendall(struct.pack(">cBH", b"$", 0, len(rtp)) + rtp)

    def play(self, connection):
        number = itertools.count()
        for shade in self.shades():
            body, stamp = jpeg(shade), int(time.monotonic() * 90_000) & 0xFFFFFFFF
            tables = b"".join(body[m.end() + 3 : m.end() + 67] for m in re.finditer(rb"\xff\xdb", body))
            start = body.index(b"\xff\xda") + 2
            scan = body[start + int.from_bytes(body[start : start + 2], "big") : -2]
            for at in range(0, len(scan), 1200):
                piece = scan[at : at + 1200]
                kind = 26 | 0x80 * (at + 1200 >= len(scan))
                rtp = struct.pack(">BBHII", 0x80, kind, next(number) & 0xFFFF, stamp, 7)
                rtp += struct.pack(">IBBBB", at, 1, 255, SIDES[0] // 8, SIDES[1] // 8)
                rtp += struct.pack(">BBH", 0, 0, len(tables)) + tables if at == 0 else b""
                connection.sendall(struct.pack(">cBH", b"$", 0, len(rtp + piece)) + rtp + piece)
