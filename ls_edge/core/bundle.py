"""A bundle: ``manifest.json`` and one engine file for stem, head and each block.

Reading validates everything: paths in a manifest must stay inside the folder, links are rejected, and
:meth:`Bundle.opened` keeps the file open whose digest it checked, so files are never reopened by name.
``ls_edge.export`` writes the parts first and the manifest last, so a folder with a manifest is complete.

``model_id`` is equal for bundles of one model in any precision, so their peers can work together. ``bundle_id`` also
covers the precision and the digests of the parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

from ls_edge.core.bands import Bands
from ls_edge.core.errors import BundleError, DigestMismatch, SchemaMismatch, UsageError
from ls_edge.core.files import local_folder, read_file, write_file
from ls_edge.core.text import short_id
from ls_edge.core.validation import InvalidDocument, OtherSchema, decode_json, show_value

SCHEMA = 2
"""Version of the manifest and of the formulas of its ids."""
MANIFEST = "manifest.json"
METADATA = "ls_edge."
"""Prefix of metadata keys in the files of parts."""
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
TOKEN_DTYPES = {"float32": 4, "float16": 2}
"""Bytes per number, by type of the tokens."""

Side = Annotated[int, Meta(ge=1, le=16_384)]
TokenCount = Annotated[int, Meta(ge=1, le=1_048_576)]
"""Limits far above the needs of any model."""


Text = Annotated[str, Meta(max_length=1024)]
PositiveFloat = Annotated[float, Meta(gt=0)]
CropShare = Annotated[float, Meta(ge=0.01, le=8)]


def _one_of(names: Collection[str]) -> Meta:
    return Meta(pattern=rf"^({'|'.join(names)})\Z", description=f"one of {', '.join(names)}")


Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z", description="a SHA-256 in hexadecimal")]


class ImageSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conversion of an image to the stem's input."""

    size: tuple[Side, Side]
    mean: tuple[float, float, float]
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat]
    """Divisor of each channel, after its mean is subtracted."""
    interpolation: Annotated[str, _one_of(INTERPOLATIONS)] = "bicubic"
    crop_pct: CropShare = 0.9
    """Side of the center crop relative to the side that the image is scaled to."""
    crop_mode: Literal["squash", "border"] | msgspec.UnsetType = msgspec.UNSET
    """Treatment of images that are not square, as timm names it: ``squash`` scales both sides, ``border`` scales the
    longer one and fills the rest with the mean color. Unset: the shorter side is scaled and the center is cropped."""
    exif_orientation: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether photos are turned upright by their EXIF orientation, unlike in timm and torchvision. False is unset, so
    that it does not change ids."""

    def __post_init__(self) -> None:
        if self.exif_orientation is False:
            msgspec.structs.force_setattr(self, "exif_orientation", msgspec.UNSET)


class TokenSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape and type of the tensor between blocks: ``[B, count, dim]`` of ``dtype``."""

    count: TokenCount
    dim: TokenCount
    dtype: Annotated[str, _one_of(TOKEN_DTYPES)] = "float32"

    @property
    def bytes_per_image(self) -> int:
        """Bytes of one image's tokens without a codec."""
        return self.count * self.dim * TOKEN_DTYPES[self.dtype]


class PartFile(msgspec.Struct, frozen=True):
    """One engine file."""

    file: str
    """Path inside the bundle, with forward slashes (:data:`_FILE`)."""
    sha256: Digest
    bytes: Annotated[int, Meta(ge=0, lt=1 << 40, description="a whole number from 0 to 2^40")]


class PartFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All engine files of a bundle."""

    stem: PartFile
    head: PartFile
    blocks: Annotated[
        tuple[PartFile, ...], Meta(min_length=1, max_length=1024, description="a list of at least one part")
    ]
    whole: PartFile | None = None
    """The model in one file (``export --whole``), for comparison."""


class Folded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of the model's first and last blocks that stem and head run; the bundle has the blocks in between."""

    stem: Annotated[int, Meta(ge=0)]
    head: Annotated[int, Meta(ge=0)]


NOT_FOLDED = Folded(0, 0)
REFERENCE_VALUES = 32
"""Number of values that a bundle stores of each output: a few KB for all parts."""
_ReferenceValues = Annotated[
    list[float],
    Meta(
        min_length=REFERENCE_VALUES,
        max_length=REFERENCE_VALUES,
        description=f"a list of {REFERENCE_VALUES} numbers",
    ),
]


class VerifiedJson(TypedDict, total=False):
    """Section ``verified`` of a manifest, with which engines and later measurements are compared."""

    max_abs_error: float
    max_rel_error: float
    min_cosine: float
    agreement: float
    measure: str
    tolerance: float | None
    reference: str
    engine: str
    images: str
    images_sha256: str
    batches: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(min_length=1, description="a list of batch sizes")]
    parts: dict[str, float]
    chain: dict[str, float]
    residual_1500: float | None
    top1: dict[str, float] | None
    int8: str
    float32: dict[str, list[str]]
    rounding: float
    outputs: dict[str, _ReferenceValues]


class Manifest(msgspec.Struct, frozen=True):
    """Content of ``manifest.json``."""

    schema: int
    bundle_id: Text
    model_id: Text
    model: Text
    """Name of the model in timm."""
    method: Text
    classes: Annotated[tuple[Text, ...], Meta(min_length=1, description="a list of at least one class")]
    image: ImageSpec
    tokens: TokenSpec
    needs_slot: bool
    """Whether the blocks take an input ``slot``, int64 ``[B]``."""
    precision: Text
    opset: int
    parts: PartFiles
    verified: VerifiedJson = {}
    trained_on: str = ""
    """Training images (:class:`ls_edge.data.content.KnownImages`); empty if unknown."""
    bands: tuple[tuple[int, ...], ...] | msgspec.UnsetType = msgspec.UNSET
    """Groups of blocks within which the order may change (``ls_edge.core.bands``); unset for a single group."""
    folded: Folded | msgspec.UnsetType = msgspec.UNSET
    """Unset if stem and head run no blocks."""

    @property
    def block_bands(self) -> Bands:
        """Groups of blocks within which the order may change, by default one of all blocks."""
        return Bands.from_json(None if self.bands is msgspec.UNSET else self.bands, len(self.parts.blocks))

    def part_names(self) -> Iterator[tuple[str, PartFile]]:
        """Yield the name and file of each part: stem, blocks, head, and ``whole`` if there is one."""
        yield "stem", self.parts.stem
        for index, part in enumerate(self.parts.blocks):
            yield f"block {index}", part
        yield "head", self.parts.head
        if self.parts.whole is not None:
            yield "whole", self.parts.whole


def interface_of(
    image: ImageSpec,
    tokens: TokenSpec,
    bands: Bands,
    classes: Sequence[str],
    *,
    needs_slot: bool,
    folded: Folded = NOT_FOLDED,
) -> dict[str, Any]:
    """Return everything that two processes must agree on to exchange tokens and answers, as plain JSON.

    This includes the bands and the ordered names of the classes: processes in which they differ reject each other.
    """
    found: dict[str, Any] = {
        "image": msgspec.to_builtins(image),
        "tokens": msgspec.to_builtins(tokens),
        "blocks": bands.num_blocks,
        "classes": list(classes),
        "needs_slot": needs_slot,
    }
    if bands.cuts:
        found["bands"] = bands.to_json()
    if folded != NOT_FOLDED:
        found["folded"] = msgspec.to_builtins(folded)
    return found


def part_metadata(manifest: Manifest, part: str) -> dict[str, str]:
    """Return the metadata in the file of a part, which identifies the part and its model.

    It has the id of the model, not of the bundle, which depends on the digests of the files.
    """
    takes_slot = manifest.needs_slot and part.startswith("block ")
    found = {
        "model_id": manifest.model_id,
        "part": part,
        "precision": manifest.precision,
        "slot": "number of parts that ran before it, without the stem" if takes_slot else "none",
    }
    if part in ("head", "whole"):
        found["classes"] = json.dumps(manifest.classes)
    return {f"{METADATA}{name}": value for name, value in found.items()}


def manifest_bands(bands: Bands) -> tuple[tuple[int, ...], ...] | msgspec.UnsetType:
    """Return the entry ``bands`` of a manifest, which is unset for a single band."""
    return msgspec.UNSET if bands.is_one else tuple(map(tuple, bands.groups))


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def model_id_of(weights_sha256: str, interface: dict[str, Any]) -> str:
    """Return the id of a model, given its source weights and its interface."""
    return digest_of({"weights": weights_sha256, "interface": interface})


def bundle_id_of(interface: dict[str, Any], precision: str, parts: PartFiles) -> str:
    """Return the id of a bundle, given interface, precision, and parts."""
    digests = [parts.stem.sha256, *(part.sha256 for part in parts.blocks), parts.head.sha256]
    digests += [] if parts.whole is None else [parts.whole.sha256]
    return digest_of({"schema": SCHEMA, "interface": interface, "precision": precision, "parts": digests})


_FILE = re.compile(r"(?:\w[\w.-]{0,63}/){0,3}\w[\w.-]{0,63}", re.ASCII)
_CHUNK = 1 << 20
_OVERLAP = 64
"""Bytes of a chunk that are searched again with the next one; longer than any pattern."""


@dataclass(frozen=True)
class OpenPart:
    """The open file of a part, whose digest was checked. It is read in chunks, so that it takes no memory.

    It is not mapped: a disk that fails would then end the process by a signal.
    """

    path: str
    """Path that leads to the open file, whatever happens to its name."""
    _descriptor: int

    def chunks(self) -> Iterator[bytes]:
        """Yield the content; raise :class:`OSError`."""
        at = 0
        while chunk := os.pread(self._descriptor, _CHUNK, at):
            at += len(chunk)
            yield chunk

    def contains(self, pattern: re.Pattern[bytes]) -> bool:
        """Return whether a pattern of at most 64 bytes occurs."""
        tail = b""
        for chunk in self.chunks():
            if pattern.search(tail + chunk):
                return True
            tail = chunk[-_OVERLAP:]
        return False


@dataclass(frozen=True)
class Bundle:
    """A bundle that reads parts on demand and checks their digests."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | Path, file: str = MANIFEST) -> Bundle:
        """Read and check the manifest, which is called ``manifest.json`` except in a peer's store; do not read parts.

        Raise :class:`BundleError` if the folder or a name in the manifest cannot be used, and :class:`SchemaMismatch`
        if the manifest was written for another schema.
        """
        folder = local_folder(folder)
        path = folder / file
        try:
            raw = None if path.is_fifo() or not path.exists() else read_file(path)  # a pipe would wait for a writer
        except OSError as error:
            raise BundleError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None
        if raw is None and folder.is_file():
            raise BundleError(f"{folder} is a file; give the folder of the bundle, which holds {MANIFEST}")
        if raw is None:
            raise BundleError(
                f"{folder} is not a bundle: it has no {MANIFEST}; write one with 'ls-edge export RUN --out {folder} "
                "--per-block'"
            )
        bundle = cls.of_manifest(folder, raw, file)
        for name, part in bundle.manifest.part_names():
            bundle._check_name(name, part)
        return bundle

    @classmethod
    def of_manifest(cls, folder: Path, raw: bytes, file: str = MANIFEST) -> Bundle:
        """Check a manifest; raise as :meth:`open` does. ``folder`` and ``file`` are used in messages only."""
        path = folder / file
        try:
            manifest = decode_json(raw, Manifest, SCHEMA)
            manifest.block_bands  # noqa: B018 - raises unless they are bands of these blocks
        except OtherSchema as error:
            raise SchemaMismatch(f"{path}{error}; export again") from None
        except InvalidDocument as error:
            raise BundleError(f"{path}{error}; copy the bundle again, or export the run again") from None
        except UsageError as error:
            raise BundleError(f"{path}: {error}; export the run again") from None
        bundle = cls(folder, manifest)
        expected = bundle_id_of(bundle.interface, manifest.precision, manifest.parts)
        if expected != manifest.bundle_id:
            raise DigestMismatch(
                f"{folder / MANIFEST} was changed: bundle_id is {short_id(manifest.bundle_id)} but its contents give "
                f"{short_id(expected)}; export again"
            )
        return bundle

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.manifest.parts.blocks)

    @property
    def interface(self) -> dict[str, Any]:
        """Everything that two processes must agree on to exchange tokens (:func:`interface_of`)."""
        m = self.manifest
        return interface_of(m.image, m.tokens, self.bands, m.classes, needs_slot=m.needs_slot, folded=self.folded)

    @property
    def bands(self) -> Bands:
        """Groups of blocks within which the order may change, by default one of all blocks."""
        return self.manifest.block_bands

    @property
    def folded(self) -> Folded:
        """Numbers of the model's blocks that stem and head run."""
        folded = self.manifest.folded
        return NOT_FOLDED if folded is msgspec.UNSET else folded

    @property
    def owners(self) -> tuple[int, ...]:
        """First block with the same file, for each block; the block itself unless blocks share weights."""
        first: dict[str, int] = {}
        return tuple(first.setdefault(part.sha256, index) for index, part in enumerate(self.manifest.parts.blocks))

    @property
    def shares_weights(self) -> bool:
        """Whether several blocks are the same block with different slots, so that their order makes no difference."""
        return self.manifest.needs_slot and len(set(self.owners)) < self.num_blocks

    def part(self, name: str) -> PartFile:
        """Return the part of a name such as ``stem``, ``head``, ``whole``, or ``block 3``."""
        part = dict(self.manifest.part_names()).get(name)
        if part is None:
            raise BundleError(
                f"{self.folder} has no part {name!r}; it has stem, head and blocks 0 to {self.num_blocks - 1}"
            )
        return part

    def memory_of(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of memory of each part on a CPU; 0 if its file is that of an earlier part."""
        sizes = {part.file: part.bytes for part in map(self.part, names)}
        times = 2 if self.manifest.precision == "fp16" else 1  # a CPU computes in float32
        return [times * sizes.pop(self.part(name).file, 0) for name in names]

    def read(self, name: str) -> bytes:
        """Return the bytes of a part, which :meth:`opened` checks."""
        with self.opened(name) as part:
            return b"".join(part.chunks())

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[OpenPart]:
        """Open the file of a part after checking its digest, without a copy in memory.

        Raise :class:`BundleError` if the file is missing or cannot be read, and :class:`DigestMismatch` if its content
        differs.
        """
        part = self.part(name)
        path = self.folder / part.file
        if path.is_symlink() or (path.exists() and not path.is_file()):  # reading a pipe would wait for a writer
            raise BundleError(
                f"{path} ({name}) is a link or not a file; a bundle holds plain files, copy the file itself"
            )
        try:
            with path.open("rb") as file:
                opened = OpenPart(f"/proc/self/fd/{file.fileno()}", file.fileno())
                found, expected = f"{os.fstat(file.fileno()).st_size} bytes", f"{part.bytes} bytes"
                if found == expected:  # a file with holes may have any size
                    digest = hashlib.sha256()
                    for chunk in opened.chunks():
                        digest.update(chunk)
                    found, expected = f"sha256 {digest.hexdigest()}", f"sha256 {part.sha256}"
                if found != expected:
                    raise DigestMismatch(
                        f"{path} ({name}) is not the file of this bundle: it has {found[:23]}, expected "
                        f"{expected[:23]}; it was changed or belongs to another bundle, copy it again"
                    )
                yield opened
        except FileNotFoundError:
            raise BundleError(
                f"{path} ({name}) is missing; copy it from where the bundle was exported, or export again"
            ) from None
        except OSError as error:
            raise BundleError(f"cannot read {path} ({name}): {error.strerror}; check its permissions") from None

    def _check_name(self, name: str, part: PartFile) -> None:
        if not _FILE.fullmatch(part.file):
            shown = show_value(part.file)
            raise BundleError(
                f"{self.folder / MANIFEST}: the file of {name} is {shown}; a bundle names only files inside it"
            )
        for parent in (self.folder / part.file).parents:
            if parent == self.folder:
                break
            if parent.is_symlink():
                raise BundleError(f"{parent} is a link; a bundle holds plain folders, copy the folder itself")


def shared_groups(owners: Sequence[int]) -> list[list[int]]:
    """Return groups of two or more blocks that share their weights, which belong to one owner."""
    groups = ([block for block, owner in enumerate(owners) if owner == first] for first in dict.fromkeys(owners))
    return [group for group in groups if len(group) > 1]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` atomically; call this after all parts are written."""
    write_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
