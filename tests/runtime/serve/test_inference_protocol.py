"""``ls-edge serve`` and clients of the Open Inference Protocol: unmodified tritonclient, and documented bodies."""

import base64
import json
import math
import struct
import subprocess
import sys
from urllib.parse import quote

import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from ls_edge.core.bundle import Bundle
from ls_edge.core.records import RequestRecord
from ls_edge.data.preprocess import Preprocessor
from ls_edge.runtime.serve.inference_protocol import parse_request, response_of
from ls_edge.runtime.source.results import Answer
from tests.runtime.serve.serving import PLACEMENT, Server, expected, picture

BATCH = 3
pytestmark = pytest.mark.leaks_ok("gevent, which tritonclient uses, keeps descriptors")


@pytest.fixture(scope="module")
def server(ls_edge_of_module, swarm, bundle):
    running = Server(ls_edge_of_module, swarm.path, bundle, "--max-body", 1_000_000)
    assert running.predict(picture())[0] == 200  # its links are up
    return running


@pytest.fixture
def client(server):
    with triton.InferenceServerClient("{}:{}".format(*server.address)) as one:
        yield one


def files():
    return [picture(seed) for seed in range(BATCH)]


def encoded(binary=True):
    given = triton.InferInput("image", [BATCH], "BYTES")
    if binary:
        given.set_data_from_numpy(np.array(files(), dtype=np.object_), binary_data=True)
    else:
        texts = [base64.b64encode(file) for file in files()]
        given.set_data_from_numpy(np.array(texts, dtype=np.object_), binary_data=False)
    return given


def logits_of(bundle):
    return np.stack([expected(bundle, file) for file in files()])


def softmax(logits):
    exps = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exps / exps.sum(axis=1, keepdims=True)


def test_metadata_tells_clients_what_they_may_send(client, bundle):
    manifest = Bundle.open(bundle).manifest
    version = manifest.bundle_id[:16]
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", version)
    assert not client.is_model_ready("tiny", "2")
    assert not client.is_model_ready("another")
    server = client.get_server_metadata()
    assert server["name"] == "ls-edge"
    assert "binary_tensor_data" in server["extensions"]
    found = client.get_model_metadata("tiny")
    height, width = manifest.image.size
    assert found["versions"] == [version]
    assert {one["name"]: (one["datatype"], one["shape"]) for one in found["inputs"]} == {
        "image": ("BYTES", [-1]), "pixels": ("UINT8", [-1, -1, -1, 3]), "input": ("FP32", [-1, 3, height, width]),
    }  # fmt: skip
    assert {one["name"] for one in found["outputs"]} == {"logits", "probabilities", "label"}


def test_name_of_a_model_may_have_a_slash(tmp_path, make_bundle, swarm, ls_edge):
    name = "hf-hub:timm/vit_tiny"
    server = Server(ls_edge, swarm.path, make_bundle(tmp_path / "bundle", model=name))
    with triton.InferenceServerClient("{}:{}".format(*server.address)) as client:
        assert client.get_model_metadata(name)["name"] == name
        assert client.infer(name, [encoded()]).as_numpy("label").shape == (BATCH,)
        assert client.is_model_ready(name, "1")
    assert server.get(f"/v2/models/{quote(name, safe='')}/versions/1")[1]["name"] == name
    assert server.get(f"/v2/models/{name}/other") == (
        404,
        {"error": f"model '{name}/other' is not found; this server has {name}"},
    )


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", ["image", "pixels", "input"])
def test_answers_are_those_of_one_process(client, bundle, name, binary):
    if name == "image":
        inputs = encoded(binary)
    else:
        from io import BytesIO

        from PIL import Image

        pixels = np.stack([np.asarray(Image.open(BytesIO(file))) for file in files()])
        if name == "pixels":
            array = pixels
        else:
            array = np.stack([Preprocessor(Bundle.open(bundle).manifest.image)(one) for one in pixels])
        inputs = triton.InferInput(name, list(array.shape), "UINT8" if name == "pixels" else "FP32")
        inputs.set_data_from_numpy(array, binary_data=binary)
    outputs = [triton.InferRequestedOutput(one, binary_data=binary) for one in ("logits", "probabilities", "label")]
    result = client.infer("tiny", [inputs], outputs=outputs, request_id="seven")
    logits = logits_of(bundle)
    np.testing.assert_allclose(result.as_numpy("logits"), logits, atol=1e-4)
    np.testing.assert_allclose(result.as_numpy("probabilities"), softmax(logits), atol=1e-4)
    labels = [one.decode() if isinstance(one, bytes) else one for one in result.as_numpy("label")]
    assert labels == [str(index) for index in logits.argmax(axis=1)]
    response = result.get_response()
    assert (response["id"], response["model_name"]) == ("seven", "tiny")
    parameters = response["parameters"]
    assert parameters["degraded"] is False
    assert json.loads(parameters["skipped_blocks"]) == [[]] * BATCH
    orders = json.loads(parameters["order"])
    assert [sorted(block for block, _ in order) for order in orders] == [[0, 1, 2, 3]] * BATCH
    assert {holder for order in orders for _, holder in order} <= PLACEMENT.keys()
    assert len(json.loads(parameters["holders"])) == BATCH


def test_outputs_are_all_by_default_and_classified_on_request(client, bundle):
    logits = logits_of(bundle)
    result = client.infer("tiny", [encoded()])
    np.testing.assert_allclose(result.as_numpy("logits"), logits, atol=1e-4)
    assert result.as_numpy("label").shape == (BATCH,)
    asked = [triton.InferRequestedOutput("probabilities", class_count=2)]
    classes = client.infer("tiny", [encoded()], outputs=asked).as_numpy("probabilities")
    assert classes.shape == (BATCH, 2)
    for row, probabilities in zip(classes, softmax(logits), strict=True):
        best = np.argsort(-probabilities)[:2]
        for text, index in zip(row, best, strict=True):
            value, found, label = text.decode().split(":")
            assert (int(found), label) == (index, str(index))
            assert float(value) == pytest.approx(probabilities[index], abs=1e-4)


ASYNCHRONOUS = """
import asyncio, json, sys
from pathlib import Path
import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio

address, *paths = sys.argv[1:]
image = triton.InferInput("image", [len(paths)], "BYTES")
image.set_data_from_numpy(np.array([Path(path).read_bytes() for path in paths], dtype=np.object_))

async def ask():
    async with triton_aio.InferenceServerClient(address) as client:
        assert await client.is_server_ready()
        return await asyncio.gather(*(client.infer("tiny", [image]) for _ in range(3)))

results = asyncio.run(ask())
client = triton.InferenceServerClient(address, concurrency=3)
pending = [client.async_infer("tiny", [image]) for _ in range(3)]
results += [one.get_result() for one in pending]
print(json.dumps([result.as_numpy("logits").tolist() for result in results]))
"""


def test_concurrent_clients_get_all_answers(server, bundle, tmp_path):
    """In a process of its own: gevent's loop does not always survive other tests' threads."""
    paths = [tmp_path / f"{index}.png" for index in range(BATCH)]
    for path, content in zip(paths, files(), strict=True):
        path.write_bytes(content)
    words = [sys.executable, "-c", ASYNCHRONOUS, "{}:{}".format(*server.address), *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 6
    for logits in found:
        np.testing.assert_allclose(logits, logits_of(bundle), atol=1e-4)


def test_errors_name_what_a_client_did_wrong(client):
    small = triton.InferInput("image", [1], "BYTES")
    small.set_data_from_numpy(np.array([b"no image"], dtype=np.object_))
    wrong = triton.InferInput("input", [1, 3, 2, 2], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 3, 2, 2), np.float32))
    other = triton.InferInput("cat", [1], "BYTES")
    other.set_data_from_numpy(np.array([b"x"], dtype=np.object_))
    for inputs, outputs, model, status, words in (
        ([small], None, "tiny", "400", "cannot decode image 0"),
        ([wrong], None, "tiny", "400", "has the shape [1, 3, 2, 2]; use [N, 3, 16, 16]"),
        ([other], None, "tiny", "400", "unknown input 'cat'; use image, pixels or input"),
        ([small, wrong], None, "tiny", "400", "give one of image, pixels and input"),
        ([encoded()], [triton.InferRequestedOutput("x")], "tiny", "400", "unknown output 'x'"),
        ([encoded()], None, "another", "404", "model 'another' is not found; this server has tiny"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            client.infer(model, inputs, outputs=outputs)
        assert caught.value.status() == status
        assert words in caught.value.message()
    with pytest.raises(InferenceServerException) as caught:
        client.infer("tiny", [encoded()], timeout=1)  # a microsecond
    assert caught.value.status() == "504"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_taken(client, bundle, algorithm):
    found = client.infer("tiny", [encoded()], request_compression_algorithm=algorithm).as_numpy("logits")
    np.testing.assert_allclose(found, logits_of(bundle), atol=1e-4)


def infer(server, document, binary=b"", headers=None):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    given = {"Inference-Header-Content-Length": str(len(body)), **(headers or {})} if binary else headers or {}
    status, _, reply = server.ask("POST", "/v2/models/tiny/infer", body + binary, given)
    return status, json.loads(reply)


def test_documented_bodies_are_taken(server, bundle):
    image = picture(0)
    logits = logits_of(bundle)[:1]
    # OpenVINO Model Server: the file behind the document, with its length in front or alone.
    for binary in (struct.pack("<I", len(image)) + image, image):
        for size in (len(binary), str(len(binary))):
            inputs = [{"name": "image", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": size}}]
            status, answer = infer(server, {"inputs": inputs}, binary)
            assert status == 200
            found = {one["name"]: one["data"] for one in answer["outputs"]}
            np.testing.assert_allclose([found["logits"]], logits, atol=1e-4)
    # KServe: tensors as JSON, nested or flat.
    pixels = Preprocessor(Bundle.open(bundle).manifest.image)(image)[np.newaxis]
    for data in (pixels.tolist(), pixels.ravel().tolist()):
        inputs = [{"name": "input", "shape": list(pixels.shape), "datatype": "FP32", "data": data}]
        status, answer = infer(server, {"id": "x", "inputs": inputs, "outputs": [{"name": "logits"}]})
        assert (status, answer["id"], answer["outputs"][0]["shape"]) == (200, "x", [1, 10])
        np.testing.assert_allclose([answer["outputs"][0]["data"]], logits, atol=1e-4)


def one(name, shape, datatype, **more):
    return json.dumps({"inputs": [{"name": name, "shape": shape, "datatype": datatype, **more}]}).encode()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (b"", "the request is not valid"),
        (b"[" * 100_000, "the request is not valid"),
        (b'{"other": ' + b"[" * 100_000, "it is nested too deeply"),
        (b'{"inputs": []}', "the request is not valid"),
        (one("image", [-1], "BYTES", data=["x"]), "the shape of input image is not valid"),
        (one("image", [0], "BYTES", data=[]), "a batch of 0"),
        (one("image", [999999], "BYTES", data=[]), "a batch of 999999"),
        (one("image", [1], "BYTES", data=["?"]), "not base64 strings"),
        (one("image", [1], "BYTES"), "neither data nor binary_data_size"),
        (one("image", [1], "FP32", data=[1]), "use BYTES"),
        (one("input", [1, 3], "FP32", data=[1]), "use [N, 3, 16, 16]"),
        (one("input", [1, 3, 16, 16], "FP32", data=[1]), "has 1"),
        (one("input", [1, 3, 16, 16], "FP32", data=["x"]), "Expected a number, got a string"),
        (one("input", [3, 3, 16, 16], "FP32", data=[0] * 768 + [-1e39] + [0] * 1535), "image 1 contains NaN"),
        (one("input", [2, 3, 16, 16], "FP32", data=[math.nan] * 1536), "(byte 84): 'NaN"),
        (one("image", [2], "BYTES", data=[["x"]] * 3), "input image has more elements than a batch of 2"),
        (one("input", [1, 3, 16, 16], "FP32", data=[3e38] * 768), "the stem returned NaN or infinity for image 0"),
        (one("input", [1] * 200, "FP32", data=[1]), "the shape of input input is not valid"),
        (b'{"a": [%s]}' % b",".join([b"{}"] * 3000), "has more than 2048 objects"),
        (
            one("image", [1], "BYTES", data=["x"], parameters={"binary_data_size": 1.5}),
            "an integer or a string or null",
        ),
        (one("image", [1], "BYTES", parameters={"shared_memory_region": "r"}), "'image' is in shared memory"),
        (
            b'{"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": ["x"]}], "outputs": [{"name": '
            b'"logits", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 40}}]}',
            "'logits' is in shared memory",
        ),
        (
            b'{"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": ["x"]}], "outputs": [%s]}'
            % b",".join([b'{"name": "logits"}'] * 4),
            "Expected an array of length <= 3",
        ),
        (one("image", [1], "BYTES", data=["x"], parameters=[]), "Expected an object or null, got an array"),
        (one("image", None, "BYTES", data=["x"]), "Expected an array, got null"),
        (one("image", [1], "BYTES", data="x"), "Expected an array, got a string"),
        (one("\xe9", [1], "BYTES", data=["x"]).decode("unicode-escape").encode("latin-1"), "it is not UTF-8"),
        (b'{"inputs": [undefined]}', "(byte 12): 'undefined]}'"),
        (one("pixels", [1, 1, 1, 3], "UINT8", data=[1, 2, 300]), "0 to 255"),
        (one("input", [1, 3, 1 << 31, 1 << 31], "FP32", data=[1]), "use [N, 3, 16, 16]"),
        (one("pixels", [1, 1 << 31, 1 << 31, 3], "UINT8", data=[1]), "needs"),
    ],
)
def test_bodies_that_cannot_be_used_are_refused(server, document, words):
    status, answer = infer(server, document)
    assert status == 400
    assert words in answer["error"]
    assert "\n" not in answer["error"]
    assert "`" not in answer["error"].partition(" - at ")[0]  # names of Python's types


def test_lengths_that_do_not_fit_are_refused(server):
    document = {"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}]}
    assert "4 bytes of binary data" in infer(server, document, b"1234")[1]["error"]
    for length, words in (
        ("99999", "send the whole body"),
        ("-1", "use a number of bytes"),
        ("x" * 99, "use a number"),
    ):
        headers = {"Inference-Header-Content-Length": length}
        status, answer = infer(server, document, headers=headers)
        assert status == 400
        assert words in answer["error"]
    assert infer(server, {"inputs": [1]}, b"x" * 2_000_000)[0] == 413


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
TENSOR = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["image", "pixels", "input", "x"]),
        "datatype": st.sampled_from(["BYTES", "UINT8", "FP32", "X"]),
        "shape": st.lists(st.integers(-1, 5), max_size=5),
    },
    optional={
        "data": JSON | st.lists(st.floats() | st.integers(), max_size=12),
        "parameters": JSON | st.fixed_dictionaries({"binary_data_size": st.integers(-1, 20) | st.text(max_size=3)}),
    },
)
REQUEST = st.fixed_dictionaries(
    {"inputs": st.lists(TENSOR, max_size=2)}, optional={"outputs": JSON, "parameters": JSON}
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON | REQUEST, st.binary(max_size=20), st.none() | st.integers(0, 200) | st.text("0123456789abc", max_size=4))
def test_whatever_is_sent_is_answered_with_one_line(server, document, binary, length):
    headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
    body = json.dumps(document).encode() + binary
    status, _, reply = server.ask("POST", "/v2/models/tiny/infer", body, headers)
    assert status in (200, 400), reply
    if status != 200:
        assert "\n" not in json.loads(reply)["error"]


def test_classes_of_an_answer_are_those_of_its_model_although_another_one_is_served_now(bundle):
    record = RequestRecord(0, "image 0", None, 1, 1000, False, None, (), 1, (0.0, 2.0))
    answer = Answer(0, np.array([0.0, 2.0], np.float32), 1, ("cat", "dog"), record)
    asked = json.dumps(
        {
            "inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": [""]}],
            "outputs": [{"name": "logits", "parameters": {"classification": 5}}, {"name": "label"}],
        }
    )
    request, _ = parse_request(asked.encode(), None)
    found = json.loads(response_of(request, Bundle.open(bundle), [answer], ())[0])
    assert [one["data"] for one in found["outputs"]] == [["2.000000:1:dog", "0.000000:0:cat"], ["dog"]]
