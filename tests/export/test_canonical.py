"""The canonical form of files: names and shapes of the contract, plain operators of old versions."""

from collections import Counter
from importlib.metadata import version

import onnx
import pytest

from ls_edge.core.errors import (
    VerificationError,
)
from ls_edge.engines.engine import signature_of
from ls_edge.export.canonical import check, to_bytes
from tests.export.onnx_models import dims, model_of


def test_names_and_shapes_are_those_of_the_contract(exported):
    wanted = {
        "stem": ("images", ["batch", 3, 16, 16], "tokens", ["batch", 17, 32]),
        "block 1": ("tokens", ["batch", 17, 32], "tokens_out", ["batch", 17, 32]),
        "head": ("tokens", ["batch", 17, 32], "logits", ["batch", 10]),
        "whole": ("images", ["batch", 3, 16, 16], "logits", ["batch", 10]),
    }
    for name, (source, source_dims, target, target_dims) in wanted.items():
        graph = model_of(exported, name).graph
        assert [(v.name, dims(v)) for v in graph.input] == [(source, source_dims)]
        assert [(v.name, dims(v)) for v in graph.output] == [(target, target_dims)]


def test_every_part_is_a_plain_file_in_versions_that_engines_read(exported):
    for name, _ in exported.manifest.part_names():
        raw = exported.read(name)
        model = onnx.load_model_from_string(raw)
        onnx.checker.check_model(model, full_check=True)
        assert model.ir_version == 8
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 17)]
        assert not model.functions
        assert all(item.key.startswith("ls_edge.") for item in model.metadata_props)
        assert not any(node.metadata_props or node.doc_string for node in model.graph.node)
        assert b".py" not in raw
        assert not any("/" in node.name for node in model.graph.node)


def test_norms_are_single_operators(exported):
    counts = Counter(node.op_type for node in model_of(exported, "block 0").graph.node)
    assert counts["LayerNormalization"] == 2
    assert counts["Erf"] == 1
    assert counts["Softmax"] == 1
    assert counts["MatMul"] == 6
    folded = {"Shape"} if version("onnxscript") >= "0.7.2" else set()  # older ones leave the batch's own shape
    assert not counts.keys() & {"Gelu", "ReduceMean", "Pow", "Sqrt", "Constant", "Cast", *folded}
    assert Counter(n.op_type for n in model_of(exported, "head").graph.node)["LayerNormalization"] == 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda m: m.graph.input[0].type.tensor_type.shape.dim[0].__setattr__("dim_param", "n"), "batch"),
        (lambda m: m.opset_import[0].__setattr__("version", 21), "opsets {'': 21}"),
        (lambda m: m.__setattr__("ir_version", 10), "version 10"),
        (lambda m: m.metadata_props.add(key="where", value="here"), "metadata"),
        (lambda m: m.graph.node[0].__setattr__("op_type", "Sausage"), "not a valid ONNX"),
    ],
)
def test_a_file_in_another_form_is_refused(exported, spoil, words):
    model = model_of(exported, "block 1")
    spoil(model)
    with pytest.raises(VerificationError, match=r"^block 1 ") as caught:
        check(to_bytes(model, "block 1"), "block 1", signature_of(exported.manifest, "block 1"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.release
def test_a_part_above_two_gigabytes_is_one_line():
    model = onnx.ModelProto()
    # In place: a copy of a tensor of this size fails.
    model.graph.initializer.add(name="w", data_type=onnx.TensorProto.FLOAT, dims=[2**29]).raw_data = bytes(2**31)
    with pytest.raises(VerificationError, match=r"^block 3 takes more than an ONNX file holds, which is 2 GB"):
        to_bytes(model, "block 3")
