"""Tracing: names of weights, and a template that serves for all blocks alike."""

import numpy as np
import onnxruntime
import pytest
import torch

from ls_edge.export.targets import block_target, prepare_for_export
from ls_edge.export.trace_onnx import trace, trace_blocks
from tests.export.onnx_models import TOKENS, model_of


def test_weights_are_named_after_the_parameters(exported):
    names = {tensor.name for tensor in model_of(exported, "block 2").graph.initializer}
    assert {"norm1.weight", "norm1.bias", "attn.qkv.weight.t", "attn.qkv.bias", "mlp.fc2.weight.t"} <= names


def test_a_block_from_the_template_computes_the_same_as_one_traced_alone(loaded, exported):
    view = prepare_for_export(loaded.view)
    by_itself = onnxruntime.InferenceSession(trace(block_target(view, 2)).SerializeToString())
    filled = onnxruntime.InferenceSession(exported.read("block 2"))
    tokens = np.random.default_rng(0).standard_normal((3, *TOKENS), dtype=np.float32)
    one, two = (session.run(None, {"tokens": tokens})[0] for session in (by_itself, filled))
    np.testing.assert_array_equal(one, two)


@pytest.mark.release
def test_blocks_that_differ_are_traced_one_by_one(loaded):
    view = prepare_for_export(loaded.view)
    view.blocks[1].norm1.eps = 0.1
    tokens = torch.randn(2, *TOKENS, generator=torch.Generator().manual_seed(0))
    for index, model in enumerate(trace_blocks(view)):
        session = onnxruntime.InferenceSession(model.SerializeToString())
        with torch.no_grad():
            expected = view.block(index, tokens).numpy()
        np.testing.assert_allclose(session.run(None, {"tokens": tokens.numpy()})[0], expected, rtol=0, atol=1e-5)
