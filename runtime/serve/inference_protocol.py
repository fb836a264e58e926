"""Requests and responses of the Open Inference Protocol, version 2: JSON, and the binary tensor data extension.

Specification: Open Inference Protocol (open-inference-protocol, ``inference_rest.md``); the extensions are those of
Triton Inference Server (``extension_binary_data.md``, ``extension_classification.md``). A model has three inputs, and
a request gives one of them: ``image`` (encoded files), ``pixels`` (RGB), or ``input`` (what the model takes).
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, printable
from ls_edge.runtime.source.results import Answer

T = TypeVar("T")

EXTENSIONS = ("binary_tensor_data", "classification")
ONLY_VERSION = "1"
"""Version that clients request by default."""
MAX_BATCH, MOST_DECODED = 256, 64 << 20
"""Maximum number of images in a request, and of bytes of them as input of the stem: 111 images of 224 pixels."""
HEADER_LENGTH = "Inference-Header-Content-Length"
"""HTTP header with the length of the JSON document that precedes binary tensors."""
_OUTPUTS = ("logits", "probabilities", "label")
_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "a boolean", "array": "an array",
    "object": "an object",
}  # fmt: skip
"""JSON names of the types that msgspec mentions in errors."""
_MOST_OBJECTS, _MOST_SHAPE = 2048, 256
"""Maximum objects in a document, of which 8 inputs and 3 outputs need 24, and maximum length of a shape in bytes:
checked before a tree is built, whose objects need many times the memory of their text."""
_UNNESTED = bytes.maketrans(b"[]", b"  ")
_PIECES = re.compile(rb"(.{1,65536}[^,]*),?", re.DOTALL)
"""Pieces of numbers in JSON."""
_SHOWN = 64
"""Maximum length of a client's value in an error, in characters."""

_Name = Annotated[str, Meta(max_length=1024)]
_Side = Annotated[int, Meta(ge=0, le=1 << 31)]
_Size = Annotated[int, Meta(ge=0, le=1 << 31)] | Annotated[str, Meta(pattern="^[0-9]{1,10}$")]


class _TensorParameters(msgspec.Struct, frozen=True):
    binary_data_size: _Size | None = None  # of inputs
    binary_data: bool | None = None  # of outputs, like the next one
    classification: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    shared_memory_region: msgspec.Raw = msgspec.Raw()


class _Input(msgspec.Struct, frozen=True):
    name: _Name
    shape: msgspec.Raw
    datatype: Annotated[str, Meta(max_length=16)]
    parameters: _TensorParameters | None = None
    data: msgspec.Raw = msgspec.Raw()
    """Values as JSON, flat or nested; empty if they are missing."""


class _Output(msgspec.Struct, frozen=True):
    name: _Name
    parameters: _TensorParameters | None = None


class _Parameters(msgspec.Struct, frozen=True):
    binary_data_output: bool | None = None
    timeout: Annotated[int, Meta(ge=0, le=1 << 62)] | None = None
    """Microseconds; 0 means none, as in Triton."""


class InferRequest(msgspec.Struct, frozen=True):
    """JSON document of a request."""

    inputs: Annotated[list[_Input], Meta(min_length=1, max_length=8)]
    id: _Name | None = None
    parameters: _Parameters | None = None
    outputs: Annotated[list[_Output], Meta(max_length=3)] | None = None


class _Timed(msgspec.Struct, frozen=True):
    parameters: _Parameters | None = None


def timeout_of(body: bytes, json_length: int | None) -> int:
    """Return the timeout of a request in microseconds; 0 for none, or if the request is not valid."""
    try:
        found = msgspec.json.decode(body[:json_length], type=_Timed).parameters if b'"timeout"' in body else None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return 0
    return 0 if found is None or found.timeout is None else found.timeout


def parse_request(body: bytes, json_length: int | None) -> tuple[InferRequest, bytes]:
    """Return the document of a request and the binary data that follow it; raise :class:`DataError`."""
    length = len(body) if json_length is None else json_length
    if length > len(body):
        raise DataError(f"{HEADER_LENGTH} is {length} and the body has {len(body)} bytes; send the whole body")
    if body.count(b"{", 0, length) > _MOST_OBJECTS:
        raise DataError(f"the request has more than {_MOST_OBJECTS} objects; give one input")
    request = _decoded(body[:length], InferRequest, "the request")
    for output in request.outputs or ():
        if output.name not in _OUTPUTS:
            raise DataError(f"unknown output {shown(output.name)}; use logits, probabilities or label")
    for tensor in (*request.inputs, *(request.outputs or ())):
        if tensor.parameters is not None and bytes(tensor.parameters.shared_memory_region) not in (b"", b"null"):
            raise DataError(f"tensor {shown(tensor.name)} is in shared memory, which is not supported; use the body")
    return request, body[length:]


def _decoded(content: bytes, kind: type[T], name: str) -> T:
    """Decode JSON; raise :class:`DataError` that names types as JSON does."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (RecursionError, UnicodeDecodeError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else "it is not UTF-8"
        raise DataError(f"{name} is not valid: {why}") from None
    except msgspec.DecodeError as error:
        why = re.sub(
            r"`([a-z |]+)`", lambda match: " or ".join(_WORDS.get(w, w) for w in match[1].split(" | ")), str(error)
        )
        if at := re.search(r"\(byte (\d+)\)", why):
            why += f": {content[int(at[1]) :][:16].decode(errors='replace')!r}"
        raise DataError(f"{name} is not valid: {printable(why[:240])}") from None


def metadata(bundle: Bundle, *, is_thin: bool) -> dict[str, Any]:
    """Return the document of ``v2/models/MODEL``; ``is_thin``: of a source without the model."""
    height, width = bundle.manifest.image.size
    classes = len(bundle.manifest.classes)
    return {
        "name": bundle.manifest.model,
        "versions": [version_of(bundle)],
        "platform": "ls-edge",
        "inputs": [
            {"name": "image", "datatype": "BYTES", "shape": [-1]},
            {"name": "pixels", "datatype": "UINT8", "shape": [-1, -1, -1, 3]},
            {"name": "input", "datatype": "FP32", "shape": [-1, 3, height, width]},
        ][: 2 if is_thin else 3],
        "outputs": [
            {"name": "logits", "datatype": "FP32", "shape": [-1, classes]},
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, classes]},
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
        ],
    }


def version_of(bundle: Bundle) -> str:
    """Return the model version of a bundle: the beginning of its id."""
    return bundle.manifest.bundle_id[:16]


def images_of(
    request: InferRequest,
    binary: bytes,
    size: Sequence[int],
    preprocess: Callable[[bytes | np.ndarray, str], np.ndarray],
    *,
    is_thin: bool,
) -> list[np.ndarray]:
    """Return the images of a request as float32 ``[3, H, W]``; raise :class:`DataError`.

    ``size`` is the height and width of the model's input; ``preprocess`` is the source's function for encoded images
    and pixels. A source without the model (``is_thin``) cannot take its input.
    """
    if len(request.inputs) != 1:
        names = ", ".join(shown(one.name) for one in request.inputs)
        raise DataError(f"the request has the inputs {names}; give one of image, pixels and input")
    (given,) = request.inputs
    kinds = {"image": ("BYTES", "[N]"), "pixels": ("UINT8", "[N, H, W, 3]")}
    kinds["input"] = ("FP32", f"[N, 3, {size[0]}, {size[1]}]")
    if given.name not in kinds:
        raise DataError(f"unknown input {shown(given.name)}; use image, pixels or input")
    if is_thin and given.name == "input":
        raise DataError("this server has no model, so it takes image or pixels, not input; start it with --bundle")
    datatype, shape = kinds[given.name]
    if given.datatype != datatype:
        raise DataError(f"input {given.name} has the datatype {shown(given.datatype)}; use {datatype}")
    sides = _decoded(bytes(given.shape)[:_MOST_SHAPE], list[_Side], f"the shape of input {given.name}") or [0]
    count, rest = sides[0], sides[1:]
    most = MAX_BATCH if is_thin else min(MAX_BATCH, max(1, MOST_DECODED // (12 * size[0] * size[1])))
    if not 1 <= count <= most:
        raise DataError(f"input {given.name} has a batch of {count}; use 1 to {most} images")
    fits = {"image": rest in ([], [1]), "pixels": len(rest) == 3 and rest[2] == 3, "input": rest == [3, *size]}
    if not fits[given.name]:
        raise DataError(f"input {given.name} has the shape {sides}; use {shape}")
    raw = _binary_of(given, binary)
    if datatype == "FP32":
        return list(_array(given, sides, raw, np.dtype("<f4")).astype(np.float32, copy=False))
    if datatype == "UINT8":
        array = _array(given, sides, raw, np.dtype("uint8"))
        return [preprocess(np.ascontiguousarray(pixels), f"image {index}") for index, pixels in enumerate(array)]
    files = _files(given, count) if raw is None else _elements(raw, count)
    if files is not None:
        return [preprocess(file, f"image {index}") for index, file in enumerate(files)]
    assert raw is not None
    try:
        return [
            preprocess(raw, "image 0")
        ]  # a file without its length, as in the documentation of OpenVINO Model Server
    except DataError as error:
        (length,) = struct.unpack_from("<I", raw.ljust(4, b"\0"))
        raise DataError(
            f"{error}; if the first 4 bytes are its length, they say {length} bytes, but {max(0, len(raw) - 4)} follow"
        ) from None


def _binary_of(given: _Input, binary: bytes) -> bytes | None:
    size = None if given.parameters is None else given.parameters.binary_data_size
    has_data = bytes(memoryview(given.data)[:5]) not in (b"", b"null")
    if size is None:
        if not has_data:
            raise DataError(f"input {given.name} has neither data nor binary_data_size")
        if binary:
            raise DataError(f"{len(binary)} bytes follow the document, and no input has a binary_data_size")
        return None
    if has_data:
        raise DataError(f"input {given.name} has data and binary_data_size; use one of them")
    if int(size) != len(binary):
        raise DataError(f"input {given.name} has a binary_data_size of {size} and {len(binary)} bytes of binary data")
    return binary


def _array(given: _Input, sides: Sequence[int], raw: bytes | None, dtype: np.dtype[Any]) -> np.ndarray:
    count, size = math.prod(sides), 0
    if raw is not None:
        if len(raw) != count * dtype.itemsize:
            raise DataError(
                f"input {given.name} of shape {sides} needs {count * dtype.itemsize} bytes and has {len(raw)}"
            )
        return np.frombuffer(raw, dtype).reshape(sides)
    found = []
    for values in _numbers_of(given):
        size += values.size
        if size > count:
            break
        if dtype.kind == "u" and not ((values >= 0) & (values <= 255) & (values == np.floor(values))).all():
            raise DataError(f"the data of input {given.name} are not whole numbers from 0 to 255")
        with np.errstate(over="ignore"):  # infinity is refused later, with the name of the image
            found.append(values.astype(dtype))
    if size != count:
        more = " or more" if size > count else ""
        raise DataError(f"input {given.name} of shape {sides} needs {count} numbers and has {size}{more}")
    return np.concatenate(found).reshape(sides)


def _numbers_of(given: _Input) -> Iterator[np.ndarray]:
    """Yield the numbers of an input, flat or nested in the request, a piece at a time.

    No other thread runs while a piece is decoded, and its numbers are Python objects of 32 bytes meanwhile.
    """
    for piece in _PIECES.finditer(memoryview(given.data)):  # a copy of each body would add up
        numbers = b"[%b]" % piece[1].translate(_UNNESTED)
        yield np.array(_decoded(numbers, list[float], f"the data of input {given.name}"))


def _files(given: _Input, count: int) -> list[bytes]:
    """Return the encoded images, which are base64 strings in JSON."""
    if bytes(given.data).count(b",") >= count:  # base64 has no comma
        raise DataError(f"input image has more elements than a batch of {count}")
    values = _decoded(bytes(given.data), list[str | list[str]], f"the data of input {given.name}")
    texts = [text for one in values for text in (one if isinstance(one, list) else [one])]
    if len(texts) != count:
        raise DataError(f"input image has {len(texts)} elements and a batch of {count}")
    try:
        # Not split(), which needs 50 bytes for each word.
        return [base64.b64decode(text.encode().translate(None, b" \t\r\n"), validate=True) for text in texts]
    except (TypeError, ValueError):
        raise DataError(
            "the data of input image are not base64 strings; encode the files, or send them as binary data"
        ) from None


def _elements(raw: bytes, count: int) -> list[bytes] | None:
    """Return the elements of a BYTES tensor, each preceded by its length in 4 bytes, little-endian.

    Return None for a single element without its length.
    """
    found: list[bytes] = []
    at = 0
    while len(found) < count and at + 4 <= len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        found.append(raw[at + 4 : at + 4 + length])
        at += 4 + length
    if at == len(raw) and len(found) == count:
        return found
    if count == 1:
        return None
    raise DataError(
        f"the binary data of input image are not {count} elements, each preceded by its length in 4 bytes: the lengths "
        f"of the first {len(found)} lead to byte {at} of {len(raw)}"
    )


def response_of(
    request: InferRequest, bundle: Bundle, answers: Sequence[Answer], notes: Sequence[str]
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON document if binary tensors follow it."""
    wanted = request.outputs or [_Output(name) for name in _OUTPUTS]
    outputs: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for output in wanted:
        datatype, shape, values = _values(output, answers)
        one: dict[str, Any] = {"name": output.name, "datatype": datatype, "shape": shape}
        as_binary = output.parameters and output.parameters.binary_data
        if (request.parameters and request.parameters.binary_data_output) if as_binary is None else as_binary:
            if isinstance(values, np.ndarray):
                data = values.tobytes()
            else:
                data = b"".join(struct.pack("<I", len(text)) + text for text in map(str.encode, values))
            one["parameters"] = {"binary_data_size": len(data)}
            binary.append(data)
        else:
            one["data"] = values.ravel().tolist() if isinstance(values, np.ndarray) else values
        outputs.append(one)
    document: dict[str, Any] = {"model_name": bundle.manifest.model, "model_version": version_of(bundle)}
    if request.id:
        document["id"] = request.id
    records = [answer.record for answer in answers]
    document["parameters"] = {  # lists are JSON strings, because parameters must be scalars
        "degraded": any(answer.degraded for answer in answers),
        "skipped_blocks": json.dumps([record.skipped for record in records]),
        "order": json.dumps([record.steps if record.is_plain else record.waves for record in records]),
        "holders": json.dumps([list(dict.fromkeys(visit.holder for visit in record.visits)) for record in records]),
        "latency_ms": max(answer.latency_ms for answer in answers),
        **({"notes": json.dumps(notes)} if notes else {}),
    }
    document["outputs"] = outputs
    head = msgspec.json.encode(document)
    return b"".join([head, *binary]), len(head) if binary else None


def _values(output: _Output, answers: Sequence[Answer]) -> tuple[str, list[int], np.ndarray | list[str]]:
    """Return the datatype, shape and values of an output."""
    top = min((output.parameters and output.parameters.classification) or 0, len(answers[0].classes))
    if top:
        texts = [text for answer in answers for text in _classification(output.name, answer, top)]
        return "BYTES", [len(answers), top], texts
    if output.name == "label":
        return "BYTES", [len(answers)], [answer.class_name for answer in answers]
    rows = [answer.logits if output.name == "logits" else answer.probabilities for answer in answers]
    values = np.stack(rows).astype("<f4")
    return "FP32", list(values.shape), values


def _classification(name: str, answer: Answer, top: int) -> Iterable[str]:
    """Yield ``VALUE:INDEX:CLASS`` for each of the most likely classes."""
    values = answer.logits if name == "logits" else answer.probabilities
    for index in np.argsort(-answer.logits, kind="stable")[:top]:
        yield f"{values[index]:f}:{index}:{answer.classes[index]}"


def shown(text: str) -> str:
    """Quote a value from a client for an error."""
    return repr(printable(text[:_SHOWN]))
