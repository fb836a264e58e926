"""Traces of ``ls-edge run --trace``, read again by tests."""

from pathlib import Path
from typing import Any

import msgspec

from ls_edge.core.records import RequestRecord, TrackSpan, Visit


def decode_record(line: bytes | str) -> RequestRecord:
    values = _in_us(msgspec.json.decode(line))
    if isinstance(values, dict):
        order = values.pop("order", None)
        if values.get("waves") is None:
            values["waves"] = [[order]] if order else []
        if isinstance(values.get("visits"), list):
            values["visits"] = [_row(Visit, visit) for visit in values["visits"]]
    return msgspec.convert(values, RequestRecord)


def _in_us(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        f"{name[:-3]}_us" if name.endswith("_ms") else name: round(each * 1e3)
        if name.endswith("_ms") and isinstance(each, (int, float))
        else each
        for name, each in value.items()
    }


def _row(kind: type[msgspec.Struct], shown: Any) -> Any:
    values = _in_us(shown)
    if not isinstance(values, dict):
        return values
    if isinstance(values.get("tracks"), list):
        values["tracks"] = [_row(TrackSpan, track) for track in values["tracks"]]
    return [
        values.get(field.name, None if field.default is msgspec.NODEFAULT else field.default)
        for field in msgspec.structs.fields(kind)
    ]


def read_trace(path: str | Path) -> list[RequestRecord]:
    return [decode_record(line) for line in Path(path).read_bytes().splitlines()]
