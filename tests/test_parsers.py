"""Parsers of what others write end with a result or with one line, whatever they read.

``HYPOTHESIS_PROFILE=explore`` tries more. Examples are inputs that once were slow, took much memory, or ended in a
traceback.
"""

import bz2
import copy
import gzip
import io
import json
import lzma
import random
import tarfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from ls_edge.core.bundle import MANIFEST, Bundle, ImageSpec
from ls_edge.core.errors import BundleError, ConfigError, DataError, LsEdgeError
from ls_edge.core.peers_file import parse_peers
from ls_edge.core.validation import InvalidDocument, decode_json
from ls_edge.data.datasets import open_data
from ls_edge.data.decoders import Decoders
from ls_edge.device.profile import SCHEMA, DeviceProfile
from ls_edge.runtime.change.record import StoreRecord
from ls_edge.runtime.serve import inference_protocol as v2
from tests.data import bombs

pytestmark = pytest.mark.release

PEERS = {
    "sources": [{"name": "laptop", "public_key": "a" * 40, "may_push": True}],
    "peers": [
        {"name": name, "address": f"tcp://10.0.0.{index}:5555", "blocks": blocks, "public_key": name * 40}
        for index, (name, blocks) in enumerate((("b", "stem, 0-5"), ("c", [6, 7]), ("d", "all")), 1)
    ],
    "heartbeat": {"timeout_ms": 1000, "slowest_mbit": 1.5},
}
MANIFESTS = [json.loads((Path(__file__).parents[1] / "examples" / "pretrained" / "bundle" / MANIFEST).read_text())]
REQUEST = {
    "id": "1", "parameters": {"timeout": 1000, "binary_data_output": True}, "outputs": [{"name": "logits"}],
    "inputs": [{"name": "input", "shape": [1, 3, 2, 2], "datatype": "FP32", "data": [[0.5] * 4] * 3}],
}  # fmt: skip
BARE = [
    "01:01:01", "2026-13-45", "!!bool maybe", "!!timestamp x", '"\\ud800"', "!!python/object:os.x {}", "<<", "*a",
    "&a 1", "9" * 5000, "1e999", ".nan", "~", "off", "0x1F", "- - -", "{", "[", "? ", "%TAG ! x", "NaN", "-0", "1_000",
    "",
]  # fmt: skip
"""Values as they stand in a file."""
ODD = st.one_of(
    st.sampled_from([None, True, -1, 0, 2**63, 1e308, "", "x" * 5000, "\0", "0-9999," * 300, [], {}, [[]] * 999]),
    st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers(), max_size=9),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)  # fmt: skip


@st.composite
def changed(draw, document, bare=()):
    """A document with some of its values replaced, removed, repeated or moved, as bytes."""
    value = json.loads(json.dumps(document))
    texts = {}
    for _ in range(draw(st.integers(1, 4))):
        here = value
        for _ in range(draw(st.integers(0, 5))):
            inner = here[draw(st.sampled_from(sorted(here)))] if isinstance(here, dict) and here else None
            inner = draw(st.sampled_from(here)) if isinstance(here, list) and here else inner
            here = inner if isinstance(inner, (dict, list)) and inner else here
        new = copy.deepcopy(draw(ODD))
        if bare and draw(st.booleans()):
            new = f"\N{SNOWMAN}{len(texts)}"
            texts[json.dumps(new)] = draw(st.sampled_from(bare))
        if isinstance(here, list):
            here[draw(st.integers(0, len(here) - 1)) :] = [new] * draw(st.integers(0, 3)) if here else []
        elif draw(st.booleans()):
            here[draw(st.sampled_from(sorted(here)))] = new
        else:
            here[draw(st.sampled_from([*here, "x" * 900, "\N{SNOWMAN}", "1"]))] = new
    text = json.dumps(value, indent=draw(st.sampled_from([None, 1])))
    for mark, written in texts.items():
        text = text.replace(mark, written)
    raw = text.encode("utf-8", "surrogatepass")
    cut = draw(st.integers(0, 3 * len(raw)))
    return raw[:cut] if cut < len(raw) else raw


def ends(call, *errors):
    """Call a parser, which may raise only these errors, whose text is one short line."""
    text = ""
    try:
        call()
    except errors as error:
        text = str(error)
    assert "\n" not in text
    assert len(text) < 1200


@given(changed(PEERS, BARE))
@example(b"peers: " + b":".join([b"01"] * 60_000))
@example(b"peers: [" + b"1," * 200_000 + b"]")
@example(b"insecure: !!bool maybe\npeers: []")
@example(b'peers: "\\ud800"')
@example(b"".join(b"%%TAG !a%d! b\n" % index for index in range(20_000)) + b"--- a")
@example(b"peers: &a [*a, *a]")
def test_a_peers_file_is_read_or_refused(raw):
    ends(lambda: parse_peers(raw, Path("peers.yaml")), ConfigError)


@given(st.sampled_from(MANIFESTS).flatmap(changed))
@example(b'{"schema": 2, "' + b"k" * 3_000_000 + b'": 1}')
@example(b'{"schema": 2, "x": [' + b"[]," * 900_000 + b"[]]}")
@example(b'{"schema": 2, "x": ' + b"[" * 3_000_000)
@example(b'{"schema": ' + b"9" * 5000 + b"}")
def test_documents_in_json_are_read_or_refused(raw):
    ends(lambda: Bundle.of_manifest(Path("bundle"), raw), BundleError)
    ends(lambda: decode_json(raw, DeviceProfile, SCHEMA), InvalidDocument)
    ends(lambda: decode_json(raw, StoreRecord), InvalidDocument)


@given(changed(REQUEST, BARE), st.binary(max_size=20), st.one_of(st.none(), st.integers(0, 2000)))
def test_requests_are_read_or_refused(raw, binary, length):
    def read():
        request, rest = v2.parse_request(raw + binary, length)
        v2.images_of(request, rest, (2, 2), lambda image, name: image, is_thin=False)

    v2.timeout_of(raw + binary, length)
    ends(read, DataError)


NAMES = st.sampled_from(
    ["cat/1.png", "dog/2.png", "cat", "dog", "l", "cat/l", "../x.png", "/etc/x.png", "train/a/1.png", "val/a/2.png",
     "", "a/" * 200 + "1.png", "9" * 99 + "/1.png", "n.tar", "cat/n.tar.gz", ".x/1.png", "x" * 300 + ".png",
     "caf\xe9/1.png"]
)  # fmt: skip
SIZES = st.sampled_from([0, 1, -1, -512, -1024, 511, 1 << 40, 1 << 80])


@st.composite
def tars(draw):
    """A tar of odd members, some of whose bytes are changed, and which may be compressed or cut off."""
    stream = io.BytesIO()
    form = draw(st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for _ in range(draw(st.integers(1, 8))):
            member = tarfile.TarInfo(draw(NAMES) or "x")
            member.type = draw(st.sampled_from([b"0", b"0", b"0", b"1", b"2", b"2", b"3", b"5", b"7", b"S", b"g"]))
            member.linkname = draw(NAMES)
            if draw(st.booleans()):
                keys = st.sampled_from(
                    ["size", "path", "linkpath", "GNU.sparse.map", "GNU.sparse.size", "GNU.sparse.major"]
                )
                values = st.one_of(SIZES.map(str), st.sampled_from(["0,1,-5,7", "1", "0", "\0", "9" * 300]))
                member.pax_headers = draw(st.dictionaries(keys, values, max_size=4))
            content = draw(st.sampled_from([b"", b"x", b"x" * 600]))
            member.size = len(content) if member.isreg() else 0
            archive.addfile(member, io.BytesIO(content))
    raw = bytearray(stream.getvalue())
    if draw(st.booleans()):  # the size of a header, whose sum is corrected
        size = draw(SIZES)
        raw[124:136] = (size & ((1 << 96) - 1)).to_bytes(12, "big") if size < 0 else b"\x80" + size.to_bytes(11, "big")
        raw[148:156] = b" " * 8
        raw[148:156] = b"%06o\0 " % sum(raw[:512])
    for _ in range(draw(st.integers(0, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    pack = draw(st.sampled_from([bytes, bytes, gzip.compress, bz2.compress, lzma.compress]))
    packed = pack(bytes(raw))
    return packed[: draw(st.sampled_from([len(packed), len(packed), len(packed) // 2]))]


@given(tars(), st.sampled_from(["train", "eval"]))
def test_a_tar_is_read_or_refused(tmp_path_factory, raw, part):
    path = tmp_path_factory.getbasetemp() / "odd.tar"
    path.write_bytes(raw)

    def read():
        for image in open_data(str(path), part).images:
            image.read()

    ends(read, LsEdgeError)


FILES = [
    bombs.flat(40, format_) for format_ in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
] + [
    bombs.save(Image.new("RGB", (40, 40)), "JPEG", exif=bombs.rationals(9), progressive=True),
    bombs.save(Image.new("F", (9, 9)), "TIFF"), bombs.animation("GIF", 9), bombs.jpeg_of_scans(64, 9),
    bombs.tiff_of_overlapping_tags(50, 1 << 10), bombs.bmp_of_runs(20), bombs.png_of_chunks(9), bombs.gif_of_blocks(9),
]  # fmt: skip
SPEC = ImageSpec((16, 16), (0.5,) * 3, (0.5,) * 3)


@pytest.fixture(scope="module")
def decoders():
    with Decoders() as found:
        yield found


@pytest.mark.leaks_ok
@given(st.sampled_from(FILES), st.integers(0, 2**32), st.integers(0, 6))
def test_an_image_is_decoded_or_refused(decoders, content, seed, changes):
    raw, rng = bytearray(content), random.Random(seed)
    for _ in range(changes):
        at = rng.randrange(min(len(raw), rng.choice((30, 300, 1 << 20))))
        raw[at : at + rng.randrange(5)] = rng.choice((b"\xff", b"\0", b"\xff\xff\xff\x7f", rng.randbytes(3), raw[:9]))
    ends(lambda: decoders.decode(SPEC, bytes(raw)), DataError)


def test_the_documents_are_valid_without_changes():
    parse_peers(json.dumps(PEERS).encode(), Path("peers.yaml"))
    Bundle.of_manifest(Path("bundle"), json.dumps(MANIFESTS[0]).encode())
    request, rest = v2.parse_request(msgspec.json.encode({**REQUEST, "inputs": REQUEST["inputs"]}), None)
    assert v2.images_of(request, rest, (2, 2), lambda image, name: image, is_thin=False)[0].shape == (3, 2, 2)
