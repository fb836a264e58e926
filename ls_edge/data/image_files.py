"""Image files in a folder or a tar, with a reader for each, and the files that are ignored.

Folders and tars are listed by the same code, so a folder and a tar of it contain the same images. Names are UTF-8,
whatever the locale. Nothing is extracted to disk: a plain tar is read by offset; a compressed tar is unpacked into
memory, where it must fit. Links within the folder or tar are followed; links that lead out of a tar, devices, files
without the extension of an image, and names and files beyond the limits of this module are ignored.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ls_edge.core.errors import DataError, printable
from ls_edge.data.any_image import MAX_BYTES
from ls_edge.data.splits import split_of

EXTENSIONS = frozenset(
    (
        ".bmp", ".gif", ".jfi", ".jfif", ".jif", ".jpe", ".jpeg", ".jpg", ".mpo", ".pbm", ".pgm", ".png", ".pnm",
        ".ppm", ".tif", ".tiff", ".webp",
    )
)  # fmt: skip
_COMPRESSIONS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
_MOST_RATIO, _LEAST_BYTES = 32, 1 << 16
"""Maximum size of an unpacked tar relative to the compressed one; small tars have more padding."""
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
_MOST_FOLDERS, _MOST_LETTERS = 40, 255
"""Maximum depth of a folder, and maximum length of a name, as on Linux."""
_MOST_AGAIN = 100_000
"""Maximum number of files and folders that are listed again because several links lead to their folder."""
_MOST_HEADER, _MOST_GLOBAL = 1 << 20, 100
"""Maximum bytes of a header in a tar, and global settings of a tar."""
_DIGITS = re.compile(rb"[0-9]{64}")
BROKEN, OUTSIDE, IRREGULAR, EMPTY, HIDDEN, STRAY, UNLABELED, DEEP, LARGE = (
    "broken link", "link out of the archive", "not a regular file", "empty", "hidden", "not in a class folder",
    "no label", "name too long", f"larger than {MAX_BYTES >> 20} MiB",
)  # fmt: skip
"""Reasons why a file with the extension of an image is ignored."""


@dataclass(frozen=True)
class ImageFile:
    """Reader of an encoded file; any thread may call it."""

    source: str | bytes = field(repr=False)
    """Path of the file or tar, or the content of a tar."""
    size: int
    offset: int = 0
    """Position of the content in ``source``."""

    def __call__(self) -> bytes:
        """Return the content; raise :class:`DataError` if it cannot be read."""
        if isinstance(self.source, bytes):
            return self.source[self.offset : self.offset + self.size]
        return read_image(self.source, self.offset, self.size)


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
        elif isinstance(file, str) or not 0 < file.size <= MAX_BYTES:
            self.ignored[path] = file if isinstance(file, str) else LARGE if file.size else EMPTY
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
    return _walk(_DiskFolder(str(top), (found.st_dev, found.st_ino)), str(top))


def read_tar(path: Path) -> Listing:
    """List the content of a plain or compressed tar; raise :class:`DataError` if it is damaged or truncated."""
    try:
        if kind := _OTHER_ARCHIVES.get(read_image(path, 0, 4)):
            raise DataError(f"{path} is a {kind}, which cannot be read in place; extract it and give the folder")
        return _walk(_read_archive(ImageFile(str(path), path.stat().st_size)), str(path))
    except tarfile.TarError as error:
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
    if len(set(listing.archives.values())) < len(listing.archives):
        raise DataError(f"{place.rstrip('/:')}: several names lead to the same tar; keep one of them")
    found = Listing(ignored=dict(listing.ignored), folders=listing.folders | set(listing.archives))
    for path, file in sorted(listing.archives.items()):
        try:
            inner = _walk(_read_archive(file), f"{place}{path}")
        except tarfile.TarError as error:
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
            head = stream.read(tarfile.BLOCKSIZE)
            return head.startswith(_IMAGE_STARTS) and head[257:262] != b"ustar"
    except OSError:
        return False


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is ignored because of its name."""
    return name.startswith(".") or name.lower() in _SYSTEM_FOLDERS


def read_image(path: str | Path, offset: int = 0, size: int = MAX_BYTES) -> bytes:
    """Return a file or a part of it; raise :class:`DataError` if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(size)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; was it moved or removed?") from None


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
            raise DataError(f"cannot read {self.path}: {error.strerror}; check its permissions") from None


def _on_disk(entry: os.DirEntry[str]) -> _DiskFolder | ImageFile | str:
    try:
        found = entry.stat()
    except OSError:
        if entry.is_symlink():
            return BROKEN
        raise
    if stat.S_ISDIR(found.st_mode):
        return _DiskFolder(entry.path, (found.st_dev, found.st_ino))
    path = os.path.realpath(entry.path) if entry.is_symlink() else entry.path  # all links to a file are one
    return ImageFile(path, found.st_size) if stat.S_ISREG(found.st_mode) else IRREGULAR


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
            if not isinstance(inner, _TarFolder):
                inner = here.entries[part] = _TarFolder(here)
            here = inner
        return here

    def children(self) -> Iterator[tuple[str, _TarFolder | ImageFile | str]]:
        """Yield the name of each entry and its folder or file, following links, or the reason why it is neither."""
        for name in self.entries:
            yield name, self._entry(name, _MOST_LINKS)

    def _entry(self, name: str, left: int) -> _TarFolder | ImageFile | str:
        """Return an entry; replace a link by the end of its chain, of at most ``left`` links."""
        link = self.entries.get(name, BROKEN)
        if not isinstance(link, _Link):
            return link
        self.entries[name] = BROKEN  # while it is followed
        here: _TarFolder | ImageFile | str = self if left else BROKEN
        while link.is_hard and isinstance(here, _TarFolder) and here.parent is not None:
            here = here.parent
        for part in link.parts:
            if isinstance(here, _TarFolder):
                here = here._entry(part, left - 1) if part != ".." else here.parent or OUTSIDE
            elif isinstance(here, ImageFile):
                here = BROKEN
        self.entries[name] = here
        return here


class _Headers:
    """Stream of headers for :mod:`tarfile`, with limits."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.tell = stream.tell

    def seek(self, position: int) -> None:
        if position < self.tell():
            raise tarfile.ReadError(f"a size below 0 before byte {self.tell()}")
        self._stream.seek(position)

    def read(self, size: int) -> bytes:
        content = self._stream.read(size) if 0 <= size <= _MOST_HEADER else b""
        if len(content) < size > tarfile.BLOCKSIZE or _DIGITS.search(content):  # tarfile compares digits repeatedly
            raise tarfile.ReadError(f"a header of {size} bytes that cannot be used")
        return content


def _read_archive(file: ImageFile) -> _TarFolder:
    """Return the top folder of a tar, which may be inside another tar; raise TarError."""
    source, start, end = file.source, file.offset, file.offset + file.size
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as stream:
        stream.seek(start)
        magic = stream.read(6)
        unpack = next((call for first, call in _COMPRESSIONS.items() if magic.startswith(first)), None)
        stream.seek(start)
        try:
            if unpack is None:
                return _read_members(stream, end, source)
            if isinstance(source, bytes):
                raise tarfile.ReadError("a compressed tar in a compressed tar; compress it once")
            raw = stream.read(end - start)
            most = _LEAST_BYTES + _MOST_RATIO * len(raw)
            with unpack(io.BytesIO(raw)) as unpacked:
                content = unpacked.read(most + 1)
            if len(content) > most:
                raise tarfile.ReadError(f"unpacked, it has more than {_MOST_RATIO} times its size")
            return _read_members(io.BytesIO(content), len(content), content)
        except Exception as error:  # damaged headers raise errors of all kinds
            if isinstance(error, tarfile.TarError) or (isinstance(error, OSError) and error.errno):
                raise
            raise tarfile.ReadError(str(error) or type(error).__name__) from None


def _read_members(stream: IO[bytes], end: int, source: str | bytes) -> _TarFolder:
    """Return the top folder of the plain tar from the stream's position to ``end``; raise TarError if it is cut off."""
    top = _TarFolder()
    headers: Any = _Headers(stream)
    reader: Any = tarfile.TarFile(fileobj=headers, encoding="utf-8")
    with reader as archive:
        for member in archive:
            archive.members.clear()  # they would fill the memory
            if len(archive.pax_headers) > _MOST_GLOBAL:  # tarfile copies them for each member
                raise tarfile.ReadError(f"more than {_MOST_GLOBAL} global settings")
            if member.offset >= end:  # an inner tar without an end marker
                return top
            *above, name = _parts(member.name) or ("",)
            if name in ("", ".."):
                continue
            if ".." in above:
                top.entries[member.name.replace("/", "\\")] = OUTSIDE
            elif len(above) > _MOST_FOLDERS or max(map(len, (*above, name))) > _MOST_LETTERS:
                top.entries[f"{len(top.entries)}{_ending(name)}"] = DEEP
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
    if member.islnk() or member.issym():
        parts = _parts(member.linkname[: _MOST_FOLDERS * _MOST_LETTERS])
        is_outside = member.issym() and member.linkname.startswith("/")
        return OUTSIDE if is_outside else _Link(parts, is_hard=member.islnk())
    is_usable = member.isreg() and not member.issparse() and member.size >= 0
    return ImageFile(source, member.size, member.offset_data) if is_usable else IRREGULAR


def _ending(name: str) -> str:
    """Return the extension of a file in lower case; empty if there is none or it is a number."""
    ending = os.path.splitext(name)[1].lower()
    return ending if _ENDING.fullmatch(ending) else ""


def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of a path in a tar; an absolute path is relative to the top of the tar, as for ``tar``."""
    return tuple(part for part in name.split("/") if part not in ("", "."))


def _walk(top: _DiskFolder | _TarFolder, where: str) -> Listing:
    found, again, seen = Listing(), 0, set()
    waiting: list[tuple[str, _DiskFolder | _TarFolder, frozenset[Any], str]] = [("", top, frozenset(), "")]
    while waiting:
        prefix, folder, above, hidden = waiting.pop()
        is_again = folder.identity in seen
        seen.add(folder.identity)
        above |= {folder.identity}
        for name, node in folder.children():
            path = prefix + name
            again += is_again
            if again > _MOST_AGAIN:
                raise DataError(f"{where}: links lead to more than {_MOST_AGAIN} files and folders again; remove them")
            if isinstance(node, (ImageFile, str)):
                found.add(path, name, node, hidden)
            elif len(above) > _MOST_FOLDERS:
                found.ignored[path] = DEEP
            elif node.identity not in above:  # not a link to a folder above
                inner = hidden or (f"in {printable(name)}" if is_hidden(name) else "")
                if not inner:
                    found.folders.add(path)
                waiting.append((f"{path}/", node, above, inner))
    return found
