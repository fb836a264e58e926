"""Tracing of modules to ONNX graphs; the graph of one block serves as a template for all blocks.

``torch.onnx.export`` with ``dynamo=True`` writes ``LayerNormalization`` and ``Gelu`` as single operators and folds the
shape arithmetic of a fixed token count. Since it takes a second or more per module and blocks usually differ only in
their weights, block 0 is traced once, with random weights in all of its parameters (equal weights, such as biases of
zero, would be merged into one tensor). Each tensor of the graph is then matched with a parameter, and the weights of
the other blocks are filled in. If a tensor cannot be matched with certainty, each block is traced separately.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn

from ls_edge.core.bundle import NOT_FOLDED, Folded
from ls_edge.core.errors import ModelError
from ls_edge.export.canonical import BATCH, canonicalize
from ls_edge.export.portable import TRACED_OPSET
from ls_edge.export.targets import ExportTarget, block_target, prepare_for_export
from ls_edge.training.models.view import BlockView

Origin = tuple[str, bool]
"""Name of a parameter, and whether the graph contains it transposed."""


def trace(target: ExportTarget) -> onnx.ModelProto:
    """Trace a target, and name weights after the parameters; raise :class:`ModelError` if torch fails."""
    model = _traced(target)
    origins = _parameter_origins(model, _arrays(target.module))
    return canonicalize(model, _names(origins, r"^view\.(model\.)?"))


def _traced(target: ExportTarget) -> onnx.ModelProto:
    batch = torch.export.Dim(BATCH)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad(), _quiet_exporter():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                target.module,
                tuple(target.inputs.values()),
                None,
                dynamo=True,
                opset_version=TRACED_OPSET,
                verbose=False,
                input_names=list(target.inputs),
                output_names=[target.output],
                dynamic_shapes=tuple({0: batch} for _ in target.inputs),
            )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
        cause = error.__cause__ or error
        reason = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise ModelError(
            f"torch cannot export {target.name} of this model to ONNX ({type(cause).__name__}: {reason[:200]}); choose "
            "another model, or see the traceback with --debug"
        ) from error
    assert program is not None
    return program.model_proto


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence the exporter's messages about constants, and its progress bar, which leaves a thread running."""
    with contextlib.ExitStack() as stack:
        for name in ("onnxscript", "onnx_ir"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        with contextlib.suppress(ImportError):
            tqdm: Any = importlib.import_module("tqdm").tqdm
            stack.callback(setattr, tqdm, "monitor_interval", tqdm.monitor_interval)
            tqdm.monitor_interval = 0
        yield


def _arrays(module: nn.Module) -> dict[str, np.ndarray]:
    """Return floating-point parameters and buffers by name."""
    both = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().numpy() for name, tensor in both if tensor.is_floating_point()}


def _parameter_origins(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> dict[str, Origin]:
    """Return the parameter that each float initializer of ``model`` comes from, if any."""
    by_bytes: dict[tuple[tuple[int, ...], bytes], Origin] = {}
    for name, array in arrays.items():
        if array.ndim == 2:
            by_bytes.setdefault((array.T.shape, array.T.tobytes()), (name, True))
    for name, array in reversed(list(arrays.items())):
        by_bytes[array.shape, array.tobytes()] = (name, False)
    found = {}
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        origin = by_bytes.get((array.shape, array.tobytes()))
        if origin is not None and array.dtype == np.float32:
            found[tensor.name] = origin
    return found


def _names(origins: Mapping[str, Origin], prefix: str) -> dict[str, str]:
    """Name initializers after their parameters, without the pattern ``prefix``; the first initializer gets the name."""
    result: dict[str, str] = {}
    for initializer, (parameter, transposed) in origins.items():
        name = re.sub(prefix, "", parameter) + (".t" if transposed else "")
        if name not in result.values():
            result[initializer] = name
    return result


@dataclass(frozen=True)
class _Template:
    """Graph of block 0, and the parameter that each of its tensors comes from."""

    model: onnx.ModelProto
    origins: dict[str, Origin]
    """Parameters by the name of the initializer."""

    def fill(self, arrays: Mapping[str, np.ndarray], index: int) -> onnx.ModelProto:
        """Return the graph with the weights of block ``index``."""
        model = copy.deepcopy(self.model)
        for tensor in model.graph.initializer:
            if tensor.name not in self.origins:
                continue
            parameter, transposed = self.origins[tensor.name]
            # The first number in the name is the index of the block.
            array = arrays[re.sub(r"(?<=\.)\d+(?=\.|$)", str(index), parameter, count=1)]
            array = np.ascontiguousarray(array.T if transposed else array)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        return model


def trace_blocks(view: BlockView, folded: Folded = NOT_FOLDED) -> Iterator[onnx.ModelProto]:
    """Yield the graph of each block that is not folded; ``view`` is a result of ``prepare_for_export``.

    Blocks that share their weights have the same graph, which is traced once.
    """
    alike = view.slots is None or view.slots.is_uniform
    template = None
    if alike and len(set(view.owners)) > 1 and _equal_but_for_weights(view.blocks):
        template = _template(view, folded.stem)
    arrays = {f"view.{name}": array for name, array in _arrays(view).items()}
    traced: dict[int, onnx.ModelProto] = {}
    for index in range(folded.stem, view.num_blocks - folded.head):
        owner = view.owners[index]
        if template is not None:
            yield template.fill(arrays, owner)
            continue
        if owner not in traced:
            target = block_target(view, index, folded.stem)
            model = _traced(target)
            origins = _parameter_origins(model, _arrays(target.module))
            traced = {owner: canonicalize(model, _names(origins, _prefix(index)))}
        yield traced[owner]


def _prefix(index: int) -> str:
    """Return the pattern to remove from names in the file of block ``index``: its number and that of its table."""
    return rf"^view\.(model\.)?(blocks\.{index}\.)?|(?<=\.tables)\.\d+$"


def _template(view: BlockView, folded: int) -> _Template | None:
    """Trace block 0 with random weights; return None if a tensor of the graph cannot be matched with a parameter."""
    scratch = copy.deepcopy(prepare_for_export(view, (0,)))  # its own weights
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in scratch.parameters():
            if parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    target = block_target(scratch, 0, folded)
    model = _traced(target)
    origins = _parameter_origins(model, _arrays(target.module))
    own = {id(parameter) for parameter in scratch.blocks[0].parameters()}
    wanted = {f"view.{name}" for name, parameter in scratch.named_parameters() if id(parameter) in own}
    constants = [t for t in model.graph.initializer if t.name not in origins and t.data_type == onnx.TensorProto.FLOAT]
    names = _names(origins, _prefix(0))
    matched = wanted <= {name for name, _ in origins.values()}
    if not matched or len(names) != len(origins) or any(np.prod(t.dims) > 1 for t in constants):
        return None
    return _Template(canonicalize(model, names), {names[key]: origin for key, origin in origins.items()})


def _equal_but_for_weights(blocks: nn.ModuleList) -> bool:
    """Return whether blocks differ only in weights; ignore dropout rates, since exported blocks have no dropout."""

    def shape_of(block: nn.Module) -> list[tuple[str, str, str]]:
        return [
            (name, type(module).__qualname__, "" if "Drop" in type(module).__name__ else module.extra_repr())
            for name, module in block.named_modules()
            if not isinstance(module, nn.Identity)
        ]

    def buffers_of(block: nn.Module) -> list[tuple[str, bytes]]:
        return [(name, buffer.detach().numpy().tobytes()) for name, buffer in block.named_buffers()]

    first, *others = blocks
    return all(shape_of(b) == shape_of(first) and buffers_of(b) == buffers_of(first) for b in others)
