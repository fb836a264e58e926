"""Canonical form of the files in a bundle. Needs ``onnx``, but not torch.

A part is a self-contained graph of standard operators: opset 17 and IR version 8, which most toolchains of boards read
(19 and 9 where scales of quantization are in half precision), fixed tensor names, a batch axis called ``batch``, and no
other dynamic axes. :func:`canonicalize` rewrites a traced graph for that opset and for faster engines
(:mod:`ls_edge.export.portable`), and removes everything that depends on how and where it was traced (names of
intermediate values, stack traces, metadata), so that equal weights give equal bytes; :func:`identify` adds metadata
for readers of the file. :func:`check` compares a file with this form; ``ls_edge.export.verify`` compares its results.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from ls_edge.core.bundle import METADATA, Manifest, part_metadata
from ls_edge.core.errors import VerificationError
from ls_edge.engines.engine import Signature, Tensor
from ls_edge.export.portable import portable

EncodeError: Any = importlib.import_module("google.protobuf.message").EncodeError  # it has no types

OPSET, IR = 17, 8
HALF_SCALES = 19, 9
"""Opset and IR version of parts that quantize numbers in half precision."""
BATCH = "batch"
PRODUCER = "ls-edge"


def canonicalize(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """Return ``model`` reduced to its computation.

    ``names`` maps initializers to new names; other initializers become ``const_0``, ``const_1``, ... in order of first
    use. Unused initializers are dropped. Names of inputs and outputs are kept.
    """
    graph = model.graph
    rename = {"": "", **{value.name: value.name for value in (*graph.input, *graph.output)}}
    rewritten_nodes, stored = portable(model)
    used: list[str] = []
    nodes = []
    taken = set(rename) | set(names.values())
    for index, node in enumerate(rewritten_nodes):
        for name in node.input:
            if name in stored and name not in used:
                used.append(name)
                constants = len([n for n in used if n not in names]) - 1
                rename[name] = names.get(name) or _free(f"const_{constants}", taken)
        for place, name in enumerate(node.output):
            if name not in rename:
                rename[name] = _free(f"{node.op_type.lower()}_{index}" + (f"_{place}" if place else ""), taken)
        fresh = onnx.NodeProto(op_type=node.op_type, name=f"{node.op_type}_{index}", domain=node.domain)
        fresh.input.extend(rename[name] for name in node.input)
        fresh.output.extend(rename[name] for name in node.output)
        fresh.attribute.extend(_attributes(node, stored))
        nodes.append(fresh)
    clean = onnx.ModelProto(ir_version=IR, producer_name=PRODUCER)
    clean.opset_import.append(onnx.helper.make_opsetid("", OPSET))
    clean.graph.name = "part"
    clean.graph.node.extend(nodes)
    for name in used:
        clean.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(stored[name]), rename[name]))
    clean.graph.input.extend(_value(value) for value in graph.input)
    clean.graph.output.extend(_value(value) for value in graph.output)
    return clean


def _free(name: str, taken: set[str]) -> str:
    candidate, count = name, 0
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    taken.add(candidate)
    return candidate


def _attributes(node: onnx.NodeProto, stored: Mapping[str, onnx.TensorProto]) -> list[onnx.AttributeProto]:
    """Return the sorted attributes without documentation.

    Drop ``allowzero`` if it has no effect, since not every parser supports it.
    """
    kept = []
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        if attribute.name == "allowzero" and node.op_type == "Reshape":
            shape = stored.get(node.input[1])
            if attribute.i == 0 or (shape is not None and 0 not in numpy_helper.to_array(shape)):
                continue
        fresh = onnx.AttributeProto()
        fresh.CopyFrom(attribute)
        fresh.ClearField("doc_string")
        kept.append(fresh)
    return kept


def _value(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    kind = value.type.tensor_type
    dims = [dim.dim_param or dim.dim_value for dim in kind.shape.dim]
    return onnx.helper.make_tensor_value_info(value.name, kind.elem_type, dims)


def rewritten(
    model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto], initializers: Iterable[onnx.TensorProto]
) -> onnx.ModelProto:
    """Return a copy of ``model`` with these nodes and initializers."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:], result.graph.initializer[:]
    result.graph.node.extend(nodes)
    result.graph.initializer.extend(initializers)
    return result


def identify(model: onnx.ModelProto, part: str, draft: Manifest) -> None:
    """Give ``model`` a graph name and metadata that identify it and are equal in all exports of a run."""
    model.graph.name = f"{PRODUCER}-{draft.model_id[:16]}-{part.replace(' ', '-')}"
    onnx.helper.set_model_props(model, part_metadata(draft, part))


def digest_of_graph(model: onnx.ModelProto) -> bytes:
    """Return a digest of nodes and weights, which does not depend on names that :func:`identify` gives."""
    digest = hashlib.sha256()
    for item in (*model.graph.node, *model.graph.initializer):
        digest.update(item.SerializeToString(deterministic=True))
    return digest.digest()


def to_bytes(model: onnx.ModelProto, name: str) -> bytes:
    """Serialize a model deterministically; raise :class:`VerificationError` above protobuf's limit of 2 GB."""
    try:
        return bytes(model.SerializeToString(deterministic=True))
    except (ValueError, EncodeError) as error:  # nor does ByteSize() count such a model
        raise VerificationError(
            f"{name} takes more than an ONNX file holds, which is 2 GB ({error}); "
            + ("leave out --whole" if name == "whole" else "choose a model with smaller blocks")
        ) from None


def check(raw: bytes, name: str, signature: Signature) -> None:
    """Check the bytes of a part; raise :class:`VerificationError` with the part's name and all problems."""
    try:
        model = onnx.load_model_from_string(raw)
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # noqa: BLE001 - protobuf, the checker, and shape inference raise different kinds
        text = " ".join(str(error).split())
        raise VerificationError(f"{name} is not a valid ONNX file ({text[:300]}); export the run again") from None
    found = _problems(model)
    for what, values, wanted in (
        ("inputs", model.graph.input, signature.inputs),
        ("outputs", model.graph.output, (signature.output,)),
    ):
        theirs, ours = _tensors(values), [(tensor, BATCH) for tensor in wanted]
        if theirs != ours:
            found.append(f"its {what} are {_shown(theirs)}, expected {_shown(ours)}")
    if found:
        raise VerificationError(
            f"{name} is not in the form that this version writes: {'; '.join(found)}; export it again"
        )


def _problems(model: onnx.ModelProto) -> list[str]:
    opsets = {o.domain: o.version for o in model.opset_import}
    foreign = [item for item in model.metadata_props if not item.key.startswith(METADATA)]
    opset, ir = HALF_SCALES if any(node.op_type == "QuantizeLinear" for node in model.graph.node) else (OPSET, IR)
    problems = {
        f"IR version {model.ir_version}, but not every engine reads versions above {ir}": model.ir_version > ir,
        f"opsets {opsets}, expected only {opset} of the standard operators": opsets != {"": opset},
        f"{len(model.functions)} local functions": bool(model.functions),
        "weights in another file": any(tensor.external_data for tensor in model.graph.initializer),
        "metadata of the machine that traced it": bool(foreign)
        or any(item.metadata_props for item in (model.graph, *model.graph.node)),
    }
    return [text for text, found in problems.items() if found]


def _tensors(values: Sequence[onnx.ValueInfoProto]) -> list[tuple[Tensor, str]]:
    found = []
    for value in values:
        kind = value.type.tensor_type
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
        first, *rest = kind.shape.dim or [onnx.TensorShapeProto.Dimension()]
        sizes = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in rest)
        found.append((Tensor(value.name, dtype, sizes), first.dim_param or str(first.dim_value)))
    return found


def _shown(tensors: Sequence[tuple[Tensor, str]]) -> str:
    return ", ".join(f"{tensor} (B: {batch})" for tensor, batch in tensors) or "none"
