"""Checks that the files of a bundle are present, unchanged, and loadable. Needs neither torch nor ``onnx``.

If ``onnx`` is installed, each file is also checked with it. If ONNX Runtime is installed, inputs and outputs are
compared with the manifest, and the metadata in each file must name its part, the model, and (for the head) the classes
in the manifest's order.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from ls_edge.core.bundle import Bundle, part_metadata
from ls_edge.core.errors import BundleError, EngineError, LsEdgeError
from ls_edge.core.peers_file import EngineKind
from ls_edge.engines.engine import signature_of
from ls_edge.engines.onnxruntime import OnnxEngine, onnxruntime_module
from ls_edge.engines.opening import choose, open_engine
from ls_edge.engines.providers import CPU
from ls_edge.engines.reference import check_engine
from ls_edge.engines.tensorrt.build import LEAST_MAX_BATCH


@dataclass(frozen=True)
class FileReport:
    """Result of the checks of a part."""

    part: str
    file: str
    problem: str | None


def check_files(bundle: Bundle) -> list[FileReport]:
    """Check all parts of the manifest; return problems instead of raising them."""
    checks = checked_with()
    return [FileReport(name, part.file, _problem(bundle, name, checks)) for name, part in bundle.manifest.part_names()]


def checked_with() -> list[str]:
    """Return the checks that this machine can run: ``digests``, plus ``onnx`` and ``onnxruntime`` if installed."""
    checks = ["digests"]
    if importlib.util.find_spec("onnx") is not None:
        checks.append("onnx")
    try:
        onnxruntime_module()
    except EngineError:
        return checks
    return [*checks, "onnxruntime"]


def _problem(bundle: Bundle, name: str, checks: list[str]) -> str | None:
    signature = signature_of(bundle.manifest, name)
    try:
        raw = bundle.read(name)
        if "onnx" in checks:
            from ls_edge.export.canonical import check

            check(raw, name, signature)
        if "onnxruntime" in checks:
            engine = OnnxEngine(raw, name, signature, provider=CPU, threads=1)
            found = engine.session.get_modelmeta().custom_metadata_map
            engine.close()
            return _misplaced(bundle, name, found)
    except LsEdgeError as error:
        return str(error)
    return None


def _misplaced(bundle: Bundle, name: str, found: Mapping[str, str]) -> str | None:
    """Describe the first difference between the metadata in a part's file and the manifest; None without any."""
    kind, _, index = name.partition(" ")
    owner = f"block {bundle.owners[int(index)]}" if kind == "block" else name
    for key, wanted in part_metadata(bundle.manifest, owner).items():
        if found.get(key) != wanted:
            return (
                f"{bundle.folder / bundle.part(name).file} ({name}) says {key} {found.get(key)}, the manifest "
                f"{wanted}; the manifest was changed or the file belongs elsewhere, copy the bundle again"
            )
    return None


def compare_engines(bundle: Bundle, kind: EngineKind) -> str:
    """Compare the engine of each part with the bundle's reference outputs, and return the choice of the engine.

    Raise :class:`EngineError` if an engine does not open or computes wrong values.
    """
    choice = choose(bundle, kind)
    for name, _ in bundle.manifest.part_names():
        engine = open_engine(bundle, name, kind=choice.kind)
        try:
            check_engine(bundle, engine, LEAST_MAX_BATCH)
        finally:
            engine.close()
    return str(choice)


def raise_problems(bundle: Bundle, reports: list[FileReport]) -> None:
    """Raise a single :class:`BundleError` with all problems, if there are any."""
    problems = [report.problem for report in reports if report.problem is not None]
    if problems:
        raise BundleError(f"{bundle.folder}: {len(problems)} of {len(reports)} parts are wrong: {'; '.join(problems)}")
