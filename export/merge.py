"""Merging of all ONNX parts into one graph. Needs only ``onnx``.

The whole model is for comparison: ``ls-edge bench`` times the chain of parts against it, and ``export --whole`` writes
it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx.version_converter
from onnx import helper, numpy_helper

from ls_edge.export.canonical import to_bytes


def merge(stem: bytes, blocks: Sequence[bytes], head: bytes) -> bytes:
    """Merge parts into a graph ``images -> logits``; a block's slot is its place in trained order."""
    parts = [onnx.load_model_from_string(raw) for raw in (stem, *blocks, head)]
    prefixes = ["stem", *(f"blocks.{index}" for index in range(len(blocks))), "head"]
    return to_bytes(_join(parts, prefixes), "whole")


def _add_slot(whole: onnx.ModelProto, name: str, slot: int, tokens: str) -> None:
    """Add the nodes that compute the input ``slot`` of a block for the batch of ``tokens``."""
    value = numpy_helper.from_array(np.array([slot], dtype=np.int64), f"{name}.value")
    whole.graph.initializer.append(value)
    size = helper.make_node("Shape", [tokens], [f"{name}.batch"], name=f"{name}.Shape", start=0, end=1)
    fill = helper.make_node("Expand", [f"{name}.value", f"{name}.batch"], [name], name=f"{name}.Expand")
    whole.graph.node.extend([size, fill])


def _join(parts: Sequence[onnx.ModelProto], prefixes: Sequence[str]) -> onnx.ModelProto:
    """Chain parts, which are the stem, the blocks, and the head."""
    newest = max(parts, key=lambda part: part.opset_import[0].version)
    whole = onnx.ModelProto(ir_version=newest.ir_version, producer_name=newest.producer_name)
    whole.opset_import.extend(newest.opset_import)
    parts = [
        part
        if part.opset_import == newest.opset_import
        else onnx.version_converter.convert_version(part, newest.opset_import[0].version)
        for part in parts
    ]
    whole.graph.name = "whole"
    whole.graph.input.extend(parts[0].graph.input)
    whole.graph.output.extend(parts[-1].graph.output)
    current = whole.graph.input[0].name
    for index, (prefix, part) in enumerate(zip(prefixes, parts, strict=True)):
        inputs = [current]
        if len(part.graph.input) > 1:
            inputs.append(f"{prefix}.slot")
            _add_slot(whole, inputs[1], index - 1, current)
        current = _append(whole, part, prefix, inputs, last=index == len(parts) - 1)
    return whole


def _append(whole: onnx.ModelProto, part: onnx.ModelProto, prefix: str, inputs: Sequence[str], *, last: bool) -> str:
    """Add the graph of a part, which reads ``inputs``; return the name of its output."""
    output = part.graph.output[0].name
    names = {"": "", output: output if last else f"{prefix}.{output}"}
    names.update(zip((value.name for value in part.graph.input), inputs, strict=True))
    for node in part.graph.node:
        fresh = whole.graph.node.add()
        fresh.CopyFrom(node)
        fresh.name = f"{prefix}.{node.name}"
        del fresh.input[:], fresh.output[:]
        fresh.input.extend(names.get(name, f"{prefix}.{name}") for name in node.input)
        fresh.output.extend(names.get(name, f"{prefix}.{name}") for name in node.output)
    for tensor in part.graph.initializer:
        fresh_tensor = whole.graph.initializer.add()
        fresh_tensor.CopyFrom(tensor)
        fresh_tensor.name = f"{prefix}.{tensor.name}"
    return names[output]
