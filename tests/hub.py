"""A small Hugging Face Hub on this machine: repositories in memory, spoken to by the real client library."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Hub:
    """Serves what huggingface_hub asks for to create, fill, and read repositories of models."""

    def __init__(self):
        self.commits = {}
        """Files by repository, and by commit."""
        self.asked = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                hub.get(self, unquote(urlsplit(self.path).path))

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.post(self, unquote(urlsplit(self.path).path), body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def environment(self, cache):
        """Variables that send the clients here."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(cache / "hf"), "LS_EDGE_CACHE": str(cache / "ls-edge"),
            "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "no_proxy": "127.0.0.1",
        }  # fmt: skip

    def answer(self, handler, status, body=b"", **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        headers = {"Content-Length": str(len(content)), "Content-Type": "application/json", **headers}
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)

    def newest(self, repository):
        return list(self.commits[repository])[-1]

    def get(self, handler, path):
        self.asked.append((handler.command, path))
        parts = path.strip("/").split("/")
        repository = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if not self.commits.get(repository):
            self.answer(handler, 404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return
        revision = parts[5] if parts[0] == "api" and len(parts) > 5 else parts[3] if len(parts) > 3 else "main"
        commit = revision if revision in self.commits[repository] else self.newest(repository)
        files = self.commits[repository][commit]
        if parts[0] == "api" and "tree" in parts:
            rows = [{"type": "file", "path": name, "size": len(raw), "oid": commit} for name, raw in files.items()]
            self.answer(handler, 200, rows)
        elif parts[0] == "api":
            siblings = [{"rfilename": name} for name in files]
            self.answer(handler, 200, {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings,
                                       "private": False, "tags": [], "downloads": 0, "likes": 0})  # fmt: skip
        elif (name := "/".join(parts[4:])) in files:
            raw = files[name]
            etag = hashlib.sha1(raw).hexdigest()
            self.answer(handler, 200, raw, ETag=f'"{etag}"', X_Repo_Commit=commit, Accept_Ranges="bytes")
        else:
            self.answer(handler, 404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)

    def post(self, handler, path, body):
        self.asked.append((handler.command, path))
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.commits.setdefault(name, {"0" * 40: {}})
            self.answer(handler, 200, {"url": f"{self.url}/{name}", "name": name})
        elif "preupload" in parts:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self.answer(handler, 200, {"files": files})
        elif "commit" in parts:
            lines = [json.loads(line) for line in body.splitlines() if line.strip()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines if line["key"] == "file"
            }  # fmt: skip
            repository = "/".join(parts[2:4])
            before = self.commits[repository].get(self.newest(repository), {}) if self.commits[repository] else {}
            commit = hashlib.sha1(body).hexdigest()
            gone = {line["value"]["path"] for line in lines if line["key"] == "deletedFile"}
            self.commits[repository][commit] = {name: before[name] for name in before if name not in gone} | files
            url = f"{self.url}/{repository}/commit/{commit}"
            self.answer(handler, 200, {"success": True, "commitOid": commit, "commitUrl": url})
        else:
            self.answer(handler, 200, {"errors": [], "warnings": []})
