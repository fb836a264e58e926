"""Check the files of a bundle: present, unchanged, loadable. Needs neither torch nor ``onnx``.

Where the package ``onnx`` is installed each file is checked with it as well; opening it in ONNX Runtime compares
its inputs and outputs with the manifest in any case.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, EngineError, LsEdgeError
from ls_edge.engines.engine import signature_of
from ls_edge.engines.onnxruntime import OnnxEngine, onnxruntime_module
from ls_edge.engines.providers import CPU


@dataclass(frozen=True)
class FileReport:
    """The result for one part."""

    part: str
    file: str
    problem: str | None
    """None if there is none."""


def check_files(bundle: Bundle) -> list[FileReport]:
    """Check every part of the manifest; a problem is reported, not raised."""
    with_onnx = importlib.util.find_spec("onnx") is not None
    with_engine = _engine_loads()
    return [
        FileReport(name, part.file, _problem(bundle, name, with_onnx=with_onnx, with_engine=with_engine))
        for name, part in bundle.manifest.part_names()
    ]


def checked_with() -> list[str]:
    """Which checks this machine can make: ``digests``, and ``onnx`` and ``onnxruntime`` where they are installed."""
    onnx = ["onnx"] if importlib.util.find_spec("onnx") is not None else []
    return ["digests", *onnx, *(["onnxruntime"] if _engine_loads() else [])]


def _problem(bundle: Bundle, name: str, *, with_onnx: bool, with_engine: bool) -> str | None:
    signature = signature_of(bundle.manifest, name)
    try:
        raw = bundle.read(name)
        if with_onnx:
            from ls_edge.export.canonical import check

            check(raw, name, signature)
        if with_engine:
            OnnxEngine(raw, name, signature, provider=CPU, threads=1).close()
    except LsEdgeError as error:
        return str(error)
    return None


def _engine_loads() -> bool:
    try:
        onnxruntime_module()
    except EngineError:
        return False
    return True


def raise_problems(bundle: Bundle, reports: list[FileReport]) -> None:
    """Raise one :class:`BundleError` that names every part with a problem, if any has."""
    problems = [report.problem for report in reports if report.problem is not None]
    if problems:
        raise BundleError(f"{bundle.folder}: {len(problems)} of {len(reports)} parts are wrong: {'; '.join(problems)}")
