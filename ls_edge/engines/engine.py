"""Engines: one part of a bundle on one device, opened from bytes whose digest was checked.

One thread at a time may use an engine, and one thread all engines of a chain: they write to buffers that belong to
them. Different processes, or sets of engines opened apart, do not disturb each other.

TensorRT engines are in ``ls_edge.engines.tensorrt_engine``, which is imported only where they are asked for.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from ls_edge.bundle import Bundle, Manifest
from ls_edge.engines.onnxruntime import CPU, Buffer, Buffers, choose_provider, first_line, open_session
from ls_edge.errors import BundleError, EngineError, UsageError

EngineKind = Literal["auto", "onnx", "tensorrt"]

_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64"}


@dataclass(frozen=True)
class Tensor:
    """Name, type and shape of an input or output."""

    name: str
    dtype: str
    rest: tuple[int, ...]
    """The shape without the batch."""
    below: int | None = field(default=None, compare=False)
    """Values are 0 to below this; None where they are not limited."""

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
    slot = (Tensor("slot", "int64", (), len(manifest.parts.blocks)),) if manifest.needs_slot else ()
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
        check_out(self.part, self.signature.output, batch, out)
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
        """See :func:`check_inputs`."""
        return check_inputs(self.part, self.signature, inputs)

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


def check_inputs(part: str, signature: Signature, inputs: Mapping[str, np.ndarray]) -> int:
    """Return the batch size; raises :class:`EngineError` where a name, type, shape or slot is not the manifest's."""
    wanted = signature.inputs
    if len(inputs) != len(wanted) or any(tensor.name not in inputs for tensor in wanted):
        raise EngineError(f"{part} takes {', '.join(t.name for t in wanted)}, received {', '.join(inputs)}")
    first = inputs[wanted[0].name]
    batch = int(first.shape[0]) if first.ndim else 0
    for tensor in wanted:
        array = inputs[tensor.name]
        if array.dtype != tensor.dtype or array.shape != tensor.shape(batch) or batch < 1:
            raise EngineError(f"{part}: {tensor.name} is {_shown(array)}, must be {tensor}, B at least 1")
        if tensor.below is not None and not 0 <= int(array.min()) <= int(array.max()) < tensor.below:
            raise EngineError(
                f"{part}: {tensor.name} is {array.min()} to {array.max()}, must be 0 to {tensor.below - 1}; in the "
                "file itself a negative one counts from the end"
            )
    return batch


def check_out(part: str, output: Tensor, batch: int, out: np.ndarray | None) -> None:
    """Raise :class:`EngineError` where the array to write to is not of the result's type and shape."""
    if out is not None and (out.shape != output.shape(batch) or out.dtype != output.dtype):
        raise EngineError(f"{part}: out is {_shown(out)}, must be {output} with B {batch}")


def choose_kind(kind: EngineKind, bundle: Bundle, provider: str | None) -> Literal["onnx", "tensorrt"]:
    """Which library runs a bundle here.

    ``auto`` is TensorRT where it is installed with a GPU, no provider of ONNX Runtime was named and the bundle is one
    that TensorRT reads; else ONNX Runtime. Raises :class:`UsageError` for another name, and :class:`EngineError` for
    TensorRT where it is not there or a provider was named as well.
    """
    if kind not in ("auto", "onnx", "tensorrt"):
        raise UsageError(f"engine {kind!r} is not known; use auto, onnx or tensorrt")
    if kind == "tensorrt":
        from ls_edge.engines.tensorrt_build import this_device

        if provider not in (None, "auto"):
            raise UsageError(f"engine tensorrt has no provider {provider!r}, which is ONNX Runtime's; leave one out")
        this_device()
        return "tensorrt"
    named = kind == "onnx" or provider not in (None, "auto")
    if named or bundle.manifest.verified.get("int8") == "dynamic" or importlib.util.find_spec("tensorrt") is None:
        return "onnx"
    from ls_edge.engines.tensorrt_build import this_device

    try:
        this_device()
    except EngineError:
        return "onnx"
    return "tensorrt"


def open_engine(
    bundle: Bundle,
    part: str,
    *,
    kind: EngineKind = "auto",
    provider: str | None = None,
    threads: int | None = None,
    buffers: Buffers | None = None,
    max_batch: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Engine:
    """Open one part of a bundle; only its file is read. Engines with the same ``buffers`` belong to one thread.

    ``max_batch`` is the largest batch of a TensorRT engine; ``tell`` is told why one is being built. Raises
    :class:`EngineError` where it, the engine library or the provider does not load, and
    :class:`ls_edge.errors.BundleError` where the file is not the manifest's.
    """
    signature = signature_of(bundle.manifest, part)
    if choose_kind(kind, bundle, provider) == "tensorrt":
        from ls_edge.engines.tensorrt_build import MAX_BATCH
        from ls_edge.engines.tensorrt_engine import open_tensorrt

        return open_tensorrt(bundle, part, signature, max_batch=max_batch or MAX_BATCH, tell=tell)
    raw = bundle.read(part)
    chosen = choose_provider(provider, raw)
    return OnnxEngine(raw, part, signature, provider=chosen, threads=usable_threads(threads), buffers=buffers)


def open_block_engines(
    bundle: Bundle,
    blocks: Iterable[int],
    *,
    kind: EngineKind = "auto",
    provider: str | None = None,
    threads: int | None = None,
    max_batch: int | None = None,
    on_step: Callable[[int, int, str], None] = lambda _done, _total, _text: None,
) -> dict[int, Engine]:
    """Open the engines of some blocks, reading only their files; see :func:`open_engine` for errors.

    ``on_step`` is told how many engines are open, of how many, and what comes next in words: building a TensorRT
    engine takes a minute the first time.
    """
    chosen: str | None = provider
    used: EngineKind = choose_kind(kind, bundle, provider)
    buffers = Buffers()
    engines: dict[int, Engine] = {}
    wanted = list(blocks)
    for block in wanted:
        if not 0 <= block < bundle.num_blocks:
            raise BundleError(
                f"{bundle.folder} has no block {block}; it has blocks 0 to {bundle.num_blocks - 1}, serve some of those"
            )
        on_step(len(engines), len(wanted), f"block {block}")
        engine = open_engine(
            bundle, f"block {block}", kind=used, provider=chosen, threads=threads, buffers=buffers,
            max_batch=max_batch, tell=lambda text: on_step(len(engines), len(wanted), text),
        )  # fmt: skip
        engines[block] = engine
        chosen = engine.provider if used == "onnx" else None
    on_step(len(engines), len(wanted), "ready")
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
