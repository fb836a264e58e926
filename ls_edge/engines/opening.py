"""Open engines: choose the library that runs a bundle here, and open one part or some blocks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Literal

from ls_edge import hardware
from ls_edge.bundle import Bundle
from ls_edge.engines.engine import Engine, signature_of
from ls_edge.engines.onnxruntime import Buffers, OnnxEngine, choose_provider
from ls_edge.engines.tensorrt_build import MAX_BATCH, this_device
from ls_edge.engines.tensorrt_engine import open_tensorrt
from ls_edge.errors import BundleError, EngineError, UsageError
from ls_edge.peers_file import EngineKind


def choose_kind(kind: EngineKind, bundle: Bundle, provider: str | None) -> Literal["onnx", "tensorrt"]:
    """Which library runs a bundle here.

    ``auto`` is TensorRT where it is installed with a GPU, no provider of ONNX Runtime was named and the bundle is one
    that TensorRT reads; else ONNX Runtime. Raises :class:`UsageError` for another name, and :class:`EngineError` for
    TensorRT where it is not there or a provider was named as well.
    """
    if kind not in ("auto", "onnx", "tensorrt"):
        raise UsageError(f"engine {kind!r} is not known; use auto, onnx or tensorrt")
    if kind == "tensorrt":
        if provider not in (None, "auto"):
            raise UsageError(f"engine tensorrt has no provider {provider!r}, which is ONNX Runtime's; leave one out")
        this_device()
        return "tensorrt"
    named = kind == "onnx" or provider not in (None, "auto")
    if named or bundle.manifest.verified.get("int8") == "dynamic" or importlib.util.find_spec("tensorrt") is None:
        return "onnx"
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
    on_status: Callable[[str], None] = lambda _: None,
) -> Engine:
    """Open one part of a bundle; only its file is read. Engines with the same ``buffers`` belong to one thread.

    ``max_batch`` is the largest batch of a TensorRT engine; ``on_status`` is called with the reason where one is built.
    Raises :class:`EngineError` where it, the engine library or the provider does not load, and
    :class:`ls_edge.errors.BundleError` where the file is not the manifest's.
    """
    signature = signature_of(bundle.manifest, part)
    if choose_kind(kind, bundle, provider) == "tensorrt":
        return open_tensorrt(bundle, part, signature, max_batch=max_batch or MAX_BATCH, on_status=on_status)
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

    ``on_step(done, total, text)`` is called before each engine is opened and once at the end; ``text`` names what comes
    next. Building a TensorRT engine takes a minute the first time.
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
            max_batch=max_batch, on_status=lambda text: on_step(len(engines), len(wanted), text),
        )  # fmt: skip
        engines[block] = engine
        chosen = engine.provider if used == "onnx" else None
    on_step(len(engines), len(wanted), "ready")
    return engines


def usable_threads(threads: int | None) -> int:
    """``threads``, or the cores that this process may use; raises :class:`UsageError` below one."""
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads are too few; use 1 or more, or leave it out for all cores")
    return hardware.cores() if threads is None else threads
