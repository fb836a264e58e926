"""Write what is generated of the protocol: ``vectors.json``, and the tables of fields in ``PROTOCOL.md``.

    python -m tests.runtime.protocol.generate

Of a table, the last column is written by hand. ``test_vectors.py`` compares both files with what this module makes.
"""

import hashlib
import json
import math
import re
import struct
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from ls_edge.core.parts import HEAD, STEM
from ls_edge.core.peer_reports import TrackSpan, Visit
from ls_edge.runtime.protocol import codecs, framing
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import (
    Accept,
    Bye,
    Cancel,
    Chunk,
    Complaint,
    FileVersion,
    FindingRow,
    Findings,
    Hello,
    Inspect,
    Install,
    Itinerary,
    Moved,
    Offer,
    Progress,
    Refuse,
    Release,
    Run,
    State,
    Stored,
    TrackRef,
    TransferId,
    Want,
    Welcome,
)

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[2] / "runtime" / "protocol" / "PROTOCOL.md"
VECTORS = HERE / "vectors.json"
STRUCTURES = {
    **{kind.__struct_config__.tag: kind for kind in get_args(wire.Message)},
    **{kind.__name__: kind for kind in (FindingRow, FileVersion, TransferId, Itinerary, TrackRef, Visit, TrackSpan)},
}

# Tables.


def fields(heading):
    """Name, type, allowed values and default of each field of a message or structure."""
    kind = STRUCTURES[heading]
    names = getattr(kind, "__struct_fields__", None) or kind._fields
    defaults = getattr(kind, "__struct_defaults__", ())
    hints = get_type_hints(kind, include_extras=True)
    for index, name in enumerate(names):
        at = index - (len(names) - len(defaults))
        yield name, *_described(hints[name]), "" if at < 0 else _default(defaults[at])


def _described(hint, metas=()):
    """Type and allowed values of a field."""
    if get_origin(hint) is Annotated:
        return _described(get_args(hint)[0], hint.__metadata__)
    arguments = [one for one in get_args(hint) if one not in (msgspec.UnsetType, type(None), ...)]
    if get_origin(hint) is tuple and len(get_args(hint)) == 2 and get_args(hint)[1] is ...:
        kind, allowed = _described(arguments[0])
        most = [f"at most {meta.max_length}" for meta in metas if meta.max_length is not None]
        return f"[{kind}]", "; ".join(filter(None, [*most, allowed]))
    if get_origin(hint) is tuple:
        return f"({', '.join(_described(one)[0] for one in arguments)})", ""
    if arguments:  # a union with None or UNSET
        return _described(arguments[0], metas)
    return hint.__name__, "; ".join(filter(None, (_allowed(meta, hint) for meta in metas)))


def _allowed(meta, hint):
    if hint in (int, float):
        most = meta.le if meta.lt is None else meta.lt - 1
        return f"{meta.ge} to {_number(2**64 - 1 if most is None else int(most))}"
    if meta.pattern is not None and meta.max_length is None:
        return "name"
    unit = " bytes" * (hint is bytes)
    least, most = meta.min_length or 0, meta.max_length
    return f"{least}{unit}" if least == most else f"{least} to {most}{unit}" if least else f"≤ {most}{unit}"


def _number(value):
    for shown in (value, value + 1, value + 2):
        if value > 4096 and shown.bit_count() == 1:
            return f"2^{shown.bit_length() - 1}" + (f"-{shown - value}" if shown > value else "")
    return f"{value}"


def _default(value):
    if value is msgspec.UNSET:
        return "left out"
    return "empty" if value in ("", b"", ()) else f"{msgspec.json.encode(value).decode()}".strip('"')


def document(text):
    """The document with its tables of fields as they have to be."""
    for heading in STRUCTURES:
        before, mark, rest = text.partition(f"\n### {heading}\n")
        table = re.search(r"^\| field .*\n\|.*\n((?:\|.*\n)*)", rest, re.M)
        rows = [re.split(r"(?<!\\)\|", line.strip("|")) for line in table[1].splitlines()]
        meanings = {row[0].strip().strip("`"): row[-1].strip() for row in rows}
        lines = ["| field | type | allowed | default | meaning |", "| --- | --- | --- | --- | --- |"]
        for name, *cells in fields(heading):
            lines.append(" | ".join([f"| `{name}`", *cells, meanings.get(name, "")]) + " |")
        text = before + mark + rest[: table.start()] + "\n".join(lines) + "\n" + rest[table.end() :]
    return text


# Messages: one story, and others.

LAPTOP = "laptop.5f3c9a10"
REQUEST = bytes.fromhex("6f1d0b2c9a8e47f3b1c65d20e7fa4c18")
BRANCH = 0x4B7A19C0D35E8F26
MODEL, BUNDLE = "7a55ad5b68d823ca", "a62094a18cab24ed"
FIRST, SECOND, HOME = (TransferId(REQUEST, BRANCH, hop) for hop in (1, 2, 3))
BY_A = ((((0, "a"), (1, "a")),),)
MANIFEST, ACTIVE, PART = (hashlib.sha256(text).digest() for text in (b"offered", b"served", b"block 2"))
VISIT_A = Visit("a", (0, 1), 210, 3100, 40)
ASKED = Itinerary(LAPTOP, "nearest", (0, 1, 2, 3), 1)
AT_B = Itinerary(LAPTOP, "nearest", (2, 3), 1, BY_A, (), (VISIT_A,))
EXAMPLES = {
    "hello": Hello(LAPTOP, "source", 3811234567890123456, 0, MODEL, BUNDLE),
    "welcome": Welcome("a", "peer", 991, 0, MODEL, BUNDLE, (0, 1, 2), "onnx CPUExecutionProvider", "fp16"),
    "state": State(True, False, False, 7, 1, 4711, 1500, 1200, ("b", LAPTOP), (2, 3)),
    "bye": Bye("draining"),
    "run": Run(SECOND, 9_992_300, AT_B, "raw", 17, 192),
    "accept": Accept(SECOND, 6),
    "refuse": Refuse(SECOND, "busy"),
    "progress": Progress(SECOND),
    "release": Release(FIRST, "b", 640),
    "moved": Moved(SECOND, "a"),
    "cancel": Cancel((REQUEST,), 9_984_000),
    "complaint": Complaint("tokens frame of 12 bytes, 13056 expected for 17 x 192 as raw; dropped"),
    "offer": Offer(MANIFEST, 5210),
    "want": Want(PART, 98304, 49152),
    "chunk": Chunk(PART, 98304, b"\x08\x0a\x12\x07pytorch"),
    "inspect": Inspect(),
    "findings": Findings(
        (FindingRow("ok", "Python", "3.10.12"), FindingRow("warn", "disk", "1.2 GB free", "make room"))
    ),
    "install": Install(MANIFEST),
    "stored": Stored("receiving", MANIFEST, ACTIVE, b"", 2, 178_400, 80_096),
}  # fmt: skip


_WAVE = ((((0, "a"), (1, "a")),), (((2, "a"),), ((3, "b"),)))
_ROW = TrackSpan(0, "b", (3,), 5000, 9200, 4100, 20, 1500, 30)
_LOST = TrackSpan(1, "c", (), 9300, 9300, 80000, why="lost")
_ANOTHER = bytes(range(16))
MORE = {
    "hello of a peer": Hello("b", "peer", 2**64 - 1, 2**16 - 1, MODEL, BUNDLE, (2, 3), "onnx", "int8"),
    "hello that uses all defaults": Hello("b", "peer", 0, 0, "", ""),
    "state of one that is not warm": State(False, False, False, 0, 0, 0, 0),
    "state with the largest numbers": State(
        True, True, True, 2**16 - 1, 2**16 - 1, 2**64 - 1, 2**32 - 1, 2**32 - 1, ("a",), (2**16 - 1,)
    ),
    "bye without a reason": Bye(),
    "run from the source": Run(FIRST, 10_000_000, ASKED, "raw", 17, 192),
    "run of an image": Run(FIRST, 10_000_000, Itinerary("laptop", "nearest", (STEM, 0, 1, HEAD), 0), "image", 7213, 1),
    "run that demands a bundle": Run(FIRST, 10_000_000, ASKED, "raw", 17, 192, bundle_id=BUNDLE),
    "run of logits": Run(
        SECOND,
        9_980_000,
        Itinerary("laptop", "nearest", (), 0, waves=((((STEM, "a"), (0, "a"), (1, "b"), (HEAD, "b")),),)),
        "logits",
        1,
        10,
        "done",
    ),
    "run home, done": Run(
        HOME, 9_980_000,
        Itinerary(LAPTOP, "nearest", (), 1, ((((0, "a"), (1, "a"), (2, "b"), (3, "b")),),), (),
                  (VISIT_A, Visit("b", (2, 3), 5, 3000, 0))),
        "fp16", 17, 192, "done",
    ),
    "run home, unreachable": Run(SECOND, 9_980_000, AT_B, "int8", 17, 192, "unreachable"),
    "run of a track": Run(
        SECOND, 9_000_000,
        Itinerary("a", "parallel", (3,), 0, track=TrackRef(2**64 - 1, 1, 2, LAPTOP)), "raw", 17, 192,
    ),
    "run after a wave": Run(
        HOME, 8_000_000,
        Itinerary(LAPTOP, "parallel", (), 2, _WAVE, (), (Visit("a", (0, 1, 2), 1, 2, 3, 4, (_ROW, _LOST)),),
                  waves_wanted=2),
        "raw", 17, 192, "done",
    ),
    "run with every value of an itinerary": Run(
        TransferId(_ANOTHER, 0, 2**16 - 2), 600_000_000,
        Itinerary("s", "fastest", (5,), 2**16 - 1, BY_A, (2, 3), (VISIT_A,), ("c",), 3,
                  TrackRef(0, 0, 0, "t"), ("d", "e")),
        "raw", 2**20, 1, "hops",
    ),
    "accept of the largest transfer": Accept(TransferId(b"\xff" * 16, 2**64 - 1, 2**16 - 2), 2**16 - 1),
    "refuse with credits": Refuse(SECOND, "draining", 3),
    "cancel of nothing": Cancel((), 0),
    "cancel of two": Cancel((REQUEST, _ANOTHER), 600_000_000),
    "complaint of another model": Complaint("a serves model 12…", MODEL),
    "hello of a pusher": Hello(LAPTOP, "pusher", 5, 1, "", ""),
    "findings of none": Findings(()),
    "inspect that measures": Inspect(4_000),
    "inspect that asks for events": Inspect(events=True),
    "findings with a document": Findings((), b'{"schema": 1}'),
    "offer of a bundle that was kept": Offer(ACTIVE, 0),
    "offer of the longest manifest": Offer(MANIFEST, 4_000_000),
    "want of the last byte that can be": Want(PART, 2**40 - 1, 1),
    "chunk of one byte": Chunk(PART, 0, b"\0"),
    "stored in an empty store": Stored("idle"),
    "stored, building": Stored("building", MANIFEST, ACTIVE, b"", 2, 178_400, 0, "", 1, 2, "block 3: step 4 of 9"),
    "stored, failed": Stored(
        "failed", MANIFEST, ACTIVE, PART, 2**16 - 1, 2**40 - 1, 2**40 - 1, "disk full at /store; make room"
    ),
}  # fmt: skip


def _pack(fields):
    return b"LS\x01" + msgspec.msgpack.encode(fields)


def _plain(message, **changes):
    return {**msgspec.to_builtins(message, builtin_types=(bytes,)), **changes}


def _itinerary(**changes):
    values = {name: getattr(AT_B, name) for name in Itinerary.__struct_fields__}
    return list(msgspec.to_builtins({**values, **changes}, builtin_types=(bytes,)).values())


RUN = EXAMPLES["run"]
ACCEPT = EXAMPLES["accept"]
_WIDE = (
    b"LS\x01\xdf\0\0\0\3\xd9\x07credits\xcf\0\0\0\0\0\0\0\6\xda\0\x08transfer\xdc\0\3\xc5\0\x10" + REQUEST
    + b"\xcf" + struct.pack(">Q", BRANCH) + b"\xd3\0\0\0\0\0\0\0\2\xdb\0\0\0\1t\xa6accept"
)  # fmt: skip
# Not what the reference writes, but what everybody has to read.
READ_ONLY = {
    "accept in the widest formats and another order": (_WIDE, ACCEPT),
    "fields that are not known": (_pack(_plain(ACCEPT, added_later=[1, {"x": None}, b"\0"])), ACCEPT),
    "a key that stands twice": (b"LS\x01\x83\xa1t\xa3bye\xa6reason\xa1a\xa6reason\xa1b", Bye("b")),
    "defaults left out": (b"LS\x01\x81\xa1t\xa3bye", Bye()),
    "itinerary cut behind its last value without a default": (
        _pack(_plain(RUN, itinerary=_itinerary()[:4])),
        msgspec.structs.replace(RUN, itinerary=msgspec.structs.replace(AT_B, waves=(), visits=())),
    ),
    "itinerary with values that are not known": (_pack(_plain(RUN, itinerary=[*_itinerary(), "later", 1])), RUN),
}
MALFORMED = {
    "empty frame": b"",
    "three bytes": b"LS\x01",
    "other magic": b"GET / HTTP/1.1\r\n",
    "older major version": b"LS\x00" + framing.encode(Bye())[3:],
    "newer major version": b"LS\x02" + framing.encode(Bye())[3:],
    "truncated": framing.encode(RUN)[:-1],
    "something behind the map": framing.encode(Bye()) + b"\0",
    "no kind": b"LS\x01\x80",
    "unknown kind": _pack({"t": "walk"}),
    "kind that is a number": _pack({"t": 1}),
    "an array": _pack([1, 2]),
    "no message": _pack([]),
    "65 messages": _pack([{"t": "bye"}] * 65),
    "message in an array in an array": _pack([[{"t": "bye"}]]),
    "second message cut off": framing.join([framing.encode_body(wire.Bye())] * 2)[:-1],
    "three announced, two there": b"LS\x01\x93" + 2 * framing.encode_body(wire.Bye()),
    "third message behind two": b"LS\x01\x92" + 3 * framing.encode_body(wire.Bye()),
    "second message out of range": _pack([{"t": "bye"}, _plain(EXAMPLES["accept"], credits=-1)]),
    "nesting that never ends": b"LS\x01\x82\xa1t\xa3bye\xa1x" + b"\x91" * 2000 + b"\x90",
    "length beyond the frame": b"LS\x01\x82\xa1t\xa5hello\xa6blocks\xdd\xff\xff\xff\xff",
    "text that is not UTF-8": b"LS\x01\x82\xa1t\xa3bye\xa6reason\xa2\xff\xfe",
    "key that is bytes": b"LS\x01\x82\xa1t\xa3bye\xc4\x06reason\xa1b",
    "key that is a number": b"LS\x01\x82\xa1t\xa3bye\x01\xa1b",
    "reserved format c1": b"LS\x01\x82\xa1t\xa3bye\xa6reason\xc1",
    "field without a default is missing": _pack({"t": "accept", "credits": 1}),
    "text for an integer": _pack(_plain(ACCEPT, credits="3")),
    "float for an integer": _pack(_plain(ACCEPT, credits=3.0)),
    "bool for an integer": _pack(_plain(ACCEPT, credits=True)),
    "nil for an integer": _pack(_plain(ACCEPT, credits=None)),
    "integer for a bool": _pack(_plain(EXAMPLES["state"], warm=1)),
    "bytes for text": _pack(_plain(Bye(), reason=b"why")),
    "text for bytes": _pack(_plain(ACCEPT, transfer=["x" * 16, 1, 1])),
    "nil for a default": _pack(_plain(Bye(), reason=None)),
    "negative credits": _pack(_plain(ACCEPT, credits=-1)),
    "credits of 2^16": _pack(_plain(ACCEPT, credits=2**16)),
    "transfer of two values": _pack(_plain(ACCEPT, transfer=[REQUEST, 1])),
    "transfer of four values": _pack(_plain(ACCEPT, transfer=[REQUEST, 1, 1, 1])),
    "request of 15 bytes": _pack(_plain(ACCEPT, transfer=[REQUEST[:15], 1, 1])),
    "branch below 0": _pack(_plain(ACCEPT, transfer=[REQUEST, -1, 1])),
    "hop of 2^16-1": _pack(_plain(ACCEPT, transfer=[REQUEST, 1, 2**16 - 1])),
    "name that is empty": _pack(_plain(Release(FIRST, "b"), holder="")),
    "name of 64 characters": _pack(_plain(Release(FIRST, "b"), holder="n" * 64)),
    "name that begins with a dot": _pack(_plain(Release(FIRST, "b"), holder=".b")),
    "name with a letter beyond ASCII": _pack(_plain(Release(FIRST, "b"), holder="bär")),
    "name that ends with a line break": _pack(_plain(Release(FIRST, "b"), holder="b\n")),
    "text of 257 characters": _pack(_plain(Bye(), reason="x" * 257)),
    "explanation of 4097 characters": _pack(_plain(Complaint("x"), what="x" * 4097)),
    "escape sequence in a text": _pack(_plain(EXAMPLES["hello"], model_id="\x1b[31mred")),
    "line break in a text": _pack(_plain(Bye(), reason="a\nb")),
    "no-break space in a text": _pack(_plain(Bye(), reason="a\u00a0b")),
    "time of 2^32 us": _pack(_plain(EXAMPLES["state"], block_us=2**32)),
    "budget above 600 s": _pack(_plain(RUN, budget_us=600_000_001)),
    "cancel for above 600 s": _pack(_plain(EXAMPLES["cancel"], budget_us=600_000_001)),
    "cancel of 1025 requests": _pack(_plain(EXAMPLES["cancel"], requests=[b"\0" * 16] * 1025)),
    "canceled request of 17 bytes": _pack(_plain(EXAMPLES["cancel"], requests=[REQUEST + b"\0"])),
    "no tokens": _pack(_plain(RUN, count=0)),
    "too many tokens": _pack(_plain(RUN, count=2**20 + 1)),
    "tokens without values": _pack(_plain(RUN, dim=0)),
    "block that ran and remains": _pack(_plain(RUN, itinerary=_itinerary(remaining=[1, 2]))),
    "block that remains twice": _pack(_plain(RUN, itinerary=_itinerary(remaining=[2, 2]))),
    "block that was skipped and remains": _pack(_plain(RUN, itinerary=_itinerary(skipped=[2]))),
    "block of 2^16": _pack(_plain(RUN, itinerary=_itinerary(remaining=[2**16]))),
    "wave without a track": _pack(_plain(RUN, itinerary=_itinerary(waves=[[]]))),
    "track without a step": _pack(_plain(RUN, itinerary=_itinerary(waves=[[[]]]))),
    "step of three values": _pack(_plain(RUN, itinerary=_itinerary(waves=[[[[0, "a", 1]]]]))),
    "17 names to be avoided": _pack(_plain(RUN, itinerary=_itinerary(avoid=[f"p{i}" for i in range(17)]))),
    "itinerary of three values": _pack(_plain(RUN, itinerary=_itinerary()[:3])),
    "itinerary that is a map": _pack(_plain(RUN, itinerary={"source": "a"})),
    "visit with a time below 0": _pack(_plain(RUN, itinerary=_itinerary(visits=[["a", [0], -1, 0, 0]]))),
    "finding without a detail": _pack({"t": "findings", "rows": [["ok", "Python"]]}),
    "65 findings": _pack({"t": "findings", "rows": [["ok", "a", "b"]] * 65}),
    "finding with a line break": _pack({"t": "findings", "rows": [["ok", "a", "b\nc"]]}),
    "digest of 31 bytes": _pack(_plain(EXAMPLES["install"], manifest=MANIFEST[:31])),
    "digest that is text": _pack(_plain(EXAMPLES["install"], manifest="a" * 32)),
    "no digest at all in an offer": _pack(_plain(EXAMPLES["offer"], manifest=b"")),
    "digest of 33 bytes in stored": _pack(_plain(EXAMPLES["stored"], active=b"a" * 33)),
    "manifest longer than may be offered": _pack(_plain(EXAMPLES["offer"], size=4_000_001)),
    "want of nothing": _pack(_plain(EXAMPLES["want"], size=0)),
    "want of more than a chunk": _pack(_plain(EXAMPLES["want"], size=49_153)),
    "want below the start": _pack(_plain(EXAMPLES["want"], offset=-1)),
    "want at 2^40": _pack(_plain(EXAMPLES["want"], offset=2**40)),
    "chunk without bytes": _pack(_plain(EXAMPLES["chunk"], data=b"")),
    "chunk that is text": _pack(_plain(EXAMPLES["chunk"], data="abc")),
    "stored with 2^16 parts": _pack(_plain(EXAMPLES["stored"], parts=2**16)),
    "stored with a line break in its reason": _pack(_plain(EXAMPLES["stored"], reason="a\nb")),
    "track whose origin is no name": _pack(_plain(RUN, itinerary=_itinerary(track=[1, 0, 0, "a/b"]))),
}  # fmt: skip

_VALUES = np.array([[[1.0, -2.0, 0.0], [0.5, 0.1, -0.30000001192092896]]], np.float32)
_WILD = np.array([[[1e5, -7e4, 1.0], [2.0**-14, 2.0**-24, 0.0]]], np.float32)
_ODD = np.array([[[1.0, np.nan, 0.0], [np.inf, 1.0, 2.0], [3.0, 2.0, 1.0]]], np.float32)
MALFORMED_TOKENS = {
    "one byte short": ("raw", 2, 3, b"\0" * 23), "one byte more": ("fp16", 2, 3, b"\0" * 13),
    "a scale short": ("int8", 2, 3, b"\0" * 10), "unknown codec": ("zip", 2, 3, b"\0" * 24),
}  # fmt: skip


def plain(value):
    """As JSON: bytes and large integers as objects, everything else as it is."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**53:
        return {"int": str(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def fields_of(message):
    return plain(_plain(message))


def _floats(values):
    return [[None if math.isnan(x) else x if math.isfinite(x) else str(x) for x in row] for row in values[0].tolist()]


def _tokens(name, kind, values):
    frame = bytes(codecs.encode(kind, values))
    count, dim = values.shape[1:]
    read = codecs.decode(kind, frame, count, dim)
    return {
        "name": name, "codec": kind, "count": count, "dim": dim, "hex": frame.hex(), "values": _floats(read),
        "written_from": _floats(values),
    }  # fmt: skip


SEVERAL = {
    "one in an array": [EXAMPLES["accept"]],
    "accept and moved": [EXAMPLES["accept"], EXAMPLES["moved"]],
    "run between others": [EXAMPLES["release"], RUN, EXAMPLES["state"], RUN],
    "sixteen": [EXAMPLES["progress"]] * 16,
    "as many as may be": [EXAMPLES["release"]] * 64,
}


def _several(messages):
    bodies = [framing.encode_body(message) for message in messages]
    return framing.join(bodies) if len(bodies) > 1 else b"LS\x01\x91" + bodies[0]


def _reason(frame):
    try:
        framing.decode(frame)
    except framing.WireError as error:
        return str(error)[:120]
    raise AssertionError("this is well formed")


def vectors():
    said = {f"example {name}": message for name, message in EXAMPLES.items()} | MORE
    messages = [
        {"name": name, "hex": framing.encode(message).hex(), "message": fields_of(message), "canonical": True}
        for name, message in said.items()
    ]
    messages += [
        {"name": name, "hex": frame.hex(), "message": fields_of(message), "canonical": False}
        for name, (frame, message) in READ_ONLY.items()
    ]
    tokens = [
        _tokens(f"{name}, {kind}", kind, values)
        for name, values in (("plain", _VALUES), ("beyond half precision", _WILD), ("not finite", _ODD))
        for kind in codecs.CODECS
    ]
    return {
        "about": "Test vectors of the protocol; runtime/protocol/PROTOCOL.md, 'Test vectors', defines the keys.",
        "major": wire.MAJOR,
        "minor": wire.MINOR,
        "messages": messages,
        "several": [
            {"name": name, "hex": _several(found).hex(), "messages": [fields_of(message) for message in found]}
            for name, found in SEVERAL.items()
        ],
        "malformed": [
            {"name": name, "hex": frame.hex(), "reason": _reason(frame)} for name, frame in MALFORMED.items()
        ],
        "tokens": tokens,
        "malformed_tokens": [
            {"name": name, "codec": kind, "count": count, "dim": dim, "hex": frame.hex(), "reason": name}
            for name, (kind, count, dim, frame) in MALFORMED_TOKENS.items()
        ],
    }


def vectors_text():
    made = vectors()
    lines = [
        f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in made.items()
        if not isinstance(value, list)
    ]
    for key, value in made.items():
        if isinstance(value, list):
            rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value)
            lines.append(f" {json.dumps(key)}: [\n  {rows}\n ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    VECTORS.write_text(vectors_text(), encoding="utf-8")
