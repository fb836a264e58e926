"""Image files in a folder or a tar, with a reader for each, and the files that are ignored.

Folders and tars are listed by the same code, so a folder and a tar of it contain the same images. Names are UTF-8,
whatever the locale. Nothing is extracted to disk: a plain tar is read by offset; a compressed tar is unpacked into
memory, where it must fit. Links within the folder or tar are followed; links that lead out of a tar, devices, and files
without the extension of an image are ignored.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ls_edge.core.errors import DataError, printable
from ls_edge.data.splits import split_of

EXTENSIONS = frozenset(
    (
        ".bmp", ".gif", ".jfi", ".jfif", ".jif", ".jpe", ".jpeg", ".jpg", ".mpo", ".pbm", ".pgm", ".png", ".pnm",
        ".ppm", ".tif", ".tiff", ".webp",
    )
)  # fmt: skip
_COMPRESSIONS: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7zXZ\x00": lzma.decompress,
}
_OTHER_ARCHIVES = {
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7z archive",
    b"Rar!": "rar archive",
    b"\x28\xb5\x2f\xfd": "file compressed by zstandard",
}
_IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF")
_TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")
_SYSTEM_FOLDERS = frozenset(
    ("__macosx", "@eadir", "#recycle", "@recycle", "$recycle.bin", "lost+found", "system volume information")
)
"""Folders of operating systems and network storage, in lower case."""
_ENDING = re.compile(r"\.(?=.*[a-z])\w{1,9}")
_MOST_LINKS = 40
"""Maximum number of links in a chain, as on Linux."""
BROKEN, OUTSIDE, IRREGULAR, EMPTY, HIDDEN, STRAY, UNLABELED = (
    "broken link", "link out of the archive", "not a regular file", "empty", "hidden", "not in a class folder",
    "no label",
)  # fmt: skip
"""Reasons why a file with the extension of an image is ignored."""


@dataclass(frozen=True)
class ImageFile:
    """Reader of an encoded file; any thread may call it."""

    source: str | bytes = field(repr=False)
    """Path of the file or tar, or the content of a tar."""
    size: int
    pieces: tuple[tuple[int, int, int], ...] | None = None
    """Position in the file, offset in ``source``, and length of each piece, with zeros between; None for all of it."""

    def __call__(self) -> bytes:
        """Return the content; raise :class:`DataError` if it cannot be read."""
        if self.pieces is None and isinstance(self.source, str):
            return read_image(self.source)
        content = bytearray(self.size)
        for position, offset, length in self.pieces or ((0, 0, self.size),):
            if isinstance(self.source, bytes):
                content[position : position + length] = self.source[offset : offset + length]
            else:
                content[position : position + length] = read_image(self.source, offset, length)
        return bytes(content)


@dataclass
class Listing:
    """Content of a folder or tar, by relative path with forward slashes."""

    images: dict[str, ImageFile] = field(default_factory=dict)
    archives: dict[str, ImageFile] = field(default_factory=dict)
    """Tars, by path without the extension; they are read as folders if there are no images (:func:`expand`)."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Reason, by path, for all files that are not images."""
    folders: set[str] = field(default_factory=set)

    def add(self, path: str, name: str, file: ImageFile | str, hidden: str) -> None:
        """Add a file, or the reason why it cannot be used; ``hidden`` is the reason to ignore its whole folder."""
        ending = _ending(name)
        stem = tar_stem(name) if isinstance(file, ImageFile) else None
        if hidden or is_hidden(name):
            if ending in EXTENSIONS:
                self.ignored[path] = hidden or HIDDEN
        elif stem is not None and isinstance(file, ImageFile):
            self.archives[path[: len(path) - len(name)] + stem] = file
        elif ending not in EXTENSIONS:
            self.ignored[path] = ending or (file if isinstance(file, str) else "no extension")
        elif isinstance(file, str) or not file.size:
            self.ignored[path] = file if isinstance(file, str) else EMPTY
        else:
            self.images[path] = file

    def reasons(self) -> Iterator[tuple[str, str]]:
        """Yield path and reason of each file that is not used."""
        yield from self.ignored.items()
        yield from ((path, ".tar") for path in self.archives)

    def below(self, prefix: str) -> Listing:
        """Return the content of a folder, or of a tar that is read as one; ``prefix`` ends in a slash."""
        cut = len(prefix)
        return Listing(
            {path[cut:]: file for path, file in self.images.items() if path.startswith(prefix)},
            {path[cut:]: file for path, file in self.archives.items() if f"{path}/".startswith(prefix)},
            {path[cut:]: reason for path, reason in self.ignored.items() if path.startswith(prefix)},
            {path[cut:] for path in self.folders if path.startswith(prefix)},
        )


def read_folder(top: Path) -> Listing:
    """List the content of a folder; raise :class:`DataError` if a folder cannot be read."""
    found = top.stat()
    return _walk(_DiskFolder(str(top), (found.st_dev, found.st_ino)))


def read_tar(path: Path) -> Listing:
    """List the content of a plain or compressed tar; raise :class:`DataError` if it is damaged or truncated."""
    try:
        if kind := _OTHER_ARCHIVES.get(read_image(path, 0, 4)):
            raise DataError(f"{path} is a {kind}, which cannot be read in place; extract it and give the folder")
        return _walk(_read_archive(ImageFile(str(path), path.stat().st_size)))
    except _DAMAGED as error:
        raise DataError(f"{path} is neither a folder nor a whole tar ({error}); check it or copy it again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check it or copy it again") from None


def unwrap(listing: Listing) -> tuple[Listing, str]:
    """Remove the top-level folders that wrap all class folders; return the listing and their path.

    Images next to such a folder are ignored. A single folder of images is a class, unless it also contains two or more
    folders of images.
    """
    wrapper = ""
    while True:
        inside = [path.split("/") for path in listing.images if "/" in path]
        tops = {parts[0] for parts in inside}
        below = {parts[1] for parts in inside if len(parts) > 2}
        has_splits = sum(bool(split_of(path)) for path in listing.folders if "/" not in path) > 1
        if len(tops) != 1 or has_splits or (len(below) < 2 and min(map(len, inside)) == 2):
            return listing, wrapper
        prefix = f"{tops.pop()}/"
        stray = {path: STRAY for path in listing.images if "/" not in path}
        other = {path: reason for path, reason in listing.ignored.items() if not path.startswith(prefix)}
        listing, wrapper = listing.below(prefix), wrapper + prefix
        listing.ignored.update({f"../{path}": reason for path, reason in {**stray, **other}.items()})


def expand(listing: Listing, place: str, levels: int = 2) -> Listing:
    """Read the tars of a listing without images as folders, as in ImageNet's archive; else return it unchanged.

    The tar of a split may consist of one tar per class, which are two levels.
    """
    if listing.images or not listing.archives or not levels:
        return listing
    found = Listing(ignored=dict(listing.ignored), folders=listing.folders | set(listing.archives))
    for path, file in sorted(listing.archives.items()):
        try:
            inner = _walk(_read_archive(file))
        except _DAMAGED as error:
            raise DataError(
                f"{place}{path} is neither a folder nor a whole tar ({error}); check it or copy it again"
            ) from None
        stems = {os.path.splitext(name)[0] for name in inner.images}
        if any(reason == ".cls" and os.path.splitext(name)[0] in stems for name, reason in inner.ignored.items()):
            raise DataError(
                f"{place}{path}.tar is a shard of WebDataset, with a .cls file for each image; unpack all shards into "
                "one folder per class"
            )
        inner = unwrap(expand(inner, f"{place}{path}:", levels - 1))[0]
        if not path:  # the tar of a split
            return inner
        found.images.update({f"{path}/{name}": image for name, image in inner.images.items()})
        found.ignored.update({f"{path}/{name}": reason for name, reason in inner.reasons()})
        found.folders.update(f"{path}/{name}" for name in inner.folders)
    return found


def tar_stem(name: str) -> str | None:
    """Return the name of a tar without its extension, ``train`` for ``train.tar.xz``; None for any other file."""
    for ending in _TAR_ENDINGS:
        if name.lower().endswith(ending):
            return name[: -len(ending)]
    return None


def is_image(path: Path) -> bool:
    """Return whether a file is an image according to its content; a tar begins with a name, such as ``BMW``."""
    try:
        with path.open("rb") as stream:
            return stream.read(4).startswith(_IMAGE_STARTS) and not tarfile.is_tarfile(path)
    except OSError:
        return False


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is ignored because of its name."""
    return name.startswith(".") or name.lower() in _SYSTEM_FOLDERS


def read_image(path: str | Path, offset: int = 0, size: int = -1) -> bytes:
    """Return a file or a part of it; raise :class:`DataError` if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(size)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; was it moved or removed?") from None


_DAMAGED = (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


@dataclass(frozen=True)
class _DiskFolder:
    path: str
    identity: tuple[int, int]
    """Device and inode."""

    def children(self) -> Iterator[tuple[str, _DiskFolder | ImageFile | str]]:
        """Yield the name of each entry and its folder or file, or the reason why it is neither."""
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    yield os.fsencode(entry.name).decode("utf-8", "surrogateescape"), _on_disk(entry)
        except OSError as error:
            raise DataError(f"cannot read {error.filename}: {error.strerror}; check its permissions") from None


def _on_disk(entry: os.DirEntry[str]) -> _DiskFolder | ImageFile | str:
    try:
        found = entry.stat()
    except OSError:
        if entry.is_symlink():
            return BROKEN
        raise
    if stat.S_ISDIR(found.st_mode):
        return _DiskFolder(entry.path, (found.st_dev, found.st_ino))
    return ImageFile(entry.path, found.st_size) if stat.S_ISREG(found.st_mode) else IRREGULAR


@dataclass(frozen=True)
class _Link:
    parts: tuple[str, ...]
    is_hard: bool
    """Whether ``parts`` start at the top of the tar instead of the folder of the link."""


class _TarFolder:
    def __init__(self, parent: _TarFolder | None = None) -> None:
        self.parent = parent
        self.entries: dict[str, _TarFolder | ImageFile | _Link | str] = {}

    @property
    def identity(self) -> int:
        """Number of this folder."""
        return id(self)

    def folder(self, parts: tuple[str, ...]) -> _TarFolder:
        """Return the folder at a path, and create it if it is missing."""
        here = self
        for part in parts:
            inner = here.entries.get(part)
            if isinstance(inner, _Link):
                inner = here._follow(inner, _MOST_LINKS)
            if not isinstance(inner, _TarFolder):
                inner = here.entries[part] = _TarFolder(here)
            here = inner
        return here

    def children(self) -> Iterator[tuple[str, _TarFolder | ImageFile | str]]:
        """Yield the name of each entry and its folder or file, following links, or the reason why it is neither."""
        for name, node in self.entries.items():
            yield name, self._follow(node, _MOST_LINKS) if isinstance(node, _Link) else node

    def _follow(self, link: _Link, left: int) -> _TarFolder | ImageFile | str:
        here: _TarFolder | ImageFile = self
        while link.is_hard and isinstance(here, _TarFolder) and here.parent is not None:
            here = here.parent
        for part in link.parts:
            if not isinstance(here, _TarFolder):
                return BROKEN
            inner = here.entries.get(part, BROKEN) if part != ".." else here.parent or OUTSIDE
            if isinstance(inner, _Link):
                inner = here._follow(inner, left - 1) if left else BROKEN
            if isinstance(inner, str):
                return inner
            here = inner
        return here


def _read_archive(file: ImageFile) -> _TarFolder:
    """Return the top folder of a tar, which may be inside another tar; raise one of :data:`_DAMAGED`."""
    source, start, end = file.source, 0, file.size
    if file.pieces is not None and len(file.pieces) > 1:
        source = file()
    elif file.pieces:
        ((_, start, length),) = file.pieces
        end = start + length
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as stream:
        stream.seek(start)
        magic = stream.read(6)
        decompress = next((call for first, call in _COMPRESSIONS.items() if magic.startswith(first)), None)
        if decompress is None:
            stream.seek(start)
            return _read_members(stream, end, source)
    content = decompress(file())
    return _read_members(io.BytesIO(content), len(content), content)


def _read_members(stream: IO[bytes], end: int, source: str | bytes) -> _TarFolder:
    """Return the top folder of the plain tar from the stream's position to ``end``; raise TarError if it is cut off."""
    top = _TarFolder()
    with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8") as archive:
        for member in archive:
            if member.offset >= end:  # an inner tar without an end marker
                return top
            *above, name = _parts(member.name) or ("",)
            if name in ("", ".."):
                continue
            if ".." in above:
                top.entries[member.name.replace("/", "\\")] = OUTSIDE
            elif member.isdir():
                top.folder((*above, name))
            else:
                top.folder(tuple(above)).entries[name] = _member(member, source)
        # tarfile mistakes a broken header for the end. A real end is a block of zeros or, from some writers, nothing.
        stream.seek(archive.offset)
        if archive.offset > end or (archive.offset < end and stream.read(tarfile.BLOCKSIZE).strip(b"\0")):
            raise tarfile.ReadError(f"broken or cut off at byte {archive.offset}")
    return top


def _member(member: tarfile.TarInfo, source: str | bytes) -> ImageFile | _Link | str:
    if member.islnk():
        return _Link(_parts(member.linkname), is_hard=True)
    if member.issym():
        return OUTSIDE if member.linkname.startswith("/") else _Link(_parts(member.linkname), is_hard=False)
    if not member.isreg():
        return IRREGULAR
    pieces, offset = [], member.offset_data
    holes: Any = member.sparse  # declared as a number by mistake
    for position, length in holes or [(0, member.size)]:
        pieces.append((position, offset, length))
        offset += length
    return ImageFile(source, member.size, tuple(pieces))


def _ending(name: str) -> str:
    """Return the extension of a file in lower case; empty if there is none or it is a number."""
    ending = os.path.splitext(name)[1].lower()
    return ending if _ENDING.fullmatch(ending) else ""


def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of a path in a tar; an absolute path is relative to the top of the tar, as for ``tar``."""
    return tuple(part for part in name.split("/") if part not in ("", "."))


def _walk(top: _DiskFolder | _TarFolder) -> Listing:
    found = Listing()
    waiting: list[tuple[str, _DiskFolder | _TarFolder, frozenset[Any], str]] = [("", top, frozenset(), "")]
    while waiting:
        prefix, folder, above, hidden = waiting.pop()
        above |= {folder.identity}
        for name, node in folder.children():
            path = prefix + name
            if isinstance(node, (ImageFile, str)):
                found.add(path, name, node, hidden)
            elif node.identity not in above:  # not a link to a folder above
                inner = hidden or (f"in {printable(name)}" if is_hidden(name) else "")
                if not inner:
                    found.folders.add(path)
                waiting.append((f"{path}/", node, above, inner))
    return found
