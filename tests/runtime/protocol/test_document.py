"""``PROTOCOL.md`` and the code say the same: every message, field, type, range, default and deadline."""

import dataclasses
import re
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import numpy as np
import pytest

from ls_edge.core import parts, records
from ls_edge.core.errors import WireError
from ls_edge.core.records import TrackSpan, Visit
from ls_edge.runtime.protocol import codecs, framing
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import FileVersion, FindingRow, Findings, Itinerary, Run, TrackRef, TransferId
from ls_edge.runtime.routing import claims
from ls_edge.runtime.routing.source import ended_requests
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.transport import (
    admission,
    connections,
    guests,
    handshake,
    host_names,
    inbox,
    links,
    node,
    outbox,
    problems,
)

TEXT = (Path(__file__).parents[3] / "runtime" / "protocol" / "PROTOCOL.md").read_text(encoding="utf-8")
PROSE = " ".join(TEXT.split())  # without line breaks, so that a paragraph can be wrapped again
MESSAGES = {kind.__struct_config__.tag: kind for kind in get_args(wire.Message)}
PARTS = {
    "TransferId": TransferId,
    "Itinerary": Itinerary,
    "TrackRef": TrackRef,
    "Visit": Visit,
    "TrackSpan": TrackSpan,
    "FindingRow": FindingRow,
    "FileVersion": FileVersion,
}

HOMES = {
    "wire": wire, "node": node, "outbox": outbox, "connections": connections, "links": links, "host_names": host_names,
    "records": records, "admission": admission, "handshake": handshake, "claims": claims,
    "ended_requests": ended_requests, "problems": problems, "parts": parts, "framing": framing, "guests": guests,
}  # fmt: skip

TRANSFER = TransferId(b"s" * 16, 2, 3)
ROW = TrackSpan(0, "a", (), 0, 0, 0)
VISIT = Visit("a", (), 0, 0, 0, tracks=(ROW,))
ITINERARY = Itinerary("laptop", "nearest", (), 0, visits=(VISIT,), track=TrackRef(1, 0, 0, "laptop"))


def rows(heading):
    """The cells of the first table below a heading, without its own head."""
    section = re.split(r"\n#+ ", re.split(rf"\n#+ {re.escape(heading)}\n", TEXT)[1])[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines[2:]]
    return [[cell.strip().replace("\\|", "|") for cell in row] for row in cells]


def fields(heading):
    return {name.strip("`"): (kind.strip("`"), bounds, meaning) for name, kind, bounds, meaning in rows(heading)}


def declared(kind):
    """Name, type without its bounds, and whether it has a default, of each field."""
    names = kind._fields if kind is TransferId else kind.__struct_fields__
    needed = len(names) - (0 if kind is TransferId else len(kind.__struct_defaults__))
    hints = get_type_hints(kind)
    return {name: (_text_of(hints[name]), index >= needed) for index, name in enumerate(names)}


def _text_of(hint):
    if msgspec.UnsetType in get_args(hint):
        return _text_of(get_args(hint)[0])
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(r"(?:\w+\.)+(\w+)", r"\1", text).replace("tuple[int, str]", "Ran")


ALL = {**MESSAGES, **PARTS}


def test_every_message_is_in_the_specification():
    section = TEXT.split("\n## Messages\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^### (\w+)$", section, re.M)) == set(ALL)


@pytest.mark.parametrize("heading", ALL)
def test_fields_types_and_defaults_match_the_code(heading):
    said = {name: (kind, "Default" in meaning) for name, (kind, _, meaning) in fields(heading).items()}
    assert said == declared(ALL[heading])
    assert list(said) == list(declared(ALL[heading]))


def some(kind):
    """A valid message of a kind."""
    values = {
        "str": "a", "int": 1, "bool": True, "bytes": b"s" * 32, "TransferId": TRANSFER, "Itinerary": ITINERARY,
        "tuple[int, ...]": (), "tuple[str, ...]": (), "tuple[bytes, ...]": (), "tuple[FindingRow, ...]": (),
        "tuple[FileVersion, ...]": (),
        "tuple[tuple[int, ...], ...]": (),
    }  # fmt: skip
    return kind(**{name: values[annotation] for name, (annotation, _) in declared(kind).items()})


def replaced(value, name, new):
    return (
        value._replace(**{name: new})
        if isinstance(value, TransferId)
        else msgspec.structs.replace(value, **{name: new})
    )


def accepted(heading, name, new):
    """Whether a message with a field set to ``new`` is read."""
    if heading in MESSAGES:
        message = replaced(some(MESSAGES[heading]), name, new)
    elif heading == "TransferId":
        message = wire.Accept(replaced(TRANSFER, name, new), 1)
    elif heading == "FindingRow":
        message = Findings((replaced(FindingRow("ok", "a", "b"), name, new),))
    elif heading == "FileVersion":
        message = msgspec.structs.replace(some(wire.Hello), files=(replaced(FileVersion(1, b"s" * 32), name, new),))
    else:
        part = replaced(
            {"Itinerary": ITINERARY, "TrackRef": ITINERARY.track, "Visit": VISIT, "TrackSpan": ROW}[heading],
            name,
            new,
        )
        part = replaced(VISIT, "tracks", (part,)) if heading == "TrackSpan" else part
        way = {"Itinerary": part, "TrackRef": replaced(ITINERARY, "track", part)}.get(heading)
        way = replaced(ITINERARY, "visits", (part,)) if way is None else way
        message = replaced(some(Run), "itinerary", way)
    # Written by hand, since the code itself refuses to write some numbers.
    raw = b"LS\x01" + msgspec.msgpack.encode(message)
    try:
        return framing.decode(raw) == [message]
    except WireError:
        return False


def number(text):
    base, _, rest = text.partition("^")
    if not rest:
        return int(base)
    power, _, less = rest.partition("-")
    return int(base) ** int(power) - int(less or 0)


RANGES = [(heading, name) for heading in ALL for name in fields(heading)]


@pytest.mark.parametrize(("heading", "name"), RANGES, ids=[f"{heading}.{name}" for heading, name in RANGES])
def test_ranges_are_those_that_the_code_checks(heading, name):
    kind, bounds, _ = fields(heading)[name]
    deep = kind == "tuple[tuple[int, ...], ...]"
    wrap = (lambda value: (value,)) if kind.startswith("tuple") and not deep else (lambda value: value)
    wrap = (lambda value: ((), (value,))) if deep else wrap
    if bounds.endswith("bytes"):
        sizes = [int(size) for size in re.findall(r"\d+", bounds)]
        good = [bytes(size) for size in sizes]
        exact = [] if " to " in bounds else sizes
        bad = [bytes(max(sizes) + 1)] + [bytes(size - 1) for size in exact if size]
        bad += [b""] * (0 not in sizes)
    elif " to " in bounds:
        least, most = map(number, bounds.split(" to "))
        good, bad = [least, most], [least - 1] + [most + 1] * (most + 1 < 2**64)
    elif bounds.startswith("≤"):
        most = int(bounds.split()[1])
        good, bad = ["", "x" * most], ["x" * (most + 1)]
    elif bounds == "name":
        good, bad = ["a", "A.b-c_9" + "x" * 56], ["", "x" * 64, "a b", "-a", "ä", "a\n"]
    else:
        assert bounds == ""
        parts = ("bool", "TransferId", "Itinerary", "TrackRef | None", "tuple[Visit, ...]", "tuple[TrackSpan, ...]")
        assert kind in (*parts, "tuple[FindingRow, ...]", "tuple[FileVersion, ...]") or "Ran" in kind
        return
    assert [value for value in good if not accepted(heading, name, wrap(value))] == []
    assert [value for value in bad if accepted(heading, name, wrap(value))] == []


def test_deadlines_match_the_code():
    said = {name.strip("`"): value for name, value, _, _ in rows("Deadlines")}
    assert said == {field.name: str(field.default) for field in dataclasses.fields(Limits)}


def test_every_deadline_has_a_unit():
    units = {name.strip("`"): unit for name, _, unit, _ in rows("Deadlines")}
    assert all(units.values())
    assert {name for name, unit in units.items() if unit == "s"} >= {
        field.name
        for field in dataclasses.fields(Limits)
        if field.name.endswith(("_floor", "_wait", "_every", "_base"))
    }


def test_other_numbers_match_the_code():
    named = set()
    for what, value, unit, code in rows("Other numbers"):
        names_in_code = re.findall(r"`([\w.]+)`", code)
        values = value.split(" and ")
        assert len(names_in_code) == len(values)
        for dotted, said in zip(names_in_code, values, strict=True):
            module, _, name = dotted.partition(".")
            actual = getattr(HOMES[module], name)
            shown = actual / 1000 if unit == "s" and name.endswith("_MS") else actual
            assert said == str(shown), f"{what}: {dotted} is {actual}"
            named.add(dotted)
    public = {
        f"{module}.{name}"
        for module in ("wire", "framing", "node", "guests", "outbox", "handshake")
        for name, value in vars(HOMES[module]).items()
        if name.isupper() and not name.startswith("_") and isinstance(value, (int, float))
        if module == "wire" or name not in vars(wire)  # imported from there
    }
    assert public - {"wire.MAJOR", "wire.MINOR", "wire.COUNT", "wire.STEM"} | {"problems.COMPLAINTS_A_SECOND"} <= named


def test_codecs_match_the_code():
    table = {name.strip("`"): formula.strip("`") for name, formula, _, _ in rows("Tokens")}
    assert tuple(table) == tuple(codecs.CODECS)
    assert [float(replay) for _, _, replay, _ in rows("Tokens")] == list(codecs.REPLAY_TOLERANCE.values())
    for name, formula in table.items():
        assert eval(formula, {"count": 7, "dim": 5}) == codecs.wire_bytes(name, 7, 5)
    example = np.array([[[1.0, -2.0], [0.5, 0.0]]], np.float32)
    for name, written in re.findall(rf"^({'|'.join(table)}) +((?:[0-9A-F]{{2}} *)+)$", TEXT, re.M):
        assert bytes.fromhex(written) == bytes(codecs.encode(name, example)), name
        table.pop(name)
    assert not table


def test_small_numbers_in_the_text_match_the_code():
    assert f"Version {wire.MAJOR}.{wire.MINOR}." in PROSE
    assert f"at most {framing.MAX_HEADER} bytes" in PROSE
    assert f"MessagePack array of 1 to {framing.MAX_TOGETHER} maps" in PROSE
    assert f"an array of 1 to {framing.MAX_TOGETHER} messages" in PROSE
    assert f"more than {outbox.SMALL_TOKENS} bytes of them" in PROSE
    assert f"A peer MUST send STATE every {Limits().state_every * 1000:.0f} ms to its" in PROSE
    assert f"if their last one is at least {Limits().state_least * 1000:.0f} ms old" in PROSE
    assert f"within {Limits().state_least * 1000:.0f} ms where other links or reachable blocks have changed" in PROSE
    redial = f"{connections.REDIAL_S * 1000:.0f} ms"
    assert f"| after a handshake that failed, or a frame that was too long | {redial} |" in PROSE
    assert f"| `SNDHWM` | {connections.MAX_UNSENT} messages |" in PROSE
    assert f"| `RCVHWM` | {connections.MAX_UNREAD}, no bound |" in PROSE
    assert f"A link of which {links.FLOOD_MESSAGES} messages were read" in PROSE
    assert f"- Up to {connections.MAX_UNSENT} messages of a link wait at the sender" in PROSE
    first, longest = handshake.GREETING_DELAY, handshake.MAX_GREETING_DELAY
    assert f"after {first} s, 1 s, 2 s and so on, and then every {longest:.0f} s" in PROSE
    assert f"At most {problems.COMPLAINTS_A_SECOND} COMPLAINTs are sent" in PROSE
    assert f"At most {handshake.MAX_SOURCES} processes beyond the peers" in PROSE
    assert f"again {host_names.LOOK_UP_EVERY} s after each answer while there is no link" in PROSE
    assert f"{connections.MAX_RECONNECT_MS} ms divided by their number later" in PROSE
    assert f"| {connections.RECONNECT_MS} to {connections.MAX_RECONNECT_MS} ms |" in PROSE
    assert framing.encode(wire.Bye())[:3] == bytes.fromhex("4C5301")
    peers_defaults = links.HeartbeatSettings()
    assert f"| `HEARTBEAT_IVL` | {peers_defaults.every_ms} ms," in PROSE
    assert f"| {peers_defaults.timeout_ms} ms (`timeout_ms`)" in PROSE
    assert f"takes at {peers_defaults.slowest_mbit} Mbit/s (`slowest_mbit`)" in PROSE
    assert f"{4 * 197 * 768 * 8 / 1e6:.1f} s more at 1 Mbit/s" in PROSE


def test_counts_match_the_code():
    section = TEXT.split("## What is malformed")[1].split("\n## ")[0]
    source = "".join(Path(module.__file__).read_text() for module in (node, inbox, handshake))
    counted = set(re.findall(r'(?:counts\[|count\(|drop\(event, )"([a-z ]+)"', source)) - {"unsendable"}
    assert counted == {
        "connections refused",
        "malformed",
        "hello refused",
        "before hello",
        "complaints",
        "two of one name",
    }
    assert all(f"`{what}`" in section for what in counted)
