"""Write what is generated of the protocol's description: vectors.json, and the marked parts of PROTOCOL.md.

    python tests/conformance/generate.py

Grammar, examples and transcripts stand in ``runtime/protocol/PROTOCOL.md`` between ``<!-- generated: ... -->`` and
``<!-- end -->``. ``test_vectors.py`` compares both files with what this module makes.
"""

import hashlib
import json
import math
import re
import struct
from pathlib import Path

import msgspec
import numpy as np

from ls_edge.core.parts import HEAD, STEM
from ls_edge.core.records import TrackSpan, Visit
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
from ls_edge.runtime.routing.state.events import Complete, Compute, Forward, Note, Send
from ls_edge.runtime.simulator.simulation import SOURCE
from tests.faults.simulation import FaultySimulation

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "runtime" / "protocol" / "PROTOCOL.md"
VECTORS = HERE / "vectors.json"

# Grammar, from the tables of PROTOCOL.md.

MESSAGES = (
    "hello", "welcome", "state", "bye", "run", "accept", "refuse", "progress", "release", "moved", "cancel",
    "complaint", "offer", "want", "chunk", "install", "stored", "inspect", "findings",
)  # fmt: skip
ARRAYS = ("TransferId", "Itinerary", "TrackRef", "Visit", "TrackSpan", "FindingRow", "FileVersion")
_NUMBERS = {
    "0 to 2^16-1": "u16", "0 to 2^16-2": "hops", "0 to 2^32-1": "us", "0 to 2^64-1": "u64", "1 to 2^20": "size",
    "0 to 600000000": "budget", "0 to 16777216": "manifest-size", "0 to 2^40-1": "u40", "1 to 49152": "chunk-size",
    "0 to 1000000": "latency_weight", "0 to 60000": "measure",
}  # fmt: skip
_RULES = """
name    = tstr .regexp "[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
text    = tstr .size (0..1024)   ; at most 256 characters, printable
long    = tstr .size (0..16384)  ; at most 4096 characters
id      = bytes .size 16
u16     = 0..65535
hops    = 0..65534
us      = 0..4294967295
u64     = 0..18446744073709551615
size    = 1..1048576
budget  = 0..600000000
measure = 0..60000
manifest-size    = 0..16777216
chunk-size       = 1..49152
u40     = 0..1099511627775
digest  = bytes .size 32
latency_weight   = 0.0..1000000.0 / 0..1000000
ran     = [block: u16, holder: name]
waves   = [* [+ [+ ran]]]"""


def tables(text):
    """The rows of the table of each message and structure in the document: name, type, range, meaning."""
    found = {}
    for heading in (*MESSAGES, *ARRAYS):
        section = re.split(r"\n#+ ", re.split(rf"\n### {heading}\n", text)[1])[0]
        lines = [line for line in section.splitlines() if line.startswith("|")][2:]
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
        found[heading] = [(name.strip("`"), kind.strip("`").replace("\\|", "|"), *rest) for name, kind, *rest in cells]
    return found


def _rule(kind, bounds, heading, name):
    if kind.startswith("tuple[tuple[tuple"):
        return "waves"
    if kind.startswith("tuple["):
        most = {
            "requests": "*1024 ",
            "rows": "*64 ",
            "files": "*8 ",
            "behind": "*64 ",
            "avoid": "*16 ",
            "far_blocks": "*6 ",
        }.get(name, "* ")
        return f"[{most}{_rule(kind[6:].removesuffix(', ...]'), bounds, heading, '')}]"
    if kind == "int":
        return _NUMBERS[bounds]
    if kind == "str":
        return {"name": "name", "≤ 256": "text", "≤ 4096": "long"}[bounds]
    if kind == "float":
        return "latency_weight"
    if kind == "bytes":
        return {
            "32 bytes": "digest", "0 or 32 bytes": "digest / h''", "1 to 49152 bytes": "bytes .size (1..49152)",
            "0 to 60000 bytes": "bytes .size (0..60000)",
        }.get(bounds, "id")  # fmt: skip
    return {"bool": "bool", "TrackRef | None": "track-ref / nil"}.get(kind) or _lower(kind)


def _lower(name):
    return re.sub(r"(?<!^)([A-Z])", r"-\1", name).lower()


def grammar(text):
    rows = [" / ".join(MESSAGES[at : at + 6]) for at in range(0, len(MESSAGES), 6)]
    lines = ["message = " + "\n        / ".join(rows), ""]
    for heading, rows in tables(text).items():
        is_map = heading in MESSAGES
        lines.append(f"{_lower(heading)} = " + ("{" if is_map else "["))
        lines += [f'  t: "{heading}",'] if is_map else []
        for name, kind, bounds, meaning in rows:
            optional = "? " if "Default" in meaning else ""
            lines.append(f"  {optional}{name}: {_rule(kind, bounds, heading, name)},")
        lines += ["  * tstr => any", "}"] if is_map else ["]"] if heading == "TransferId" else ["  * any", "]"]
        lines.append("")
    return fenced("cddl", "\n".join(lines) + _RULES)


def fenced(language, text):
    return f"```{language}\n{text}\n```"


# Examples: one story.

LAPTOP = "laptop.5f3c9a10"
REQUEST = bytes.fromhex("6f1d0b2c9a8e47f3b1c65d20e7fa4c18")
BRANCH = 0x4B7A19C0D35E8F26
MODEL, BUNDLE = "7a55ad5b68d823ca", "a62094a18cab24ed"
FIRST, SECOND, HOME = (TransferId(REQUEST, BRANCH, hop) for hop in (1, 2, 3))
BY_A = ((((0, "a"), (1, "a")),),)
MANIFEST, ACTIVE, PART = (hashlib.sha256(text).digest() for text in (b"offered", b"served", b"block 2"))
VISIT_A = Visit("a", (0, 1), 210, 3100, 40)
ASKED = Itinerary(LAPTOP, "nearest", (0, 1, 2, 3), 1)
AT_B = Itinerary(LAPTOP, "nearest", (2, 3), 1, False, BY_A, (), (VISIT_A,))
EXAMPLES = {
    "hello": (
        Hello(LAPTOP, "source", 3811234567890123456, 0, MODEL, BUNDLE),
        {"name": "an alias of 'laptop' in peers.yaml", "incarnation": "of this process", "blocks": "a source has none"},
    ),
    "welcome": (
        Welcome("a", "peer", 991, 0, MODEL, BUNDLE, (0, 1, 2), "onnx CPUExecutionProvider", "fp16"),
        {"model_id": "the same, or it would be a COMPLAINT", "codec": "tokens to a are to be sent in half precision"},
    ),
    "state": (
        State(True, False, False, 7, 1, 4711, 1500, 1200, ("b", LAPTOP), (2, 3), ((), (4, 5))),
        {
            "credits": "this source may send seven more", "queue": "one request is on the engine",
            "block_us": "1.5 ms a block", "wait_us": "1.2 ms until something new would begin",
            "reaches": "links to these", "reach_blocks": "what b serves", "far_blocks": "4 and 5 are three links away",
        },
    ),
    "bye": (Bye("draining"), {}),
    "run": (
        Run(SECOND, 9_992_300, AT_B, "raw", 17, 192),
        {
            "transfer": "second transfer of this branch: from a to b", "budget_us": "9.9923 s of 10 s are left",
            "codec": "of b's WELCOME", "count": "the second frame has 4 * 17 * 192 bytes",
            "returning": "forward",
        },
    ),
    "accept": (Accept(SECOND, 6), {"transfer": "b has it", "credits": "six more from a"}),
    "refuse": (Refuse(SECOND, "busy"), {"reason": "a saw an older number of credits", "credits": "none, still"}),
    "progress": (Progress(SECOND, 3), {"transfer": "to a, which keeps the copy", "blocks_done": "0, 1 and now 2"}),
    "release": (
        Release(FIRST, "b", 640),
        {
            "transfer": "of the RUN from the source to a: sent by a to the source", "holder": "b has accepted",
            "link_us": "0.64 ms after a decided to send",
        },
    ),
    "moved": (Moved(SECOND, "a"), {"transfer": "sent by b to the source", "before": "a keeps the copy before"}),
    "cancel": (Cancel((REQUEST,), 9_984_000), {"requests": "of this source", "budget_us": "of the longest of them"}),
    "complaint": (
        Complaint("tokens frame of 12 bytes, 13056 expected for 17 x 192 as raw; dropped"),
        {"what": "one line for people"},
    ),
    "offer": (
        Offer(MANIFEST, 5210),
        {"manifest": "of a bundle of the same model as float16", "size": "of manifest.json"},
    ),
    "want": (
        Want(PART, 98304, 49152),
        {"digest": "of blocks/02.onnx, from the manifest", "offset": "b has the first two pieces already"},
    ),
    "chunk": (
        Chunk(PART, 98304, b"\x08\x0a\x12\x07pytorch"),
        {"data": "here 11 bytes, really the 49152 that were asked for"},
    ),
    "inspect": (Inspect(), {}),
    "findings": (
        Findings((FindingRow("ok", "Python", "3.10.12"), FindingRow("warn", "disk", "1.2 GB free", "make room"))), {},
    ),
    "install": (Install(MANIFEST), {"manifest": "b said that it is ready"}),
    "stored": (
        Stored("receiving", MANIFEST, ACTIVE, b"", 2, 178_400, 80_096),
        {
            "manifest": "what is offered", "active": "what b serves meanwhile", "previous": "that was its first bundle",
            "parts": "blocks 2 and 3", "missing": "98304 bytes are there",
        },
    ),
}  # fmt: skip


def example(name):
    message, comments = EXAMPLES[name]
    lines = [("{", "")]
    named = {key: getattr(message, key) for key in message.__struct_fields__}
    fields = {"t": name, **{key: value for key, value in named.items() if value is not msgspec.UNSET}}
    for key, value in fields.items():
        if isinstance(value, Itinerary):
            shown = [f"    {_shown(getattr(value, part))}," for part in value.__struct_fields__]
            said = [_ITINERARY.get(part, part) for part in value.__struct_fields__]
            lines += [(f"  {key}: [", ""), *zip(shown, said, strict=True), ("  ],", comments.get(key, ""))]
        else:
            lines.append((f"  {key}: {_shown(value)},", comments.get(key, "")))
    width = min(46, max(len(line) for line, comment in lines if comment) if any(c for _, c in lines) else 0)
    told = [f"{line:<{width}}  // {comment}" if comment else line for line, comment in lines]
    frame = framing.encode(message).hex(" ")
    wrapped = [frame[at : at + 96].rstrip() for at in range(0, len(frame), 96)]
    return fenced("text", "\n".join([*told, "}", "", *wrapped]))


_ITINERARY = {
    "source": "source: the process that the tokens return to",
    "remaining": "remaining: b has both",
    "waves": "waves: one wave of one track: a ran 0, then 1",
    "visits": "visits: 210 us waiting, 3.1 ms computing at a",
}


def _shown(value):
    if isinstance(value, bytes):
        return f"h'{value.hex()[:8]}…'"
    if isinstance(value, (tuple, Visit, TrackRef, TrackSpan, FindingRow, FileVersion)):
        items = value if isinstance(value, tuple) else msgspec.structs.astuple(value)
        return "[" + ", ".join(map(_shown, items)) + "]"
    return "nil" if value is None else json.dumps(value)


# Transcripts, from the simulator.


class Transcript(FaultySimulation):
    """A simulation that writes down what is sent, computed and found out, once :attr:`since` is set."""

    def __init__(self, *args, **named):
        self.since = None
        self.lines = []
        self._seen_draining = set()
        super().__init__(*args, **named)

    def say(self, text):
        if self.since is not None:
            self.lines.append(f"{(self.now - self.since) * 1e3:7.1f}  {text}")

    def begin(self):
        self.run(1.0)
        self.since = self.now

    def leave(self, name):
        self.say(f"{name:<6} -> all     BYE       draining")
        self.processes[name].alive = False
        for other in self.processes:
            self._link_lost(other, name, "left (draining)")

    def _execute(self, process, instruction):
        name = process.name
        if isinstance(instruction, Send) and isinstance(instruction.message, State):
            if instruction.message.draining and name not in self._seen_draining:
                self._seen_draining.add(name)
                self.say(f"{name:<6} -> all     STATE draining")
        elif isinstance(instruction, Send):
            self.say(f"{name:<6} -> {instruction.to:<6}  {_told(instruction.message)}")
        elif isinstance(instruction, Forward):
            self.say(f"{name:<6} -> {instruction.to:<6}  {_told(instruction.run('raw', 1, 1))}")
        elif isinstance(instruction, Compute):
            blocks = ", ".join(map(str, instruction.blocks))
            if process.engine_until > self.now:
                self.at(process.engine_until - self.now, lambda: self.say(f"{name:<6} runs {blocks}"))
            else:
                self.say(f"{name:<6} runs {blocks}")
        elif isinstance(instruction, Note):
            self.say(f"{name:<6} notes  {instruction.what} {instruction.peer}: {instruction.why}")
        elif isinstance(instruction, Complete):
            self.say(f"{name:<6} has the answer of {_shown(instruction.itinerary.waves)}")
        super()._execute(process, instruction)


def _told(message):
    kind = type(message).__name__.upper()
    transfer = getattr(message, "transfer", None)
    told = [f"{kind:<8}"]
    if transfer is not None:
        told.append(f"{transfer.request.hex()[:4]} {transfer.branch >> 48:04x} hop {transfer.hop}")
    if isinstance(message, Run):
        it = message.itinerary
        mark = "" if it.track is None else f"track {it.track.index} of {it.source}, "
        told.append(f"{mark}remaining {_shown(it.remaining)} waves {_shown(it.waves)}")
        told += [f"returning {message.returning}"] * bool(message.returning)
    elif isinstance(message, Cancel):
        told.append(" ".join(request.hex()[:4] for request in message.requests))
    elif isinstance(message, (Accept, Refuse)):
        told += [message.reason] if isinstance(message, Refuse) else []
        told.append(f"credits {message.credits}")
    elif isinstance(message, Progress):
        told.append(f"blocks_done {message.blocks_done}")
    elif isinstance(message, Release):
        told.append(f"holder {message.holder}")
    elif isinstance(message, Moved):
        told.append(f"before {message.before}")
    return "  ".join(told).rstrip()


def chain():
    story = Transcript({"a": [0, 1], "b": [2, 3]}, blocks=4, seed=1, block_seconds=0.05)
    story.begin()
    story.submit()
    story.run(0.5)
    return story


def reroute():
    story = Transcript({"a": [0, 1], "b": [2, 3], "c": [2, 3]}, blocks=4, seed=2)
    story.begin()
    story.submit()
    while not story.processes["b"].machine.rules.engine.running:
        story.run(0.0005)
    story.run(0.003)
    story.say("b      is killed")
    story.kill("b")
    story.run(0.4)
    return story


def wave():
    story = Transcript({"a": range(4), "b": range(4)}, blocks=4, seed=3, latency=0.0005, block_seconds=0.02)
    story.begin()
    story.submit(policy="parallel", waves_wanted=1)
    story.run(0.3)
    return story


def drain():
    seconds = {"a": 0.01, "b": 0.01, "c": 0.03}
    story = Transcript({"a": [0, 1, 2], "b": [2, 3], "c": [0, 1]}, blocks=4, seed=4, block_seconds=seconds)
    story.begin()
    story.submit()
    story.submit()
    while not story.processes["a"].machine.rules.engine.running:
        story.run(0.0005)
    story.run(0.0015)  # until the source has its ACCEPT
    story.submit()
    story.run(0.0005)
    story.say("a      gets SIGTERM")
    story.drain("a")
    while story.processes["a"].machine.held:
        story.run(0.0005)
    story.leave("a")
    story.run(0.4)
    return story


STORIES = {"chain": chain, "reroute": reroute, "wave": wave, "drain": drain}


def transcript(name):
    story = STORIES[name]()
    assert all(len(outcomes) == 1 and isinstance(outcomes[0], Complete) for outcomes in story.outcomes.values())
    return fenced("text", "\n".join(story.lines).replace(f"{SOURCE} ", "source "))


# The document.


def generated(text, name):
    kind, _, rest = name.partition(" ")
    if kind == "grammar":
        return grammar(text)
    return example(rest) if kind == "example" else transcript(rest)


def document(text):
    """The document with its generated parts as they have to be."""
    return re.sub(
        r"<!-- generated: ([\w ]+) -->\n.*?<!-- end -->",
        lambda m: f"<!-- generated: {m[1]} -->\n{generated(text, m[1])}\n<!-- end -->".replace("\n\n<", "\n<"),
        text,
        flags=re.S,
    )


# Vectors.

_WAVE = ((((0, "a"), (1, "a")),), (((2, "a"),), ((3, "b"),)))
_ROW = TrackSpan(0, "b", (3,), 5000, 9200, 4100, 20, 1500, 30)
_UNUSED = TrackSpan(1, "c", (), 9300, 9300, 80000, why="no gain")
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
        Itinerary(LAPTOP, "nearest", (), 1, False, ((((0, "a"), (1, "a"), (2, "b"), (3, "b")),),), (),
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
        Itinerary(LAPTOP, "parallel", (), 2, False, _WAVE, (), (Visit("a", (0, 1, 2), 1, 2, 3, 4, (_ROW, _UNUSED)),),
                  waves_wanted=2, on_straggler="skip"),
        "raw", 17, 192, "done",
    ),
    "run with every value of an itinerary": Run(
        TransferId(_ANOTHER, 0, 2**16 - 2), 600_000_000,
        Itinerary("s", "quality", (5,), 2**16 - 1, True, BY_A, (2, 3), (VISIT_A,), ("c",), 2.5, 3, "skip",
                  TrackRef(0, 0, 0, "t"), ("d", "e")),
        "raw", 2**20, 1, "via source",
    ),
    "accept of the largest transfer": Accept(TransferId(b"\xff" * 16, 2**64 - 1, 2**16 - 2), 2**16 - 1),
    "refuse with credits": Refuse(SECOND, "draining", 3),
    "cancel of nothing": Cancel((), 0),
    "cancel of two": Cancel((REQUEST, _ANOTHER), 600_000_000),
    "complaint of another model": Complaint("a serves model 12…", MODEL),
    "hello of a pusher": Hello(LAPTOP, "pusher", 5, 1, "", ""),
    "findings of none": Findings(()),
    "inspect that measures": Inspect(4_000),
    "findings with a profile": Findings((), b'{"schema": 1}'),
    "offer of a bundle that was kept": Offer(ACTIVE, 0),
    "offer of the longest manifest": Offer(MANIFEST, 16_777_216),
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


RUN = EXAMPLES["run"][0]
ACCEPT = EXAMPLES["accept"][0]
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
    "latency_weight as an integer": (
        _pack(_plain(RUN, itinerary=_itinerary(latency_weight=3))),
        msgspec.structs.replace(RUN, itinerary=msgspec.structs.replace(AT_B, latency_weight=3.0)),
    ),
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
    "second message out of range": _pack([{"t": "bye"}, _plain(EXAMPLES["accept"][0], credits=-1)]),
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
    "integer for a bool": _pack(_plain(EXAMPLES["state"][0], warm=1)),
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
    "escape sequence in a text": _pack(_plain(EXAMPLES["hello"][0], model_id="\x1b[31mred")),
    "line break in a text": _pack(_plain(Bye(), reason="a\nb")),
    "no-break space in a text": _pack(_plain(Bye(), reason="a\u00a0b")),
    "time of 2^32 us": _pack(_plain(EXAMPLES["state"][0], block_us=2**32)),
    "budget above 600 s": _pack(_plain(RUN, budget_us=600_000_001)),
    "cancel for above 600 s": _pack(_plain(EXAMPLES["cancel"][0], budget_us=600_000_001)),
    "cancel of 1025 requests": _pack(_plain(EXAMPLES["cancel"][0], requests=[b"\0" * 16] * 1025)),
    "canceled request of 17 bytes": _pack(_plain(EXAMPLES["cancel"][0], requests=[REQUEST + b"\0"])),
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
    "latency_weight that is not a number": _pack(_plain(RUN, itinerary=_itinerary(latency_weight=math.nan))),
    "latency_weight below 0": _pack(_plain(RUN, itinerary=_itinerary(latency_weight=-1.0))),
    "17 names to be avoided": _pack(_plain(RUN, itinerary=_itinerary(avoid=[f"p{i}" for i in range(17)]))),
    "itinerary of three values": _pack(_plain(RUN, itinerary=_itinerary()[:3])),
    "itinerary that is a map": _pack(_plain(RUN, itinerary={"source": "a"})),
    "visit with a time below 0": _pack(_plain(RUN, itinerary=_itinerary(visits=[["a", [0], -1, 0, 0]]))),
    "finding without a detail": _pack({"t": "findings", "rows": [["ok", "Python"]]}),
    "65 findings": _pack({"t": "findings", "rows": [["ok", "a", "b"]] * 65}),
    "finding with a line break": _pack({"t": "findings", "rows": [["ok", "a", "b\nc"]]}),
    "digest of 31 bytes": _pack(_plain(EXAMPLES["install"][0], manifest=MANIFEST[:31])),
    "digest that is text": _pack(_plain(EXAMPLES["install"][0], manifest="a" * 32)),
    "no digest at all in an offer": _pack(_plain(EXAMPLES["offer"][0], manifest=b"")),
    "digest of one byte in stored": _pack(_plain(EXAMPLES["stored"][0], active=b"a")),
    "manifest longer than may be offered": _pack(_plain(EXAMPLES["offer"][0], size=16_777_217)),
    "want of nothing": _pack(_plain(EXAMPLES["want"][0], size=0)),
    "want of more than a chunk": _pack(_plain(EXAMPLES["want"][0], size=49_153)),
    "want below the start": _pack(_plain(EXAMPLES["want"][0], offset=-1)),
    "want at 2^40": _pack(_plain(EXAMPLES["want"][0], offset=2**40)),
    "chunk without bytes": _pack(_plain(EXAMPLES["chunk"][0], data=b"")),
    "chunk that is text": _pack(_plain(EXAMPLES["chunk"][0], data="abc")),
    "stored with 2^16 parts": _pack(_plain(EXAMPLES["stored"][0], parts=2**16)),
    "stored with a line break in its reason": _pack(_plain(EXAMPLES["stored"][0], reason="a\nb")),
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
    "one in an array": [EXAMPLES["accept"][0]],
    "accept and moved": [EXAMPLES["accept"][0], EXAMPLES["moved"][0]],
    "run between others": [EXAMPLES["release"][0], RUN, EXAMPLES["state"][0], RUN],
    "sixteen": [EXAMPLES["progress"][0]] * 16,
    "as many as may be": [EXAMPLES["release"][0]] * 64,
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
    said = {f"example {name}": message for name, (message, _) in EXAMPLES.items()} | MORE
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
