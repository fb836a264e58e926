"""A proxy in front of a server, which holds back or replaces responses when a test says so."""

import contextlib
import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Front:
    """Passes requests on; a context manager, whose ``address`` clients use."""

    def __init__(self, address):
        self._held, self._replaced = {}, {}
        self.seen = []
        """Paths that were asked for, in their order."""
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self):
                path = self.path.partition("?")[0]
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                front.seen.append(path)
                held = front._held.get((path, front.seen.count(path)))
                if path in front._replaced:
                    status, kind, text = front._replaced[path]
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)
                    return
                connection = http.client.HTTPConnection(*address, timeout=60)
                with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                    headers = {key: value for key, value in self.headers.items() if key != "Connection"}
                    connection.request(self.command, self.path, body, headers)
                    reply = connection.getresponse()
                    if held is not None:
                        held.wait(60)
                    self.send_response(reply.status)
                    for key, value in reply.headers.items():
                        if key not in ("Transfer-Encoding", "Connection"):
                            self.send_header(key, value)
                    self.send_header("Connection", "close")
                    self.end_headers()
                    while part := reply.read1(1 << 16):
                        self.wfile.write(part)
                        self.wfile.flush()
                self.close_connection = True

            do_GET = do_POST = _pass_on  # noqa: N815 - as http.server names them

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = self._server.server_address
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.05])

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        for event in self._held.values():
            event.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def hold(self, path, number=1):
        """Hold back a response, of those to a path; return the event that lets it pass."""
        return self._held.setdefault((path, number), threading.Event())

    def replace(self, path, status, kind, text):
        """Answer a path in the place of the server."""
        self._replaced[path] = status, kind, text

    def restore(self, path):
        """Pass a path on again."""
        del self._replaced[path]
