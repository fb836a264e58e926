"""nginx and Caddy as processes, for tests."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time

import pytest


@contextlib.contextmanager
def nginx(folder, port, http):
    """Run nginx with these directives of ``http``; yield its address on this port."""
    paths = " ".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off; user {getpass.getuser()}; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; {paths} {http} }}\n"
    )
    with _run(["nginx", "-p", folder, "-c", file], folder, port) as address:
        yield address


@contextlib.contextmanager
def caddy(folder, port, site):
    """Run Caddy with this site; yield its address on this port."""
    file = folder / "Caddyfile"
    file.write_text(f"{{\nadmin off\nauto_https disable_redirects\nskip_install_trust\n}}\n{site}")
    with _run(["caddy", "run", "--adapter", "caddyfile", "--config", file], folder, port) as address:
        yield address


@contextlib.contextmanager
def _run(words, folder, port):
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed (apt-get install {words[0]})")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, "HOME": str(folder)})
    try:
        end = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                yield "127.0.0.1", port
                return
            time.sleep(0.02)
        pytest.fail((folder / "log").read_text())
    finally:
        process.terminate()
        process.wait()
