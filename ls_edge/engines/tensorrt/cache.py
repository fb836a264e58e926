"""Cache of built engines on disk, keyed by everything that an engine depends on; only loads files of this user.

A TensorRT engine is code for one GPU and one version of TensorRT. It is never part of a bundle: each device builds its
own engines and keeps them in ``$LS_EDGE_CACHE/engines`` (default ``~/.cache/ls-edge/engines``), a folder of mode 0700.
Loading an engine executes it. Therefore the folder and its files must belong to this user and must not be writable by
others, links are not followed, and a file must have the digest that was recorded when it was written.

An entry consists of ``KEY.engine`` and ``KEY.json`` (key and digest) and is complete once the latter exists. A lock on
the folder lets one process at a time build: a second process waits and then finds the engine, and the file ``timing``
(TensorRT's kernel measurements, shared by the identical blocks of a model) has a single writer. Entries are never
deleted here; old ones can be removed at any time.

The cache needs neither TensorRT nor a GPU; the caller provides the build (``ls_edge.engines.tensorrt.build``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ls_edge.core.bundle import digest_of
from ls_edge.core.errors import EngineError
from ls_edge.core.files import FolderInUse, cache_folder, folder_lock, remove_left_parts, write_file

OnStatus = Callable[[str], None]
"""Callback that receives the status of a build or a wait."""


class TensorRTDevice(msgspec.Struct, frozen=True):
    """TensorRT and the GPU that engines are built for."""

    tensorrt: str
    gpu: str
    capability: str
    multiprocessors: int
    """Streaming multiprocessors; the power modes of a Jetson switch some off."""
    board: str = ""
    """Name of the board, empty on a PC: Orin Nano and NX have the same GPU, but other clocks."""

    def __str__(self) -> str:
        return f"TensorRT {self.tensorrt} on {self.gpu}"


class EngineKey(TensorRTDevice, frozen=True, kw_only=True):
    """Everything that an engine depends on."""

    onnx_sha256: str
    profiles: tuple[tuple[int, int, int], ...]
    """Minimum, optimal, and maximum batch of each profile."""
    workspace: int
    """Bytes that kernels may use."""
    system: str = f"{platform.system()} {platform.machine()}"

    def digest(self) -> str:
        """Return the SHA-256 that names the files of an entry."""
        return digest_of(msgspec.to_builtins(self))


class _Entry(msgspec.Struct, frozen=True):
    key: EngineKey
    sha256: str


def default_folder() -> Path:
    """Return the folder of this user's engines."""
    return cache_folder() / "engines"


class EngineCache:
    """Folder of built engines."""

    def __init__(self, folder: Path | None = None) -> None:
        """Create the folder if needed; raise :class:`EngineError` if that fails or if other users can write to it."""
        self.folder = folder if folder is not None else default_folder()
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            found = self.folder.lstat()
        except OSError as error:
            raise EngineError(
                f"cannot use {self.folder} for built engines: {error.strerror}; set LS_EDGE_CACHE to a folder of yours"
            ) from None
        if not stat.S_ISDIR(found.st_mode):
            raise EngineError(f"{self.folder} is a link or not a folder; set LS_EDGE_CACHE to a folder of yours")
        _check_owner(found, self.folder)

    def get(
        self,
        key: EngineKey,
        build: Callable[[bytes], tuple[bytes, bytes]],
        on_status: OnStatus = lambda _: None,
        *,
        must_keep: bool = True,
    ) -> bytes:
        """Return the engine for ``key``; build it under the lock if it is missing.

        ``build`` takes the timing cache (initially empty) and returns the engine and the new timing cache;
        ``on_status`` is told of the build. Raise :class:`EngineError` if files belong to another user, or
        if they cannot be written and ``must_keep`` is set. Without ``must_keep``, an engine that cannot be written is
        used by this process only, and ``on_status`` receives the error.
        """
        engine = self._find(key)
        if engine is not None:
            return engine
        with self._locked(on_status):
            engine = self._find(key)
            if engine is not None:
                return engine
            on_status(f"building an engine for {key}")
            timing = self._read(self._timing(key)) or b""
            engine, timing = build(timing)
            try:
                self._write(self._path(key, "engine"), engine)
                self._write(self._path(key, "json"), _note(key, engine))
                if timing:
                    self._write(self._timing(key), timing)
            except EngineError as error:
                if must_keep:
                    raise
                on_status(f"{error}; until then each start builds this engine again")
        return engine

    def forget(self, key: EngineKey) -> None:
        """Remove an entry that did not load, if the folder can be written."""
        with contextlib.suppress(OSError):
            self._path(key, "json").unlink(missing_ok=True)

    def checked(self, key: EngineKey, engine: bytes, device: TensorRTDevice) -> bytes | None:
        """Return the kernels that :meth:`note_checked` kept for an engine on a device; None if it was not called."""
        note, mark = self._read(self._path(key, "checked")) or b"", _mark(engine, device)
        return note.removeprefix(mark) if note.startswith(mark) else None

    def note_checked(self, key: EngineKey, engine: bytes, device: TensorRTDevice, kernels: bytes = b"") -> None:
        """Remember that an engine computes what its bundle says, and its kernels, if the folder can be written."""
        with contextlib.suppress(EngineError):
            self._write(self._path(key, "checked"), _mark(engine, device) + kernels)

    def _find(self, key: EngineKey) -> bytes | None:
        """Return the engine, or None if it is missing or damaged."""
        noted, engine = self._read(self._path(key, "json")), self._read(self._path(key, "engine"))
        return engine if engine is not None and noted == _note(key, engine) else None

    def _path(self, key: EngineKey, ending: str) -> Path:
        return self.folder / f"{key.digest()}.{ending}"

    def _timing(self, key: EngineKey) -> Path:
        device = digest_of([key.tensorrt, key.gpu, key.board, key.capability, key.multiprocessors, key.system])
        return self.folder / f"{device[:32]}.timing"

    def _read(self, path: Path) -> bytes | None:
        """Read a file of this user; return None if it is missing."""
        try:
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as stream:
                found = os.fstat(stream.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise EngineError(f"{path} is not a regular file; remove it, and it will be built again")
                _check_owner(found, path)
                return stream.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EngineError(f"cannot read {path}: {error.strerror}; remove it, and it will be built again") from None

    def _write(self, path: Path, raw: bytes) -> None:
        try:
            write_file(path, raw)
        except OSError as error:
            raise EngineError(
                f"cannot write {path}: {error.strerror}; make room, or set LS_EDGE_CACHE to another folder"
            ) from None

    @contextlib.contextmanager
    def _locked(self, on_status: OnStatus) -> Iterator[None]:
        """Let one process at a time build engines."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(folder_lock(self.folder))
            except FolderInUse:
                on_status("waiting for another process that builds engines")
                stack.enter_context(folder_lock(self.folder, wait=True))
            remove_left_parts(self.folder)
            yield


def _note(key: EngineKey, engine: bytes) -> bytes:
    """Return the JSON that marks an engine as complete."""
    return msgspec.json.encode(_Entry(key, hashlib.sha256(engine).hexdigest()))


def _mark(engine: bytes, device: TensorRTDevice) -> bytes:
    """Return the digest that marks an engine as checked on a device, which the key of RTX does not have."""
    return hashlib.sha256(engine + msgspec.json.encode(device)).digest()


def _check_owner(found: os.stat_result, path: Path) -> None:
    if found.st_uid != os.geteuid():
        raise EngineError(
            f"{path} belongs to user {found.st_uid}, this is user {os.geteuid()}; built engines are executed, so only "
            "your own are loaded: set LS_EDGE_CACHE to a folder of yours"
        )
    if found.st_mode & 0o022:
        raise EngineError(
            f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}); built engines are executed, "
            "so remove it, or run chmod go-w if you trust its content"
        )
