"""``/openapi.json`` describes the paths that there are, and the responses that they give."""

import json
import re

import jsonschema
import pytest

from ls_edge.runtime.serve.access import Access
from ls_edge.runtime.serve.application import Api
from ls_edge.runtime.serve.bodies import Bodies
from ls_edge.runtime.serve.service import Service
from ls_edge.runtime.source.source import Source
from tests.runtime.serve.serving import OCTETS, Server, picture


@pytest.fixture(scope="module")
def server(ls_edge_of_module, swarm, bundle):
    """A server that no test changes."""
    one = Server(ls_edge_of_module, swarm.path, bundle, "--max-body", 100_000)
    assert one.predict(picture())[0] == 200  # its links are up
    return one


@pytest.fixture(scope="module")
def document(server):
    return server.get("/openapi.json")[1]


def checked(document, path, method, status, headers, body):
    """Validate a response by the schema of its status."""
    found = document["paths"][path][method.lower()]["responses"][str(status)]
    while "$ref" in found:
        found = document["components"]["responses"][found["$ref"].rpartition("/")[2]]
    kind = headers["Content-Type"].partition(";")[0]
    schema = found["content"][kind]["schema"]
    assert {name for name, one in found.get("headers", {}).items() if one.get("required")} <= set(headers)
    if kind == "application/json":
        jsonschema.validate(json.loads(body), {**schema, "components": document["components"]})


def test_paths_and_methods_are_those_of_the_server(document, swarm, bundle):
    with Source.open(swarm.path, bundle) as source:
        service = Service(source, holder_wait_s=0.0, queue=0)
        routes = Api(service, Access(loopback_only=True), Bodies(1)).application.router.routes()
        service.close()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.resource.canonical) for route in routes if route.method != "HEAD"}
    for path, methods in document["paths"].items():
        for method in methods.values():
            given = [one["$ref"].rpartition("/")[2] for one in method.get("parameters", ())]
            used = {document["components"]["parameters"][name]["name"] for name in given}
            assert set(re.findall(r"{(\w+)}", path)) <= used


def test_document_is_valid_and_every_reference_leads_somewhere(document):
    references = set(re.findall(r'"#/components/(\w+)/(\w+)"', json.dumps(document)))
    defined = {(kind, name) for kind, all_ in document["components"].items() for name in all_}
    assert references <= defined
    assert defined - references == {("securitySchemes", "token")}
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_responses_are_as_described(server, document):
    paths = [path for path, methods in document["paths"].items() if "get" in methods and path != "/events"]
    for path in paths:
        asked = path.format(model="tiny", version="1")
        checked(document, path, "GET", *server.ask("GET", asked))
        if "{" in path:
            status, headers, body = server.ask("GET", path.format(model="other", version="1"))
            assert status == 404
            checked(document, path, "GET", status, headers, body)


@pytest.mark.parametrize(
    ("query", "headers", "body", "status"),
    [
        ("", OCTETS, picture(), 200),
        ("?logits=1&top=2", OCTETS, picture(), 200),
        ("?top=0", OCTETS, picture(), 400),
        ("", {"Content-Type": "text/plain"}, b"x", 415),
        ("", OCTETS, bytes(200_000), 413),
    ],
)
def test_responses_to_images_are_as_described(server, document, query, headers, body, status):
    found = server.ask("POST", f"/predict{query}", body, headers)
    assert found[0] == status
    checked(document, "/predict", "POST", *found)


def test_inference_is_as_described(server, document):
    path = "/v2/models/{model}/infer"
    request = document["components"]["schemas"]["InferRequest"]
    image = {"name": "input", "shape": [1, 3, 16, 16], "datatype": "FP32", "data": [0.5] * 768}
    for more in ({}, {"id": "x", "outputs": [{"name": "label", "parameters": {"classification": 2}}]},
                 {"id": None, "outputs": None, "parameters": None}):  # fmt: skip
        given = {"inputs": [image], **more}
        jsonschema.validate(given, {**request, "components": document["components"]})
        found = server.ask("POST", path.format(model="tiny"), json.dumps(given).encode(), {})
        assert found[0] == 200
        checked(document, path, "POST", *found)
    for wrong in ({"inputs": [{**image, "shape": ["1"]}]}, {"inputs": []}, {}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, {**request, "components": document["components"]})
        found = server.ask("POST", path.format(model="tiny"), json.dumps(wrong).encode(), {})
        assert found[0] == 400
        checked(document, path, "POST", *found)
