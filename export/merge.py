"""One ONNX file of the whole model, merged from a bundle's parts in trained order. Needs ``onnx``, never torch.

For comparison only: ``ls-edge bench`` times the chain of parts against it, and ``export --whole`` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ls_edge.export.structure import to_bytes


def merge(stem: bytes, blocks: Sequence[bytes], head: bytes) -> bytes:
    """Join parts into ``images -> logits``; a block's slot is its place in trained order."""
    whole = onnx.ModelProto()
    first = onnx.load_model_from_string(stem)
    whole.ir_version = first.ir_version
    whole.producer_name = first.producer_name
    whole.opset_import.extend(first.opset_import)
    whole.graph.name = "whole"
    whole.graph.input.extend(first.graph.input)
    current = first.graph.input[0].name
    for index, raw in enumerate((stem, *blocks, head)):
        part = first if index == 0 else onnx.load_model_from_string(raw)
        prefix = "stem" if index == 0 else "head" if index == len(blocks) + 1 else f"blocks.{index - 1}"
        current = _append(whole, part, prefix, current, slot=index - 1)
    output = whole.graph.output.add()
    output.CopyFrom(part.graph.output[0])
    whole.graph.node[-1].output[list(whole.graph.node[-1].output).index(current)] = output.name
    return to_bytes(whole, "the whole model")


def _append(whole: onnx.ModelProto, part: onnx.ModelProto, prefix: str, tokens: str, slot: int) -> str:
    """Add a part's graph, reading ``tokens``, and return the name of what it computes."""
    names = {"": "", part.graph.input[0].name: tokens}
    for extra in part.graph.input[1:]:
        names[extra.name] = f"{prefix}.{extra.name}"
        _add_slot(whole, names[extra.name], tokens, slot)
    for node in part.graph.node:
        fresh = whole.graph.node.add()
        fresh.CopyFrom(node)
        fresh.name = f"{prefix}.{node.name}"
        del fresh.input[:], fresh.output[:]
        fresh.input.extend(names.get(name, f"{prefix}.{name}") for name in node.input)
        fresh.output.extend(f"{prefix}.{name}" if name else "" for name in node.output)
    for tensor in part.graph.initializer:
        fresh_tensor = whole.graph.initializer.add()
        fresh_tensor.CopyFrom(tensor)
        fresh_tensor.name = f"{prefix}.{tensor.name}"
    return f"{prefix}.{part.graph.output[0].name}"


def _add_slot(whole: onnx.ModelProto, name: str, tokens: str, slot: int) -> None:
    """Fill ``name``, int64 ``[B]``, with ``slot``."""
    value = numpy_helper.from_array(np.array([slot], dtype=np.int64), f"{name}.value")
    whole.graph.initializer.append(value)
    size = helper.make_node("Shape", [tokens], [f"{name}.batch"], name=f"{name}.Shape", start=0, end=1)
    fill = helper.make_node("Expand", [value.name, size.output[0]], [name], name=f"{name}.Expand")
    whole.graph.node.extend([size, fill])
