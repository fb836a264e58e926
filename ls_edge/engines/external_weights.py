"""Refuses parts whose weights are in another file: an engine library would read whatever the part names.

Found in the bytes of the ONNX file, before any library parses them and without the package ``onnx``.
"""

from __future__ import annotations

from collections.abc import Iterator

from ls_edge.core.errors import EngineError

_TENSOR = "tensor"
_EXTERNAL_DATA, _DATA_LOCATION, _EXTERNAL = 13, 14, 1
"""Fields of ``TensorProto`` for external data, and the location that marks it."""
_FIELDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: _TENSOR, 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: _TENSOR, 6: "graph", 10: _TENSOR, 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: _TENSOR, 2: _TENSOR},
    "function": {7: "node", 11: "attribute"},
}
"""Numbers of the fields that lead to tensors, by message (``onnx.proto``, schema of IR version 10)."""
_MAX_DEPTH = 64


def refuse_weights_elsewhere(raw: bytes, part: str) -> None:
    """Raise :class:`EngineError` if a part refers to weights in another file, or is not an ONNX file."""
    if has_weights_elsewhere(raw):
        raise EngineError(f"{part} does not load: not an ONNX file, or weights are in another file; export it again")


def has_weights_elsewhere(raw: bytes) -> bool:
    """Return whether a tensor of the model refers to another file, or the bytes are not a protobuf message.

    Only fields that can contain tensors are followed; weights are skipped by their length, so this takes microseconds
    per node, without the package ``onnx``.
    """
    try:
        return _search(memoryview(raw), "model", 0)
    except (IndexError, ValueError):
        return True


def _search(message: memoryview, kind: str, depth: int) -> bool:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if kind == _TENSOR:
        return any(
            number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value == _EXTERNAL)
            for number, value in _fields_of(message)
        )
    inner = _FIELDS[kind]
    return any(
        _search(value, inner[number], depth + 1)
        for number, value in _fields_of(message)
        if number in inner and isinstance(value, memoryview)
    )


def _fields_of(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of each field: an int, or the bytes of a message, text or array."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(message):
            raise ValueError("cut off")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
