"""Bundles: a folder is read only if every name, id and digest matches."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import (
    SCHEMA,
    Bundle,
    ImageSpec,
    Manifest,
    PartFile,
    PartFiles,
    TokenSpec,
    bundle_id_of,
    digest_of,
    interface_of,
    manifest_bands,
    model_id_of,
    write_manifest,
)  # fmt: skip
from ls_edge.core.errors import BundleError, DigestMismatch, SchemaMismatch

IMAGE = ImageSpec(size=(8, 8), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
TOKENS = TokenSpec(count=5, dim=4)

CLASSES = ("cat", "dog")


def make(folder, *, whole=False, precision="fp32", content=b"part", bands=None):
    """A bundle of three blocks whose parts are a few bytes."""
    (folder / "blocks").mkdir(parents=True)

    def part(name):
        raw = content + b" " + name.encode()
        (folder / name).write_bytes(raw)
        return PartFile(name, hashlib.sha256(raw).hexdigest(), len(raw))

    parts = PartFiles(
        stem=part("stem.onnx"), head=part("head.onnx"), blocks=tuple(part(f"blocks/{i:02d}.onnx") for i in range(3)),
        whole=part("whole.onnx") if whole else None,
    )  # fmt: skip
    bands = Bands.from_json(bands, 3)
    interface = interface_of(IMAGE, TOKENS, bands, CLASSES, needs_slot=False)
    manifest = Manifest(
        schema=SCHEMA, bundle_id=bundle_id_of(interface, precision, parts), model_id=model_id_of("weights", interface),
        model="vit_test", method="shuffle", classes=CLASSES, image=IMAGE, tokens=TOKENS, needs_slot=False,
        precision=precision, opset=20, parts=parts, bands=manifest_bands(bands),
    )  # fmt: skip
    write_manifest(folder, manifest)
    return manifest


@pytest.fixture
def folder(tmp_path):
    make(tmp_path / "bundle")
    return tmp_path / "bundle"


def change(folder, edit):
    """Edit the manifest's JSON in place."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def test_a_bundle_is_read_as_it_was_written(tmp_path):
    manifest = make(tmp_path / "b", whole=True)
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.manifest == manifest
    assert bundle.num_blocks == 3
    names = [name for name, _ in manifest.part_names()]
    assert names == ["stem", "block 0", "block 1", "block 2", "head", "whole"]
    for name in names:
        raw = bundle.read(name)
        assert hashlib.sha256(raw).hexdigest() == bundle.part(name).sha256
    assert bundle.read("block 1") == b"part blocks/01.onnx"
    assert TOKENS.bytes_per_image == 80
    assert TokenSpec(count=5, dim=4, dtype="float16").bytes_per_image == 40


def test_the_manifest_is_written_as_the_contract_has_it(folder):
    document = json.loads((folder / "manifest.json").read_text())
    assert document["schema"] == SCHEMA
    assert set(document) >= {
        "schema", "bundle_id", "model_id", "model", "method", "classes", "image", "tokens", "needs_slot", "precision",
        "opset", "parts", "verified",
    }  # fmt: skip
    assert document["image"] == {
        "size": [8, 8], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 0.9,
    }  # fmt: skip
    assert document["tokens"] == {"count": 5, "dim": 4, "dtype": "float32"}
    assert set(document["parts"]["stem"]) == {"file", "sha256", "bytes"}
    assert not list(folder.glob("*.part"))


def test_ids_depend_on_weights_precision_and_parts(tmp_path):
    plain = make(tmp_path / "a")
    half = make(tmp_path / "b", precision="fp16")
    other = make(tmp_path / "c", content=b"other")
    assert plain.model_id == half.model_id == other.model_id
    assert len({plain.bundle_id, half.bundle_id, other.bundle_id}) == 3
    interface = interface_of(IMAGE, TOKENS, Bands(3), CLASSES, needs_slot=False)
    assert model_id_of("w", interface) != model_id_of("w", {**interface, "blocks": 4})
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})


def test_bands_are_part_of_both_ids_and_one_band_is_not_written(tmp_path):
    free, banded = make(tmp_path / "free"), make(tmp_path / "banded", bands="0/1-2")
    assert free.model_id != banded.model_id
    assert free.bundle_id != banded.bundle_id
    assert "bands" not in json.loads((tmp_path / "free/manifest.json").read_bytes())
    assert Bundle.open(tmp_path / "free").bands == Bands(3)
    assert json.loads((tmp_path / "banded/manifest.json").read_bytes())["bands"] == [[0], [1, 2]]
    assert Bundle.open(tmp_path / "banded").bands == Bands(3, (1,))


@pytest.mark.parametrize(
    ("bands", "why"),
    [
        ([[0], [2]], "expected block 1, found block 2"),
        ([[0], [1, 2], [3]], "the model has 0 to 2"),
        ([], "are not lists of blocks"),
        ("0/1-2", "bands"),
        (None, "bands"),
    ],
)
def test_invalid_bands_are_refused(folder, bands, why):
    change(folder, lambda manifest: manifest.update(bands=bands))
    with pytest.raises(BundleError, match=why) as error:
        Bundle.open(folder)
    assert "export the run again" in str(error.value)


@pytest.mark.parametrize(
    ("name", "file"), [("stem", "stem.onnx"), ("head", "head.onnx"), ("block 2", "blocks/02.onnx")]
)
def test_a_changed_part_is_named(folder, name, file):
    path = folder / file
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DigestMismatch, match=rf"{file} \({name}\) is not the file of this bundle: it has sha256 "):
        Bundle.open(folder).read(name)


@pytest.mark.parametrize("at", [0, 2**20 - 3])
def test_an_open_part_is_searched_across_its_chunks(tmp_path, at):
    content = bytearray(2**21 + 100)
    content[at : at + 6] = b"needle"
    make(tmp_path / "b", content=bytes(content))
    bundle = Bundle.open(tmp_path / "b")
    with bundle.opened("block 1") as part:
        assert part.contains(re.compile(b"needle"))
        assert not part.contains(re.compile(b"haystack"))
        (tmp_path / "b/blocks/01.onnx").rename(tmp_path / "b/away.onnx")
        assert hashlib.sha256(Path(part.path).read_bytes()).hexdigest() == bundle.part("block 1").sha256


@pytest.mark.parametrize("size", [0, 13, 1000])
def test_a_wrong_length_is_named(folder, size):
    change(folder, lambda document: document["parts"]["stem"].update(bytes=size))
    with pytest.raises(DigestMismatch, match=rf"\(stem\) is not the file .* 14 bytes, expected {size} bytes"):
        Bundle.open(folder).read("stem")


def test_a_file_with_holes_is_not_read(folder):
    os.truncate(folder / "stem.onnx", 1 << 43)
    with pytest.raises(DigestMismatch, match=f"it has {1 << 43} bytes, expected 14 bytes"):
        Bundle.open(folder).read("stem")


def test_a_missing_part_is_named(folder):
    (folder / "head.onnx").unlink()
    with pytest.raises(BundleError, match=r"head\.onnx \(head\) is missing"):
        Bundle.open(folder).read("head")
    with pytest.raises(BundleError, match="has no part 'block 7'; it has stem, head and blocks 0 to 2"):
        Bundle.open(folder).read("block 7")
    with pytest.raises(BundleError, match="has no part 'whole'"):
        Bundle.open(folder).read("whole")


def test_links_are_refused(folder, tmp_path):
    path = folder / "stem.onnx"
    path.rename(tmp_path / "stem.onnx")
    path.symlink_to(tmp_path / "stem.onnx")
    with pytest.raises(BundleError, match=r"stem\.onnx \(stem\) is a link"):
        Bundle.open(folder).read("stem")
    path.unlink()
    shutil.copy(tmp_path / "stem.onnx", path)
    (folder / "blocks").rename(tmp_path / "blocks")
    (folder / "blocks").symlink_to(tmp_path / "blocks")
    with pytest.raises(BundleError, match="blocks is a link"):
        Bundle.open(folder)


@pytest.mark.parametrize("name", ["stem.onnx", "manifest.json"])
def test_pipes_are_refused_and_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(BundleError, match=r"stem\.onnx \(stem\) is a link or not a file|it has no manifest\.json"):
        Bundle.open(folder).read("stem")


@pytest.mark.parametrize("name", ["../stem.onnx", "/etc/passwd", "blocks/../../x", "blocks\\00.onnx", "", ".", "a\0b"])
def test_file_names_that_lead_out_of_the_folder_are_refused(folder, name):
    change(folder, lambda document: document["parts"]["blocks"][1].update(file=name))
    with pytest.raises(BundleError, match=r"the file of block 1 is .*; a bundle names only files inside it"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    ("schema", "shown", "age"),
    [(1, "1", "an older"), (3, "3", "a newer"), ("2", "'2'", "an older"), (None, "empty", "an older")],
)
def test_another_schema_is_refused_whatever_the_ids_are(folder, schema, shown, age):
    change(folder, lambda document: document.update(schema=schema, bundle_id="0" * 64))
    with pytest.raises(SchemaMismatch, match=f"has schema {shown}, not 2: made by {age} ls-edge; export again"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    "edit",
    [
        lambda document: document.update(precision="int8"),
        lambda document: document["parts"]["stem"].update(sha256="0" * 64),
        lambda document: document["parts"]["blocks"].reverse(),
    ],
)
def test_a_changed_manifest_does_not_match_its_id(folder, edit):
    change(folder, edit)
    with pytest.raises(DigestMismatch, match=r"manifest\.json was changed: bundle_id is"):
        Bundle.open(folder)


def test_folders_that_are_not_bundles_are_refused(tmp_path):
    with pytest.raises(BundleError, match="is not a bundle: it has no manifest"):
        Bundle.open(tmp_path)
    with pytest.raises(BundleError, match="is not a bundle"):
        Bundle.open(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="is a file; give the folder"):
        Bundle.open(tmp_path / "file")
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(BundleError, match="cannot read"):
        Bundle.open(tmp_path)


def test_unknown_keys_of_later_versions_are_ignored(folder):
    change(folder, lambda document: document.update(note="made on a Tuesday"))
    assert Bundle.open(folder).num_blocks == 3
    assert "note" not in msgspec.to_builtins(Bundle.open(folder).manifest)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda m: m.update(opset="20"), "opset is '20'; it has to be a whole number"),
        (lambda m: m["tokens"].update(dim="4"), "dim is '4'; it has to be a whole number from 1 to 1048576 (at"),
        (lambda m: m["image"].update(mean=[0.5]), "mean is [0.5]; it has to be a list of 3: a number, a"),
        (lambda m: m["parts"].update(blocks={}), "blocks is a group of keys; it has to be a list of at least one part"),
        (lambda m: m["image"].update(crop="center"), "unknown key 'crop'; did you mean 'crop_pct'?"),
        (lambda m: m["image"].update(std=[0.5, 0, 0.5]), "std[1] is 0; it has to be a number above 0"),
        (lambda m: m["image"].update(size=[8, 2**40]), "size[1] is 1099511627776; it has to be a whole number from"),
        (lambda m: m["image"].update(crop_pct=5e-324), "crop_pct is 5e-324; it has to be a number from 0.01 to 8"),
        (lambda m: m["image"].update(size=[0, 8]), "size[0] is 0; it has to be a whole number from 1 to 16384"),
        (lambda m: m["image"].update(interpolation="magic"), "has to be one of nearest, bilinear"),
        (lambda m: m["tokens"].update(dtype="int3"), "dtype is 'int3'; it has to be one of float32, float16"),
        (lambda m: m["tokens"].update(count=-1), "count is -1; it has to be a whole number from 1"),
        (lambda m: m["parts"].update(blocks=[]), "blocks is []; it has to be a list of at least one part"),
        (lambda m: m.update(classes=[]), "at least one class"),
        (lambda m: m["verified"].update(outputs={"stem": [1, 2]}), "stem is [1, 2]; it has to be a list of 32 n"),
        (lambda m: m.update(verified=3), "verified is 3; it has to be a group of keys (agreement"),
        (lambda m: m["verified"].update(tolerance="x"), "tolerance is 'x'; it has to be a number (at verified"),
    ],
)  # fmt: skip
def test_a_wrong_manifest_is_explained_in_plain_words(folder, edit, what):
    change(folder, edit)
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    assert what in str(caught.value)
    assert "`" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "manifest.json:1:1: not JSON, expecting value"),
        (b'{"schema": 2,\n "opset": }', "manifest.json:2:11: not JSON, expecting value"),
        (b'{"schema": 2, "x": "\xff"}', "manifest.json: not JSON"),
        (b"\x7fELF\x00", ": not JSON"),
        (b"[" * 100_000, ": not JSON"),
        (b"[]", "manifest.json: the file is []; it has to be a group of keys"),
        (b'{"schema": 1}', "has schema 1, not 2: made by an older ls-edge; export again"),
        (b'{"schema": "\\u001b[2J"}', r"has schema '\x1b[2J'"),
        (b'{"schema": 2, "' + b"k" * 30_000_000 + b'": 1}', "manifest.json: larger than 4000000 bytes"),
    ],
)
def test_invalid_json_is_reported_with_its_place(folder, raw, what):
    (folder / "manifest.json").write_bytes(raw)
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    assert what in str(caught.value)
