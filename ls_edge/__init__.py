"""Fine-tune vision transformers whose blocks run in any order, and run them on whatever devices can be reached.

The names below are the public interface for programs; each is imported when it is first used, so ``import ls_edge``
itself loads neither numpy nor ZeroMQ. ``docs/python.md`` describes them, ``docs/architecture.md`` the packages.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ls_edge.version import __version__

if TYPE_CHECKING:
    from ls_edge.core.arrangement import Arrangement
    from ls_edge.core.bundle import Bundle
    from ls_edge.core.errors import (
        BudgetExceeded,
        BundleError,
        ConfigError,
        DataError,
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
    from ls_edge.runtime.peer.peer import Peer
    from ls_edge.runtime.source.results import Answer
    from ls_edge.runtime.source.source import Source

__all__ = [
    "Answer", "Arrangement", "Bundle", "Peer", "Source",
    "BudgetExceeded", "BundleError", "ConfigError", "DataError", "DigestMismatch", "EngineError", "ImageRejected",
    "LinkError", "LsEdgeError", "ModelError", "ModelMismatch", "NotFinite", "Overloaded", "RequestError", "RunError",
    "SchemaMismatch", "SourceClosed", "TrainingStopped", "UsageError", "VerificationError", "WireError",
    "__version__",
]  # fmt: skip

_MODULES = {
    "Answer": "ls_edge.runtime.source.results",
    "Arrangement": "ls_edge.core.arrangement",
    "Bundle": "ls_edge.core.bundle",
    "Peer": "ls_edge.runtime.peer.peer",
    "Source": "ls_edge.runtime.source.source",
}
"""Where a public name is defined; the others are in ``ls_edge.core.errors``."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'ls_edge' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES.get(name, "ls_edge.core.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
