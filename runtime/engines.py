"""Engines: one part of a bundle on one device, opened from bytes whose digest was checked.

One thread at a time may use an engine, and one thread all engines of a chain: they write to buffers that belong to
them. Different processes, or sets of engines opened apart, do not disturb each other.

Left out: TensorRT engines built on the device; asking for them is a clear error in this version.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ls_edge.bundle import Bundle, Manifest
from ls_edge.errors import BundleError, EngineError, UsageError
from ls_edge.runtime.sessions import CPU, Buffer, Buffers, choose_provider, first_line, open_session

EngineKind = Literal["auto", "onnx", "tensorrt"]

_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64"}


@dataclass(frozen=True)
class Tensor:
    """Name, type and shape of an input or output."""

    name: str
    dtype: str
    rest: tuple[int, ...]
    """The shape without the batch."""

    def shape(self, batch: int) -> tuple[int, ...]:
        """The shape at a batch size."""
        return (batch, *self.rest)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} [{', '.join(map(str, ('B', *self.rest)))}]"


@dataclass(frozen=True)
class Signature:
    """What a part takes and gives, by the manifest."""

    inputs: tuple[Tensor, ...]
    output: Tensor


def signature_of(manifest: Manifest, part: str) -> Signature:
    """The signature of ``stem``, ``head``, ``whole`` or ``block 3``."""
    height, width = manifest.image.size
    images = Tensor("images", "float32", (3, height, width))
    rest = (manifest.tokens.count, manifest.tokens.dim)
    tokens = Tensor("tokens", manifest.tokens.dtype, rest)
    logits = Tensor("logits", "float32", (len(manifest.classes),))
    if part == "stem":
        return Signature((images,), tokens)
    if part == "head":
        return Signature((tokens,), logits)
    if part == "whole":
        return Signature((images,), logits)
    slot = (Tensor("slot", "int64", ()),) if manifest.needs_slot else ()
    return Signature((tokens, *slot), Tensor("tokens_out", manifest.tokens.dtype, rest))


class Engine(Protocol):
    """One part on one device; used by one thread at a time."""

    @property
    def part(self) -> str:
        """``stem``, ``head`` or ``block 3``."""
        ...

    @property
    def kind(self) -> str:
        """``onnx`` or ``tensorrt``."""
        ...

    @property
    def provider(self) -> str:
        """What really runs it, such as ``CPUExecutionProvider``."""
        ...

    @property
    def signature(self) -> Signature:
        """Inputs and output."""
        ...

    def run(self, inputs: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        """Run the part; the result is ``out`` where it is given, else a new array that the caller owns."""
        ...

    def warm_up(self, batch: int = 1) -> float:
        """Run on zeros until memory is allocated; return the milliseconds of one run."""
        ...

    def close(self) -> None:
        """Free memory and threads."""
        ...


_WAYS = 4
"""Batch sizes whose buffers an engine keeps."""


@dataclass(frozen=True)
class _Way:
    """An engine at one batch size, bound to buffers."""

    inputs: dict[str, Buffer]
    output: Buffer
    step: Callable[[], None]


class OnnxEngine:
    """A part in an ONNX Runtime session."""

    kind = "onnx"

    def __init__(
        self,
        raw: bytes,
        part: str,
        signature: Signature,
        *,
        provider: str,
        threads: int,
        buffers: Buffers | None = None,
    ) -> None:
        """Open ``raw``; raises :class:`EngineError` naming the part where it, or the provider, does not load."""
        self.part = part
        self.signature = signature
        self.threads = threads
        self._session: Any = open_session(raw, part, provider=provider, threads=threads)
        self.provider = provider
        self._check_signature()
        self._buffers = buffers if buffers is not None else Buffers()
        self._ways: OrderedDict[int, _Way] = OrderedDict()

    @property
    def session(self) -> Any:
        """The ``onnxruntime.InferenceSession``; raises :class:`EngineError` after :meth:`close`."""
        if self._session is None:
            raise EngineError(f"the engine of {self.part} was closed; open it again")
        return self._session

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``, as ONNX Runtime names the memory."""
        return "cpu" if self.provider == CPU else "cuda"

    def run(self, inputs: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        """Run on arrays that are checked against the manifest; raises :class:`EngineError`.

        ``out`` must be of the output's type and shape.
        """
        batch = self.check_inputs(inputs)
        output = self.signature.output
        if out is not None and (out.shape != output.shape(batch) or out.dtype != output.dtype):
            raise EngineError(f"{self.part}: out is {_shown(out)}, must be {output} with B {batch}")
        way = self._way(batch)
        for name, array in inputs.items():
            way.inputs[name].write(array)
        way.step()
        return way.output.read(out)

    def bind(self, inputs: Mapping[str, Buffer], output: Buffer) -> Callable[[], None]:
        """Return a call that runs on these very buffers, which are not checked, and allocates nothing."""
        session, binding = self.session, self.session.io_binding()
        for name, buffer in inputs.items():
            binding.bind_ortvalue_input(name, buffer.value)
        binding.bind_ortvalue_output(self.signature.output.name, output.value)

        def step() -> None:
            try:
                session.run_with_iobinding(binding)
            except Exception as error:
                raise EngineError(f"{self.part} failed on {self.provider}: {first_line(error)}") from error

        return step

    def warm_up(self, batch: int = 1) -> float:
        """Run twice on zeros; return the milliseconds of the second run."""
        inputs = {t.name: np.zeros(t.shape(batch), t.dtype) for t in self.signature.inputs}
        self.run(inputs)
        start = time.perf_counter()
        self.run(inputs)
        return (time.perf_counter() - start) * 1e3

    def close(self) -> None:
        """Free memory and threads; a second call does nothing."""
        self._ways.clear()
        self._session = None

    def check_inputs(self, inputs: Mapping[str, np.ndarray]) -> int:
        """Return the batch size; raises :class:`EngineError` where a name, type or shape is not the manifest's."""
        wanted = self.signature.inputs
        if len(inputs) != len(wanted) or any(tensor.name not in inputs for tensor in wanted):
            raise EngineError(f"{self.part} takes {', '.join(t.name for t in wanted)}, received {', '.join(inputs)}")
        first = inputs[wanted[0].name]
        batch = int(first.shape[0]) if first.ndim else 0
        for tensor in wanted:
            array = inputs[tensor.name]
            if array.dtype != tensor.dtype or array.shape != tensor.shape(batch) or batch < 1:
                raise EngineError(f"{self.part}: {tensor.name} is {_shown(array)}, must be {tensor}, B at least 1")
        return batch

    def _way(self, batch: int) -> _Way:
        way = self._ways.pop(batch, None)
        if way is None:
            get, output = self._buffers.get, self.signature.output
            inputs = {t.name: get(t.name, t.dtype, t.shape(batch), self.device) for t in self.signature.inputs}
            out = get("output", output.dtype, output.shape(batch), self.device)
            way = _Way(inputs, out, self.bind(inputs, out))
        self._ways[batch] = way
        while len(self._ways) > _WAYS:
            self._ways.popitem(last=False)
        return way

    def _check_signature(self) -> None:
        def found(args: Any) -> list[Tensor]:
            return [
                Tensor(a.name, _TYPES.get(a.type, a.type), tuple(d if isinstance(d, int) else -1 for d in a.shape[1:]))
                for a in args
            ]

        for what, args, wanted in (
            ("inputs", self._session.get_inputs(), self.signature.inputs),
            ("outputs", self._session.get_outputs(), (self.signature.output,)),
        ):
            if found(args) != list(wanted):
                theirs, ours = ", ".join(map(str, found(args))), ", ".join(map(str, wanted))
                raise EngineError(
                    f"{self.part}: the file's {what} are {theirs}, the manifest says {ours}; export the bundle again"
                )


def check_kind(kind: EngineKind) -> None:
    """Raise :class:`EngineError` for an engine that this version, or this machine, does not have."""
    if kind == "tensorrt":
        if importlib.util.find_spec("tensorrt") is None:
            raise EngineError("tensorrt is not installed; install it as NVIDIA says for this device, or use onnx")
        raise EngineError("this version does not build TensorRT engines yet; use --engine onnx or auto")
    if kind not in ("auto", "onnx"):
        raise UsageError(f"engine {kind!r} is not known; use auto, onnx or tensorrt")


def open_engine(
    bundle: Bundle,
    part: str,
    *,
    kind: EngineKind = "auto",
    provider: str | None = None,
    threads: int | None = None,
    buffers: Buffers | None = None,
) -> OnnxEngine:
    """Open one part of a bundle; only its file is read. Engines with the same ``buffers`` belong to one thread.

    Raises :class:`EngineError` where it, the engine library or the provider does not load, and
    :class:`ls_edge.errors.BundleError` where the file is not the manifest's.
    """
    check_kind(kind)
    raw = bundle.read(part)
    chosen = choose_provider(provider, raw)
    signature = signature_of(bundle.manifest, part)
    return OnnxEngine(raw, part, signature, provider=chosen, threads=usable_threads(threads), buffers=buffers)


def open_block_engines(
    bundle: Bundle,
    blocks: Iterable[int],
    *,
    kind: EngineKind = "auto",
    provider: str | None = None,
    threads: int | None = None,
) -> dict[int, Engine]:
    """Open the engines of some blocks, reading only their files; see :func:`open_engine` for errors."""
    chosen: str | None = provider
    buffers = Buffers()
    engines: dict[int, Engine] = {}
    for block in blocks:
        if not 0 <= block < bundle.blocks:
            raise BundleError(
                f"{bundle.folder} has no block {block}; it has blocks 0 to {bundle.blocks - 1}, serve some of those"
            )
        engine = open_engine(bundle, f"block {block}", kind=kind, provider=chosen, threads=threads, buffers=buffers)
        engines[block], chosen = engine, engine.provider
    return engines


def usable_threads(threads: int | None) -> int:
    """``threads``, or the cores that this process may use; raises :class:`UsageError` below one."""
    if threads is None:
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    if threads < 1:
        raise UsageError(f"{threads} threads are too few; use 1 or more, or leave it out for all cores")
    return threads


def _shown(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"
