"""Image files below a folder or inside a tar, by name, with a reader for each.

Nothing is extracted to disk: a plain tar is read by offset; a compressed tar is unpacked into memory and has to fit.
Hidden files and files without the extension of an image are ignored, and in a tar also links, devices, and names that
lead out of it. Links in a folder are followed once.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from ls_edge.core.errors import DataError

EXTENSIONS = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"))

ImageTree = dict[str, Callable[[], bytes]]
"""Readers of encoded images by path below the top, with forward slashes; they may be called from any thread."""

_COMPRESSIONS: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\x00": lzma.decompress,
}
_TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")


def read_folder(top: Path) -> ImageTree:
    """List the images below a folder; raise :class:`DataError` if a folder cannot be read."""

    def stop(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; check its permissions") from None

    tree: ImageTree = {}
    visited: set[str] = set()
    for folder, names, files in os.walk(top, onerror=stop, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:  # a link to a folder above
            names.clear()
            continue
        visited.add(real)
        names[:] = sorted(name for name in names if not is_hidden(name))
        below = PurePosixPath(Path(folder).relative_to(top).as_posix())
        for file in files:
            if _is_image(file):
                tree[str(below / file)] = functools.partial(read_image, os.path.join(folder, file))
    return tree


def read_tar(path: Path) -> ImageTree:
    """List the images of a plain or compressed tar; raise :class:`DataError` if it is damaged or truncated."""
    try:
        with path.open("rb") as stream:
            start = stream.read(6)
            decompress = next((call for magic, call in _COMPRESSIONS.items() if start.startswith(magic)), None)
            stream.seek(0)
            if decompress is None:
                return {name: functools.partial(read_image, str(path), *place) for name, *place in _images_of(stream)}
            content = decompress(stream.read())
        members = _images_of(io.BytesIO(content))
        return {name: functools.partial(_cut, content, *place) for name, *place in members}
    except (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is neither a folder nor a whole tar ({error}); check it or copy it again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check it or copy it again") from None


def unwrap(tree: ImageTree) -> ImageTree:
    """Remove top-level folders that wrap all class folders of a tar."""
    while len({name.split("/", 1)[0] for name in tree}) == 1 and all(name.count("/") >= 2 for name in tree):
        tree = {name.split("/", 1)[1]: read for name, read in tree.items()}
    return tree


def tar_stem(name: str) -> str | None:
    """Return ``train`` for ``train.tar.xz``; None if the name is not that of a tar."""
    for ending in _TAR_ENDINGS:
        if name.lower().endswith(ending):
            return name[: -len(ending)]
    return None


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is ignored."""
    return name.startswith(".") or name == "__MACOSX"


def _is_image(name: str) -> bool:
    return not is_hidden(name) and os.path.splitext(name)[1].lower() in EXTENSIONS


def read_image(path: str | Path, offset: int = 0, size: int = -1) -> bytes:
    """Return a file or a part of it; raise :class:`DataError` if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(size)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; was it moved or removed?") from None


def _cut(content: bytes, offset: int, size: int) -> bytes:
    return content[offset : offset + size]


def _images_of(stream: IO[bytes]) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset, and size of the images of a plain tar; raise TarError if it ends too early."""
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            pure = PurePosixPath(member.name)
            if not member.isreg() or member.issparse() or pure.is_absolute() or ".." in pure.parts:
                continue
            if not any(is_hidden(piece) for piece in pure.parts) and _is_image(pure.name):
                yield str(pure), member.offset_data, member.size
        # tarfile mistakes a broken header for the end; a real end is a block of zeros or, with some writers, nothing
        stream.seek(archive.offset)
        if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"broken or cut off at byte {archive.offset}")
