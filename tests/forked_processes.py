"""Processes of ``python -m ls_edge`` that are forked from one in which the libraries are already imported.

A run of the tests starts about a thousand of them, and imports take half of their time. Everything else is as with a
new interpreter: a process with its own arguments, environment, folder and streams runs the module from its first line
and ends as Python ends. ``install`` makes ``subprocess.Popen`` start such commands this way. Other commands start as
usual, and so do those in an environment that imports may depend on, and everything where Linux's calls are missing.
"""

import contextlib
import gc
import importlib
import inspect
import json
import os
import random
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

IMPORTED = (
    "numpy",
    "onnxruntime",
    "ls_edge.cli.main",
    "ls_edge.runtime.peer.peer",
    "ls_edge.runtime.source.run_dataset",
    "rich.progress",
)
MODULES = ("ls_edge", "tests.faults.peer")
_READ_EARLY = ("PYTHON", "OMP_", "OPENBLAS_", "MKL_", "ORT_", "LD_", "LC_", "LANG", "PATH", "TMP")
"""Beginnings of the names of variables that an interpreter or an import may read."""
_ROOT = str(Path(__file__).parents[1])
_MAX_REQUEST = 1 << 17
_STREAMS = ("p2cread", "c2pwrite", "errwrite")
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_Popen = subprocess.Popen


def install():
    """Start the process to fork from; return a function that ends it."""
    if not hasattr(os, "pidfd_open"):
        return lambda: None
    path = os.path.join(tempfile.mkdtemp(prefix="forked-"), "socket")
    words = [sys.executable, "-m", "tests.forked_processes", path]
    parent = _Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT)
    if parent.stdout.readline() == b"ready\n":
        _Forked.path, _Forked.variables = path, _read_early(os.environ)
        subprocess.Popen = _Forked

    def end():
        subprocess.Popen = _Popen
        parent.communicate()

    return end


def _read_early(variables):
    """The variables that imports may read."""
    return {key: value for key, value in variables.items() if key.startswith(_READ_EARLY)}


class _Forked(_Popen):
    path, variables = "", {}
    _status = None
    """A socket from which the exit status comes; None for a child of this process."""

    def _execute_child(self, *given):
        names = list(inspect.signature(_Popen._execute_child).parameters)[1:]
        asked = dict(zip(names, given, strict=True))
        words = list(map(os.fspath, asked["args"])) if isinstance(asked["args"], list) else []
        of_tests = words[:2] == ["env", f"PYTHONPATH={_ROOT}"]
        words = words[2 * of_tests :]
        variables = os.environ if asked["env"] is None else asked["env"]
        prepare = getattr(asked["preexec_fn"], "__name__", "")
        if (
            words[:2] != [sys.executable, "-m"]
            or words[2] not in MODULES
            or prepare not in ("", "hear_ctrl_c")
            or any(asked[name] for name in ("pass_fds", "executable", "shell", "start_new_session"))
            or _read_early(variables) != self.variables
        ):
            super()._execute_child(*given)
            return
        streams = [asked[name] if asked[name] != -1 else own for own, name in enumerate(_STREAMS)]
        folder = os.fspath(asked["cwd"]) if asked["cwd"] is not None else os.getcwd()
        request = [words[2:], dict(variables), folder, of_tests, bool(prepare)]
        self._status = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status.connect(self.path)
        socket.send_fds(self._status, [json.dumps(request).encode()], streams)
        self.pid = int(self._status.recv(32))
        self._child_created = True
        self._close_pipe_fds(*map(asked.get, _PIPES))

    def _try_wait(self, wait_flags):
        if self._status is None:
            return super()._try_wait(wait_flags)
        if not select.select([self._status], [], [], 0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        status = int(self._status.recv(32))
        self._status.close()
        return self.pid, status

    def _internal_poll(self, *more, **named):
        if self._status is None:
            return super()._internal_poll(*more, **named)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def _serve(path):
    """Fork for each request and report exit statuses; return the request in the child."""
    askers = {}
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        os.write(1, b"ready\n")
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    with askers.pop(key.data) as asker, contextlib.suppress(OSError):
                        asker.send(b"%d" % os.waitpid(key.data, 0)[1])
                elif key.fd == 0:
                    raise SystemExit
                else:
                    asker = listener.accept()[0]
                    content, streams, _, _ = socket.recv_fds(asker, _MAX_REQUEST, len(_STREAMS))
                    pid = os.fork()
                    if not pid:
                        for watched in list(selector.get_map().values()):
                            if watched.data is not None:
                                os.close(watched.fd)
                        for other in (asker, *askers.values()):
                            other.close()
                        for number, stream in enumerate(streams):
                            os.dup2(stream, number)
                            os.close(stream)
                        return json.loads(content)
                    for stream in streams:
                        os.close(stream)
                    askers[pid] = asker
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                    asker.send(b"%d" % pid)


def _become(words, variables, folder, of_tests, hears_ctrl_c):
    """Run a module in what this process has in common with a new interpreter."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    random.seed()
    if hears_ctrl_c:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, (name, mode, errors) in enumerate(
        (("stdin", "r", None), ("stdout", "w", None), ("stderr", "w", "backslashreplace"))
    ):
        stream = open(number, mode, errors=errors, closefd=False)  # noqa: SIM115  open until the process ends
        if name == "stderr":
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.path[:1] = [folder, _ROOT] if of_tests else [folder]
    sys.argv[1:] = words[1:]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for imported in IMPORTED:
        importlib.import_module(imported)
    gc.collect()
    gc.freeze()  # so that collections do not write into pages that all share
    _become(*_serve(sys.argv[1]))
