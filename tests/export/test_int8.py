"""Int8: linear layers only, since quantized residual sums ruin a transformer."""

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from ls_edge.export import verify
from ls_edge.export.fp16 import to_half
from ls_edge.export.int8 import linear_layers, quantize_dynamic, quantize_explicit, quantize_weight
from ls_edge.export.targets import prepare_for_export
from ls_edge.export.trace_onnx import trace_blocks
from ls_edge.training.runs.checkpoint import load_run
from tests.export.onnx_models import TOKENS, dims, run, session_of

ROWS = np.random.default_rng(0).standard_normal((2, *TOKENS), dtype=np.float32)
IMAGES = np.random.default_rng(1).standard_normal((4, 3, 16, 16), dtype=np.float32)


def test_only_linear_layers_are_quantized(traced):
    dynamic = quantize_dynamic(traced[0])
    onnx.checker.check_model(dynamic, full_check=True)
    counts = Counter(node.op_type for node in dynamic.graph.node)
    assert (counts["MatMulInteger"], counts["MatMul"], counts["LayerNormalization"], counts["Softmax"]) == (4, 2, 2, 1)
    assert counts["DynamicQuantizeLinear"] == 4
    scales = [t for t in dynamic.graph.initializer if t.name.endswith(".t_scale")]
    assert sorted(t.dims[0] for t in scales) == [32, 32, 64, 96]
    explicit = quantize_explicit(traced[0], {linear.activations: 3.0 for linear in linear_layers(traced[0])})
    onnx.checker.check_model(explicit, full_check=True)
    counts = Counter(node.op_type for node in explicit.graph.node)
    assert (counts["QuantizeLinear"], counts["DequantizeLinear"], counts["MatMul"]) == (4, 8, 6)
    consumers = {name: node.op_type for node in explicit.graph.node for name in node.input}
    assert all(consumers[n.output[0]] == "DequantizeLinear" for n in explicit.graph.node if n.op_type[:2] == "Qu")
    assert all(consumers[n.output[0]] == "MatMul" for n in explicit.graph.node if n.op_type == "DequantizeLinear")


def test_weights_are_quantized_by_channel():
    weight = np.array([[1.0, 1000.0, 0.0], [-0.5, 10.0, 0.0]], np.float32)
    whole, scale = quantize_weight(weight)
    assert whole.dtype == np.int8
    np.testing.assert_array_equal(np.abs(whole).max(axis=0), [127, 127, 0])
    assert (np.abs(whole * scale - weight) <= scale * 0.5001).all()


@pytest.mark.parametrize("largest", [3e-6, 1e-5, 1e-30])
def test_no_scale_of_a_channel_is_zero_in_float16(traced, largest):
    model = onnx.ModelProto()
    model.CopyFrom(traced[0])
    names = {linear.weight for linear in linear_layers(model)}
    for tensor in model.graph.initializer:
        if tensor.name in names:
            weight = numpy_helper.to_array(tensor).copy()
            weight[:, 0] *= largest / np.abs(weight[:, 0]).max()
            tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))
    explicit = to_half(quantize_explicit(model, {linear.activations: 3.0 for linear in linear_layers(model)}))
    scales = [numpy_helper.to_array(t) for t in explicit.graph.initializer if t.name.endswith("_scale_half")]
    assert len(scales) == 8
    assert all((scale > 0).all() for scale in scales)
    np.testing.assert_allclose(run(explicit, ROWS), run(model, ROWS), atol=0.1)


def massive(view):
    """Give two channels much larger values than the others, as in trained vision transformers."""
    view.model.pos_embed[..., 0] += 1000.0
    view.model.pos_embed[..., 1] -= 1000.0
    for block in view.blocks:
        for norm in (block.norm1, block.norm2):
            norm.weight.fill_(250.0)
            norm.weight[:2] = 0.05
    view.model.norm.weight.fill_(250.0)
    view.model.norm.weight[:2] = 0.05


def test_quantized_residual_sums_ruin_answers_that_quantized_linear_layers_keep(make_run, tmp_path):
    run_ = load_run(make_run(tmp_path / "run", change=massive))
    view = run_.view
    tokens = view.stem(torch.from_numpy(IMAGES)).detach()
    with torch.no_grad():
        expected = view(torch.from_numpy(IMAGES)).numpy()
    ours = theirs = tokens.numpy()
    for model in trace_blocks(prepare_for_export(view)):
        ours = run(quantize_dynamic(model), ours)
        theirs = run(with_quantized_sums(quantize_dynamic(model)), theirs)
    with torch.no_grad():
        kept, ruined = (view.head(torch.from_numpy(t)).numpy() for t in (ours, theirs))
    assert cosine(kept, expected) >= 0.999
    assert cosine(ruined, expected) < 0.9


def with_quantized_sums(model):
    """Quantize each residual sum too, with one scale per tensor, as tools do by default."""
    constants = {t.name for t in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Add" or set(node.input) & constants:
            nodes.append(node)
            continue
        name = node.output[0]
        node.output[0] = f"{name}_sum"
        pair = [f"{name}_q", f"{name}_s", f"{name}_z"]
        nodes += [
            node,
            helper.make_node("DynamicQuantizeLinear", [node.output[0]], pair),
            helper.make_node("DequantizeLinear", pair, [name]),
        ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model, full_check=True)
    return model


def cosine(a, b):
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize(("convert", "kind"), [(to_half, TensorProto.FLOAT16), (quantize_dynamic, TensorProto.INT8)])
def test_matrices_by_slot_are_stored_in_the_precision_of_the_weights(shared_runs, convert, kind):
    traced = next(iter(trace_blocks(prepare_for_export(load_run(shared_runs / "run").view))))
    model = convert(traced)
    onnx.checker.check_model(model, full_check=True)
    matrices = [t for t in model.graph.initializer if len(t.dims) == 3 and min(t.dims) > 1]
    assert len(matrices) == 8
    assert {t.data_type for t in matrices} == {kind}
    tokens = np.random.default_rng(0).standard_normal((2, *dims(traced.graph.input[0])[1:]), dtype=np.float32)
    for slot in range(4):
        feeds = {"tokens": tokens, "slot": np.full(2, slot, np.int64)}
        expected, found = (session_of(m.SerializeToString()).run(None, feeds)[0] for m in (traced, model))
        assert cosine(found, expected) > 0.999


def test_logits_of_a_head_of_zeros_are_as_good_as_equal():
    assert verify.cosine(np.zeros((2, 5)), np.zeros((2, 5))) == 1.0
    assert verify.cosine(np.zeros((2, 5)), np.arange(10.0).reshape(2, 5)) == 0.0
