"""The files of a bundle: plain ONNX, the contract's names, one operator per norm and activation."""

from collections import Counter
from importlib.metadata import version

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from ls_edge.core.errors import VerificationError
from ls_edge.engines.engine import signature_of
from ls_edge.export.canonical import check, to_bytes
from ls_edge.export.targets import block_target, prepare_for_export
from ls_edge.export.trace_onnx import trace, trace_blocks

TOKENS = (17, 32)


def model_of(bundle, name):
    return onnx.load_model_from_string(bundle.read(name))


def dims(value):
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def test_names_and_shapes_are_the_contracts(exported):
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


def test_every_part_is_a_plain_file_of_old_enough_versions(exported):
    for name, _ in exported.manifest.part_names():
        raw = exported.read(name)
        model = onnx.load_model_from_string(raw)
        onnx.checker.check_model(model, full_check=True)
        assert model.ir_version <= 10
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 20)]
        assert not model.functions
        assert all(item.key.startswith("ls_edge.") for item in model.metadata_props)
        assert not any(node.metadata_props or node.doc_string for node in model.graph.node)
        assert b".py" not in raw
        assert not any("/" in node.name for node in model.graph.node)


def test_norms_and_activations_are_single_operators(exported):
    counts = Counter(node.op_type for node in model_of(exported, "block 0").graph.node)
    assert counts["LayerNormalization"] == 2
    assert counts["Gelu"] == 1
    assert counts["Softmax"] == 1
    assert counts["MatMul"] == 6
    folded = {"Shape"} if version("onnxscript") >= "0.7.2" else set()  # older ones leave the batch's own shape
    assert not counts.keys() & {"Erf", "ReduceMean", "Pow", "Sqrt", "Constant", "Cast", *folded}
    assert Counter(n.op_type for n in model_of(exported, "head").graph.node)["LayerNormalization"] == 1


def test_weights_are_named_after_the_parameters(exported):
    names = {tensor.name for tensor in model_of(exported, "block 2").graph.initializer}
    assert {"norm1.weight", "norm1.bias", "attn.qkv.weight.t", "attn.qkv.bias", "mlp.fc2.weight.t"} <= names


def test_a_block_filled_into_the_template_is_the_block_traced_by_itself(loaded, exported):
    view = prepare_for_export(loaded.view)
    by_itself = onnxruntime.InferenceSession(trace(block_target(view, 2)).SerializeToString())
    filled = onnxruntime.InferenceSession(exported.read("block 2"))
    tokens = np.random.default_rng(0).standard_normal((3, *TOKENS), dtype=np.float32)
    one, two = (session.run(None, {"tokens": tokens})[0] for session in (by_itself, filled))
    np.testing.assert_array_equal(one, two)


def test_blocks_that_are_not_alike_are_traced_one_by_one(loaded):
    view = prepare_for_export(loaded.view)
    view.blocks[1].norm1.eps = 0.1
    tokens = torch.randn(2, *TOKENS, generator=torch.Generator().manual_seed(0))
    for index, model in enumerate(trace_blocks(view)):
        session = onnxruntime.InferenceSession(model.SerializeToString())
        with torch.no_grad():
            expected = view.block(index, tokens).numpy()
        np.testing.assert_allclose(session.run(None, {"tokens": tokens.numpy()})[0], expected, rtol=0, atol=1e-5)


def test_the_view_itself_is_not_changed_by_exporting(loaded):
    before = {name: value.clone() for name, value in loaded.view.state_dict().items()}
    view = prepare_for_export(loaded.view)
    list(trace_blocks(view))
    after = loaded.view.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(before[name], value) for name, value in view.state_dict().items())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda m: m.graph.input[0].type.tensor_type.shape.dim[0].__setattr__("dim_param", "n"), "batch"),
        (lambda m: m.opset_import[0].__setattr__("version", 21), "opsets {'': 21}"),
        (lambda m: m.__setattr__("ir_version", 11), "version 11"),
        (lambda m: m.metadata_props.add(key="where", value="here"), "metadata"),
        (lambda m: m.graph.node[0].__setattr__("op_type", "Sausage"), "not a valid ONNX"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_named(exported, spoil, words):
    model = model_of(exported, "block 1")
    spoil(model)
    with pytest.raises(VerificationError, match=r"^block 1 ") as caught:
        check(to_bytes(model, "block 1"), "block 1", signature_of(exported.manifest, "block 1"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
