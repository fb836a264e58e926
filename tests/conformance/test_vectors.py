"""The vectors and the generated parts of PROTOCOL.md are what the code does, in both directions."""

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from ls_edge.core.errors import WireError
from ls_edge.runtime.protocol import codecs, framing
from ls_edge.runtime.protocol import messages as wire


def _load(path):
    spec = importlib.util.spec_from_file_location("generate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _load(Path(__file__).parent / "generate.py")
VECTORS = json.loads(generate.VECTORS.read_text(encoding="utf-8"))
TEXT = generate.DOCUMENT.read_text(encoding="utf-8")
AGAIN = "run 'python tests/conformance/generate.py', and read what has changed"


def named(key):
    return pytest.mark.parametrize("vector", VECTORS[key], ids=lambda vector: vector["name"])


def unplain(value):
    """What the JSON of a vector stands for."""
    if isinstance(value, list):
        return [unplain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"hex"}:
        return bytes.fromhex(value["hex"])
    if value.keys() == {"int"}:
        return int(value["int"])
    return {key: unplain(item) for key, item in value.items()}


def test_the_file_is_what_the_code_writes_today():
    assert generate.VECTORS.read_text(encoding="utf-8") == generate.vectors_text(), AGAIN


def test_the_document_is_what_the_code_does_today():
    assert generate.document(TEXT) == TEXT, AGAIN


def test_every_part_of_the_document_is_there():
    parts = re.findall(r"<!-- generated: ([\w ]+) -->", TEXT)
    expected = ["grammar", *(f"example {name}" for name in generate.MESSAGES)]
    assert parts == [*expected, *(f"transcript {name}" for name in generate.STORIES)]


def test_every_kind_of_message_and_codec_has_vectors():
    kinds = {kind.__struct_config__.tag for kind in get_args(wire.Message)}
    assert {vector["message"]["t"] for vector in VECTORS["messages"]} == kinds == set(generate.MESSAGES)
    assert {vector["codec"] for vector in VECTORS["tokens"]} == set(codecs.CODECS)
    assert (VECTORS["major"], VECTORS["minor"]) == (wire.MAJOR, wire.MINOR)


@named("messages")
def test_a_frame_is_read_as_its_fields(vector):
    (read,) = framing.decode(bytes.fromhex(vector["hex"]))
    assert generate.fields_of(read) == vector["message"]


@named("messages")
def test_fields_are_written_as_their_frame(vector):
    message = msgspec.convert(unplain(vector["message"]), wire.Message)
    frame = bytes.fromhex(vector["hex"])
    assert (framing.encode(message) == frame) is vector["canonical"]
    assert framing.decode(framing.encode(message)) == framing.decode(frame)


@named("several")
def test_several_messages_are_read_and_written(vector):
    frame = bytes.fromhex(vector["hex"])
    messages = [msgspec.convert(unplain(fields), wire.Message) for fields in vector["messages"]]
    assert framing.decode(frame) == messages
    if len(messages) > 1:
        assert framing.join([framing.encode_body(message) for message in messages]) == frame


@named("malformed")
def test_a_malformed_frame_is_refused_for_its_reason(vector):
    with pytest.raises(WireError) as caught:
        framing.decode(bytes.fromhex(vector["hex"]))
    assert str(caught.value).startswith(vector["reason"])


def _array(values):
    rows = [[math.nan if value is None else float(value) for value in row] for row in values]
    return np.array([rows], np.float32)


@named("tokens")
def test_tokens_are_read_and_written(vector):
    frame = bytes.fromhex(vector["hex"])
    read = codecs.decode(vector["codec"], frame, vector["count"], vector["dim"])
    np.testing.assert_array_equal(read, _array(vector["values"]))
    assert bytes(codecs.encode(vector["codec"], _array(vector["written_from"]))) == frame


@named("malformed_tokens")
def test_malformed_tokens_are_refused(vector):
    with pytest.raises(WireError):
        codecs.decode(vector["codec"], bytes.fromhex(vector["hex"]), vector["count"], vector["dim"])


@pytest.mark.parametrize(
    ("course", "shown"), [("reroute", "notes  lost b"), ("wave", "track 1 of a"), ("drain", "draining  credits 0")]
)
def test_a_course_shows_what_its_text_explains(course, shown):
    """Courses are generated again when routing changes, and the request in question may then take another way."""
    transcript = TEXT.partition(f"<!-- generated: transcript {course} -->")[2].partition("<!-- end -->")[0]
    assert shown in transcript
