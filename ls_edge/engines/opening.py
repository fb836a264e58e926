"""Choice of the engine library, and opening of engines.

:func:`choose` returns the choice, the rejected alternatives, and the reasons. If the user named an engine, it is used
or an error is raised; otherwise, the next choice is tried if an engine cannot be built or loaded. Fallbacks are always
reported.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypedDict

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, EngineError, UsageError
from ls_edge.core.logs import OnProgress, ignore_progress
from ls_edge.core.parts import ENDS, part_name
from ls_edge.core.peers_file import EngineKind
from ls_edge.core.text import counted, name_blocks
from ls_edge.device import hardware
from ls_edge.engines.cuda.memory import CudaWorkspace
from ls_edge.engines.engine import Engine, first_line, signature_of, warm_up
from ls_edge.engines.onnxruntime import OnnxEngine, onnxruntime_module, open_session
from ls_edge.engines.providers import CPU, CUDA, NOT_USED, OPENVINO, SHORT
from ls_edge.engines.reference import check_engine
from ls_edge.engines.tensorrt.build import (
    BuiltPart,
    EngineOptions,
    build_part,
    build_target,
    is_rtx,
    tensorrt_module,
    this_device,
)
from ls_edge.engines.tensorrt.cache import TensorRTDevice
from ls_edge.engines.tensorrt.engine import open_tensorrt

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("ls_edge.engines")


class EngineSettings(TypedDict, total=False):
    """Settings of engines that are opened together; names and defaults are those of ``peers.yaml``."""

    kind: EngineKind
    provider: str | None
    threads: int | None
    max_batch: int | None
    """Maximum batch size of engines that are built."""
    gpu_mem_limit: int | None
    """Bytes of GPU working memory for all engines together."""


@dataclass(frozen=True)
class EngineChoice:
    """Library and provider that run the parts of a bundle in this process."""

    kind: Literal["onnx", "tensorrt"]
    provider: str
    """Full name of ONNX Runtime's provider, or the version of TensorRT and the GPU."""
    passed_over: tuple[str, ...] = ()
    """Better alternatives that were rejected, with the reasons."""

    def __str__(self) -> str:
        """Format the choice for HELLO and reports."""
        reasons = f" (not {'; not '.join(self.passed_over)})" if self.passed_over else ""
        return f"{self.kind} {self.provider}{reasons}"


def choose(
    bundle: Bundle,
    kind: EngineKind = "auto",
    provider: str | None = None,
    part: str = "stem",
    failed: Mapping[str, str] = MappingProxyType({}),
) -> EngineChoice:
    """Choose the library, and ONNX Runtime's provider, for a bundle.

    ``auto`` chooses TensorRT if it is installed, there is a GPU, TensorRT can read the bundle, and no provider is
    named; otherwise ONNX Runtime on CUDA if ``part`` loads there; otherwise ONNX Runtime on the CPU. ``failed``
    contains known reasons against ``tensorrt`` or the CUDA provider. A named provider (``cpu``, ``cuda``, or
    ONNX Runtime's own name) is not checked here; opening a part shows whether it loads. Raise :class:`UsageError` for
    another kind, for TensorRT with a provider, and for a provider that is not supported; raise :class:`EngineError` if
    no suitable library is installed.
    """
    if kind not in ("auto", "onnx", "tensorrt"):
        raise UsageError(f"engine {kind!r} is not known; use auto, onnx or tensorrt")
    named = provider not in (None, "auto")
    if kind == "tensorrt":
        if named:
            raise UsageError(f"provider {provider!r}: only ONNX Runtime has providers; leave it out for tensorrt")
        return EngineChoice("tensorrt", str(this_device()))
    if named and provider in ("tensorrt", *NOT_USED):
        raise UsageError(f"provider {provider!r} is not supported; use 'engine: tensorrt', or provider cuda or cpu")
    if named and ":" in str(provider) and not str(provider).startswith(f"{OPENVINO}:"):
        raise UsageError(f"provider {provider!r}: only {OPENVINO} takes a device; for a GPU, set CUDA_VISIBLE_DEVICES")
    if named:
        return EngineChoice("onnx", SHORT.get(str(provider).lower(), str(provider)))
    passed_over: list[str] = []
    if kind == "auto":
        try:
            if "tensorrt" in failed:
                raise EngineError(failed["tensorrt"])
            return EngineChoice("tensorrt", _tensorrt_for(bundle))
        except EngineError as error:
            passed_over.append(f"tensorrt: {_reason(error)}")
    try:
        why = failed.get(CUDA) or _why_not_cuda(bundle, part)
    except EngineError as error:  # ONNX Runtime is missing as well
        raise EngineError("; ".join((*passed_over, str(error)))) from error
    if not why:
        return EngineChoice("onnx", CUDA, tuple(passed_over))
    return EngineChoice("onnx", CPU, (*passed_over, f"{CUDA}: {why}"))


def _tensorrt_for(bundle: Bundle, device: Callable[[], TensorRTDevice] = this_device) -> str:
    """Return TensorRT and the GPU; raise :class:`EngineError` if they cannot run the bundle."""
    if bundle.manifest.verified.get("int8") == "dynamic":
        # A comma, so that :func:`_reason` keeps the advice.
        raise EngineError("the bundle's int8 is dynamic, export it with --engine tensorrt --calibrate DATA")
    return str(device())


OnChoice = Callable[[EngineChoice], None]
"""Callback that receives the choice before engines are opened."""


def announce(choice: EngineChoice) -> None:
    """Log the chosen engine and the rejected alternatives."""
    extra = {"engine": choice.kind, "provider": choice.provider}
    if choice.passed_over:
        extra["passed_over"] = "; ".join(choice.passed_over)
    log.info("engine chosen", extra=extra)


def open_engine(
    bundle: Bundle,
    part: str,
    *,
    on_step: OnProgress = ignore_progress,
    **settings: Unpack[EngineSettings],
) -> Engine:
    """Open one part of a bundle as :func:`open_parts` does."""
    return open_parts(bundle, [part], on_step=on_step, **settings)[part]


def open_parts(
    bundle: Bundle,
    names: Sequence[str],
    *,
    on_step: OnProgress = ignore_progress,
    on_choice: OnChoice = lambda _: None,
    **settings: Unpack[EngineSettings],
) -> dict[str, Engine]:
    """Open several parts for one thread; blocks that share a file share an engine.

    If an engine does not open and the user did not name it, the next choice is tried; ``on_choice`` receives each
    choice. ``on_step`` is called before each engine is opened, with the status of a build, and at the end. Raise
    :class:`EngineError` if the engine, its library, or the provider does not load, and
    :class:`ls_edge.core.errors.BundleError` if a file does not match the manifest.
    """
    kind, provider = settings.get("kind", "auto"), settings.get("provider")
    threads = usable_threads(settings.get("threads"))
    options = EngineOptions.of(settings.get("max_batch"), settings.get("gpu_mem_limit"))
    failed: dict[str, str] = {}
    while True:
        choice = choose(bundle, kind, provider, names[0], failed)
        on_choice(choice)
        try:
            return _open_with(choice, bundle, names, threads, options, on_step)
        except EngineError as error:
            which = "tensorrt" if choice.kind == "tensorrt" else choice.provider
            if kind == "tensorrt" or provider not in (None, "auto") or which == CPU:
                raise
            failed[which] = _reason(error)
            log.warning("engine does not open", extra={"engine": which, "why": first_line(error)})


def _open_with(
    choice: EngineChoice,
    bundle: Bundle,
    names: Sequence[str],
    threads: int,
    options: EngineOptions,
    on_step: OnProgress,
) -> dict[str, Engine]:
    """Open parts with the chosen engine; if one of them does not open, close the others."""
    if choice.provider == CPU:
        _check_memory(bundle, names)
    workspace = _workspace(choice, bundle, options)
    if workspace is not None:
        workspace.hold()  # freed at the end if no engine opens
    engines: dict[str, Engine] = {}
    by_digest: dict[str, Engine] = {}
    num_engines = len({bundle.part(name).sha256 for name in names})
    # ONNX Runtime sessions do not share working memory.
    share = replace(options, gpu_mem_limit=options.gpu_mem_limit and options.gpu_mem_limit // num_engines)

    try:
        for name in names:
            digest, signature = bundle.part(name).sha256, signature_of(bundle.manifest, name)
            if digest not in by_digest:
                on_status = partial(on_step, len(engines), len(names))
                on_status(name)
                if choice.kind == "tensorrt" and workspace is not None:
                    by_digest[digest] = open_tensorrt(bundle, name, signature, options, workspace, on_status=on_status)
                else:
                    with bundle.opened(name) as model:
                        by_digest[digest] = OnnxEngine(
                            model,
                            name,
                            signature,
                            provider=choice.provider,
                            threads=threads,
                            options=share,
                            workspace=workspace,
                        )
            engines[name] = by_digest[digest]
        if choice.provider != CPU:
            for engine in by_digest.values():  # if memory runs out only in a run, there are still other choices
                warm_up(engine)
                if choice.kind == "onnx":
                    check_engine(bundle, engine)
    except BaseException:
        for engine in by_digest.values():
            engine.close()
        raise
    finally:
        if workspace is not None:
            workspace.release()
    on_step(len(names), len(names), "ready")
    return engines


def _check_memory(bundle: Bundle, names: Sequence[str]) -> None:
    """Raise :class:`EngineError` if the free memory of this machine does not hold these parts."""
    memory = hardware.memory_gib()
    if memory is None:
        return
    free, taken, largest = memory[1] * 2**30, 0, 0
    too_many = list[str]()
    for name, size in zip(names, bundle.memory_of(names), strict=True):
        taken, largest = taken + size, max(largest, size)
        if taken + largest > free:  # a part that is being loaded takes its size twice
            too_many.append(name)
    if too_many:
        need, has = (f"{size / 2**20:,.0f} MiB" for size in (taken + largest, free))
        blocks = [int(name.removeprefix("block ")) for name in too_many if name.startswith("block ")]
        fits = blocks and len(too_many) < len(names)
        raise EngineError(
            f"{counted(len(names), 'part')} of {bundle.folder} need {need} of memory, and {has} are free; "
            + (
                f"hold {name_blocks(blocks)} elsewhere, or export with --precision int8"
                if fits
                else "end other programs"
            )
        )


def build_engines(
    bundle: Bundle,
    parts: Iterable[str],
    *,
    on_step: OnProgress = ignore_progress,
    **settings: Unpack[EngineSettings],
) -> Iterator[BuiltPart]:
    """Build the engines that :func:`open_parts` would build, one at a time; none if it would choose ONNX Runtime.

    If an engine cannot be built or written, raise :class:`EngineError` if the user named TensorRT; otherwise, log a
    warning and stop.
    """
    kind, names = settings.get("kind", "auto"), list(parts)
    if kind == "onnx" or settings.get("provider") not in (None, "auto") or not names:
        return
    with contextlib.ExitStack() as stack:
        try:
            _tensorrt_for(bundle, build_target if kind == "tensorrt" else this_device)
            options = EngineOptions.of(settings.get("max_batch"), settings.get("gpu_mem_limit"))
            workspace = None
            if not is_rtx(tensorrt_module()):  # which also builds where nothing can run
                workspace = CudaWorkspace.for_bundle(bundle, options.max_batch)
                workspace.hold()
                stack.callback(workspace.release)
            for done, name in enumerate(names):
                on_step(done, len(names), name)
                built = build_part(bundle, name, options, on_status=partial(on_step, done, len(names)))
                if workspace is not None:
                    open_tensorrt(bundle, name, signature_of(bundle.manifest, name), options, workspace).close()
                yield built
            on_step(len(names), len(names), "ready")
        except EngineError as error:
            if kind == "tensorrt":
                raise
            if hardware.has_nvidia():  # elsewhere, ONNX Runtime is the choice
                log.warning("no engines are built", extra={"why": _reason(error)})


def _workspace(choice: EngineChoice, bundle: Bundle, options: EngineOptions) -> CudaWorkspace | None:
    """Return the GPU memory that engines share; None if they do not need it or ONNX Runtime cannot use it."""
    if choice.kind == "onnx" and choice.provider != CUDA:
        return None
    try:
        return CudaWorkspace.for_bundle(bundle, options.max_batch)
    except EngineError as error:
        if choice.kind == "tensorrt":
            raise
        log.warning("tokens are copied for each block", extra={"why": first_line(error)})
        return None


def open_block_engines(
    bundle: Bundle,
    blocks: Iterable[int],
    *,
    on_step: OnProgress = ignore_progress,
    on_choice: OnChoice = lambda _: None,
    **settings: Unpack[EngineSettings],
) -> dict[int, Engine]:
    """Open blocks, stem and head by their numbers (:mod:`ls_edge.core.parts`) as :func:`open_parts` does."""
    names = {number: part_name(number) for number in blocks}
    for block in sorted(names.keys() - ENDS.keys()):
        if not 0 <= block < bundle.num_blocks:
            raise BundleError(
                f"{bundle.folder} has no block {block}; it has blocks 0 to {bundle.num_blocks - 1}, serve some of those"
            )
    found = open_parts(bundle, list(names.values()), on_step=on_step, on_choice=on_choice, **settings)
    return {number: found[name] for number, name in names.items()}


def _why_not_cuda(bundle: Bundle, part: str) -> str:
    """Return the reason why ONNX Runtime cannot run a part on CUDA, or an empty string if it can."""
    ort = onnxruntime_module()
    if CUDA not in ort.get_available_providers():
        return f"not in this build of onnxruntime {ort.__version__}"
    try:
        with bundle.opened(part) as model:
            open_session(model, part, provider=CUDA, threads=1)
    except EngineError as error:
        return _reason(error)
    return ""


def _reason(error: EngineError) -> str:
    """Return the reason from an error's message, without the advice, short enough for HELLO."""
    return first_line(error).split("; ")[0][:160]


def usable_threads(threads: int | None) -> int:
    """Return ``threads``, by default the number of usable cores; raise :class:`UsageError` if it is below one."""
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads are too few; use 1 or more, or leave it out for all cores")
    return hardware.cores() if threads is None else threads
