"""Traces of ``ls-edge run --trace``, read again and replayed by tests."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ls_edge.core.errors import EngineError
from ls_edge.core.peer_reports import TrackSpan, Visit
from ls_edge.core.records import RequestRecord
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.reference import relative_error


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


@dataclass(frozen=True)
class Replayed:
    """One answer of a trace, recomputed in one process."""

    id: int
    error: float
    """Largest difference of a logit, relative to the largest logit; infinite if one is not a number."""


def replay(
    pipeline: Pipeline, records: Iterable[RequestRecord], image_of: Callable[[RequestRecord], np.ndarray]
) -> Iterator[Replayed]:
    """Run the arrangement of each answer again (guarantee R2: float32 within 1e-4), skipping records without logits.

    ``image_of`` returns the preprocessed image of a record, float32 ``[3, H, W]``. Raises :class:`EngineError` if a
    record and the bundle disagree on the number of logits.
    """
    for record in records:
        if record.logits is None:
            continue
        ours = pipeline.forward(image_of(record)[None], record.arrangement)[0]
        theirs = np.asarray(record.logits, dtype=np.float32)
        if ours.shape != theirs.shape:
            raise EngineError(
                f"request {record.id} has {len(theirs)} logits, but {pipeline.bundle.folder} returns {len(ours)}; "
                "give the bundle of the trace"
            )
        yield Replayed(record.id, relative_error(theirs, ours))
