"""Atomic replacement of files, locks on folders, and folders of runs and bundles on the Hugging Face Hub.

A folder on the Hub is named ``hf-hub:OWNER/NAME`` or ``hf-hub:OWNER/NAME@REVISION``. It is stored in
``$LS_EDGE_CACHE/hub`` (default ``~/.cache/ls-edge/hub``), in one folder per commit, which is complete once it has its
final name. Only files of runs and bundles are downloaded.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import io
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from ls_edge.core.errors import LsEdgeError, RunError, UsageError, lacking

MAX_BYTES = 4_000_000
"""Maximum size of a document that is parsed."""
HUB_PREFIX = "hf-hub:"
HUB_FILES = ("README.md", "config.yaml", "config.json", "eval.json", "manifest.json", "*.safetensors", "*.onnx")
"""Files of runs and bundles; ``*`` also matches folders."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FolderInUse(UsageError):
    """Another process holds the lock of a folder."""


def _part_of(path: Path) -> Path:
    """Return the temporary path of a file while it is written."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces ``path`` when the context ends without an error.

    After an error, a kill, or a power cut, ``path`` contains either the old or the new content, never a part of it.
    """
    part = _part_of(path)
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o644)) as stream:
            yield stream
            stream.flush()
            sync(part)  # by name, since a library may have replaced it
        part.replace(path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def remove_left_parts(folder: Path) -> None:
    """Remove what writers left behind in a kill or power cut; call this under the lock of the folder."""
    for part in (*folder.glob(".*.part"), *folder.glob(".tmp??????")):  # the latter are those of safetensors
        with contextlib.suppress(OSError):
            part.unlink()


def write_file(path: Path, content: bytes) -> None:
    """Replace ``path`` atomically by a file with this content."""
    with replacing(path) as stream:
        stream.write(content)


def read_file(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a file; raise :class:`OSError` if it is larger than ``limit`` bytes."""
    with path.open("rb") as stream:
        raw = stream.read(limit + 1)
    if len(raw) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes")
    return raw


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def folder_lock(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a folder; if another process holds it, ``wait`` or raise :class:`FolderInUse`.

    The lock is ``flock`` on the folder itself, so it ends with the process and does not leave a file. On a file system
    without such locks, the folder is not locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise FolderInUse(f"another process uses {folder}; wait until it ends, or choose another folder") from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def check_writable(path: str | Path) -> None:
    """Raise the error that :func:`open_output` would raise for ``path``; call this before the work begins."""
    path = Path(path)
    with _explained(path):
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a folder; name a file")
        if path.is_char_device():
            with path.open("wb", buffering=0) as device:
                device.write(b"")  # fails for /dev/full
            return
        if path.is_fifo():  # opening a FIFO would wait for a reader
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        above = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
        if above.is_dir() and len(os.fsencode(_part_of(path).name)) > os.pathconf(above, "PC_NAME_MAX"):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    _try_to_write(path, above)


def check_folder(path: str | Path) -> None:
    """Raise an error if files cannot be written to the folder ``path``; call this before the work begins."""
    path = Path(path)
    with _explained(path):
        above = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
    _try_to_write(path, above)


def check_standard_output() -> None:
    """Raise :class:`LsEdgeError` if standard output is on a full disk; call this before the work begins."""
    try:
        descriptor = sys.stdout.fileno()
        os.write(descriptor, b"")  # fails for /dev/full
        is_full = stat.S_ISREG(os.fstat(descriptor).st_mode) and not os.fstatvfs(descriptor).f_bavail
    except (OSError, ValueError, AttributeError) as error:  # closed, or none
        is_full = isinstance(error, OSError) and error.errno in _NO_ROOM
    if is_full:
        raise LsEdgeError("cannot write to standard output: no space left on device; redirect it to another disk")


def _try_to_write(path: Path, folder: Path) -> None:
    """Write an unnamed file to a folder, since permissions do not reveal full disks and special file systems."""
    with _explained(path):
        if not folder.is_dir() or re.match("https?:/", str(path)):
            what = "a URL" if folder.is_dir() else folder
            raise UsageError(f"cannot write {path}: {what} is not a folder; give another path")
    with _explained(path), tempfile.TemporaryFile(dir=folder) as trial:
        trial.write(bytes(4096))
        trial.flush()
        os.fsync(trial.fileno())


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Convert an OSError to :class:`UsageError`, or to :class:`LsEdgeError` if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise LsEdgeError(f"cannot write {path}: {error.strerror}; free some space, or give another path") from None
        raise UsageError(f"cannot write {path}: {error.strerror}; give another path") from None


def write_output(path: str | Path, text: str) -> None:
    """Write a text file atomically to a path that a user named; see :func:`open_output` for errors."""
    with open_output(path) as stream:
        stream.write(text)


@contextlib.contextmanager
def open_output(path: str | Path) -> Iterator[IO[str]]:
    """Open a text file that a user named; a regular file is replaced when the context ends without an error.

    Raise :class:`UsageError` if the path cannot be written, and :class:`LsEdgeError` if the disk is full.
    """
    path = Path(path)
    if not path.name:
        raise UsageError(f"cannot write {str(path)!r}: it is not the name of a file; give another path")
    with _explained(path):
        if path.exists() and not path.is_file():  # replacing would remove /dev/stdout or a pipe
            with path.open("w", encoding="utf-8") as stream:
                yield stream
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as binary:
            stream = io.TextIOWrapper(binary, encoding="utf-8")
            yield stream
            stream.detach()  # flushes the buffer, but keeps the file open for syncing


def cache_folder() -> Path:
    """Return the user's folder for files that can be downloaded or built again."""
    if base := os.environ.get("LS_EDGE_CACHE"):
        return Path(base)
    try:
        return Path.home() / ".cache" / "ls-edge"
    except RuntimeError:
        raise UsageError("this user has no home folder for caches; set HOME, or LS_EDGE_CACHE=FOLDER") from None


def is_hub(name: str | Path) -> bool:
    """Return whether ``name`` is a name on the Hub, not a path."""
    return str(name).startswith(HUB_PREFIX)


def hub_repository(name: str | Path) -> tuple[str, str]:
    """Split a name on the Hub into ``OWNER/NAME`` and the revision, which may be empty; raise :class:`UsageError`."""
    found = re.fullmatch(rf"{HUB_PREFIX}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", str(name))
    if found is None:
        raise UsageError(
            f"{name} is not a name on the Hub; write {HUB_PREFIX}OWNER/NAME, or {HUB_PREFIX}OWNER/NAME@REVISION"
        )
    return found[1], found[2] or ""


def pin_to_commit(name: str | Path) -> str:
    """Return a name on the Hub with the commit that its revision currently refers to."""
    owner_name, revision = hub_repository(name)
    if not re.fullmatch("[0-9a-f]{40}", revision):
        revision = ask_hub(name, lambda: hub_library().HfApi().model_info(owner_name, revision=revision or None).sha)
    return f"{HUB_PREFIX}{owner_name}@{revision}"


def local_folder(name: str | Path) -> Path:
    """Return the local folder of a name on the Hub, downloading it if needed; return any other path unchanged."""
    if not is_hub(name):
        return Path(name)
    pinned = pin_to_commit(name)
    owner_name, commit = hub_repository(pinned)
    top = cache_folder() / "hub" / owner_name.replace("/", "--")
    top.mkdir(parents=True, exist_ok=True)
    with folder_lock(top, wait=True):
        for left in top.glob(".*"):  # of an interrupted download
            shutil.rmtree(left, ignore_errors=True)
        if not (top / commit).is_dir():
            folder = top / f".{commit}"
            ask_hub(
                pinned,
                lambda: hub_library().snapshot_download(
                    owner_name, revision=commit, local_dir=folder, allow_patterns=list(HUB_FILES)
                ),
            )
            shutil.rmtree(folder / ".cache", ignore_errors=True)
            folder.rename(top / commit)
    return top / commit


def ask_hub(name: str | Path, request: Any) -> Any:
    """Return the result of a request to the Hub; raise :class:`RunError` if it fails."""
    try:
        return request()
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - the library and its HTTP client raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise RunError(
            f"cannot reach {name} on the Hub: {reason}; check the name, the network, and HF_TOKEN for private ones"
        ) from None


def hub_library() -> Any:
    """Import ``huggingface_hub``; raise :class:`UsageError` if that fails."""
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        need = f"a name such as {HUB_PREFIX}OWNER/NAME needs {lacking(error, 'huggingface_hub')} (extra hub)"
        raise UsageError(f"{need}; to install: pip install huggingface_hub") from None
