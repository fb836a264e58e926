"""Fine-tune vision transformers whose blocks run in any order, and run them on the devices that are reachable.

The names below are the public interface for programs; each is imported when it is first used, so ``import ls_edge``
itself loads neither numpy nor ZeroMQ. ``docs/python.md`` describes them, ``docs/develop.md`` the packages.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ls_edge.version import __version__

if TYPE_CHECKING:
    from ls_edge.api.analysis import AnalysisResult, analyze
    from ls_edge.api.cluster import Cluster
    from ls_edge.api.evaluation import EvaluationResult, evaluate
    from ls_edge.api.publishing import Published, publish
    from ls_edge.api.simulation import SimulationResult, simulate
    from ls_edge.api.training import train
    from ls_edge.core.arrangement import Arrangement
    from ls_edge.core.bundle import Bundle
    from ls_edge.core.errors import (
        AddressMissing,
        BudgetExceeded,
        BundleError,
        ConfigError,
        DataError,
        DeviceLost,
        DigestMismatch,
        EngineError,
        ImageRejected,
        LinkError,
        LsEdgeError,
        ModelError,
        ModelMismatch,
        NotFinite,
        Overloaded,
        RequestError,
        RunError,
        SchemaMismatch,
        SourceClosed,
        TrainingStopped,
        UsageError,
        VerificationError,
        WireError,
    )
    from ls_edge.data.camera import frames
    from ls_edge.export.writer import ExportResult, export
    from ls_edge.runtime.peer.peer import Peer
    from ls_edge.runtime.source.results import Answer
    from ls_edge.runtime.source.source import Source
    from ls_edge.training.progress import TrainingResult

__all__ = [
    "analyze", "evaluate", "export", "frames", "publish", "simulate", "train",
    "AnalysisResult", "Answer", "Arrangement", "Bundle", "Cluster", "EvaluationResult", "ExportResult", "Peer",
    "Published", "SimulationResult", "Source", "TrainingResult",
    "AddressMissing", "BudgetExceeded", "BundleError", "ConfigError", "DataError", "DeviceLost", "DigestMismatch",
    "EngineError", "ImageRejected", "LinkError", "LsEdgeError", "ModelError", "ModelMismatch", "NotFinite",
    "Overloaded", "RequestError", "RunError", "SchemaMismatch", "SourceClosed", "TrainingStopped", "UsageError",
    "VerificationError", "WireError",
    "__version__",
]  # fmt: skip

_MODULES = {
    "AnalysisResult": "ls_edge.api.analysis",
    "Answer": "ls_edge.runtime.source.results",
    "Arrangement": "ls_edge.core.arrangement",
    "Bundle": "ls_edge.core.bundle",
    "Cluster": "ls_edge.api.cluster",
    "EvaluationResult": "ls_edge.api.evaluation",
    "ExportResult": "ls_edge.export.writer",
    "Peer": "ls_edge.runtime.peer.peer",
    "Published": "ls_edge.api.publishing",
    "SimulationResult": "ls_edge.api.simulation",
    "Source": "ls_edge.runtime.source.source",
    "TrainingResult": "ls_edge.training.progress",
    "analyze": "ls_edge.api.analysis",
    "evaluate": "ls_edge.api.evaluation",
    "frames": "ls_edge.data.camera",
    "publish": "ls_edge.api.publishing",
    "simulate": "ls_edge.api.simulation",
    "train": "ls_edge.api.training",
}
"""Modules of the public names; all other names are in ``ls_edge.core.errors``."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'ls_edge' has no attribute {name!r}")
    if name == "export":
        return importlib.import_module("ls_edge.export")  # a callable package
    value = getattr(importlib.import_module(_MODULES.get(name, "ls_edge.core.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
