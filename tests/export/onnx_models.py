"""ONNX models as tests read and run them."""

import onnx
import onnxruntime

TOKENS = (17, 32)
"""Tokens of the exported run: their number and width."""


def session_of(raw):
    """Open plain ONNX Runtime without saturation of int8 products, which happens on processors without VNNI."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(raw, options)


def run(model, tokens):
    return session_of(model.SerializeToString()).run(None, {"tokens": tokens})[0]


def model_of(bundle, name):
    return onnx.load_model_from_string(bundle.read(name))


def dims(value):
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def types_of(model):
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
    return {v.name: v.type.tensor_type.elem_type for v in values} | {
        t.name: t.data_type for t in inferred.graph.initializer
    }


def beyond_half(view):
    """Change a model so that values inside block 1 exceed the range of float16, but not its result."""
    mlp = view.blocks[1].mlp
    mlp.fc1.weight.mul_(2e4)
    mlp.fc2.weight.mul_(5e-3)
