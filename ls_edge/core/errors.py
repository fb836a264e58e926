"""Errors of ls-edge and the exit codes of commands that end with them.

    LsEdgeError                      exit 1
    ├── UsageError                   exit 2   a flag, a name or a file that the user must change
    │   └── ConfigError              exit 2   the same in a YAML or JSON file: file, line, column
    ├── DataError                    a data set without images, of one class, of other classes
    ├── ModelError                   exit 2   an unknown model, or one that cannot be cut into equal blocks
    ├── RunError                     a run folder or checkpoint that cannot be used
    │   └── TrainingStopped          training ended early (NaN loss, a full disk)
    ├── BundleError                  a bundle that cannot be used
    │   ├── SchemaMismatch           written for another schema
    │   └── DigestMismatch           a file that differs from the manifest
    ├── VerificationError            numbers that differ from PyTorch's
    ├── EngineError                  an engine that is missing, does not load or failed on a block
    │   └── DeviceLost               a GPU that only a new process can use again
    ├── LinkError                    an address in use, a refused key, a peer with a wrong name
    │   ├── AddressMissing           an address to listen on that this machine does not have (yet)
    │   └── WireError                a malformed frame
    └── RequestError                 end of a request without an answer
        ├── BudgetExceeded           its budget ended and it may not skip the remaining blocks
        ├── Overloaded               no credit within its budget
        ├── NotFinite                its tokens or logits hold NaN or infinity
        ├── ImageRejected            its image cannot be decoded, or has values that are too large
        ├── ModelMismatch            the peers serve another model
        └── SourceClosed             the source was closed before the answer

A message is one line with the problem, the value, and what to do. Since values come from outside, ``str(error)`` is
always :func:`printable`.
"""

from __future__ import annotations

import copyreg
import re
from pathlib import Path
from typing import Any

_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters, invisible and bidirectional marks, and characters that UTF-8 or XML cannot represent."""


def printable(text: object) -> str:
    r"""Return ``text`` as one line that is safe to show on a terminal, in a log and (escaped) in HTML and XML.

    Control characters become visible escapes such as ``\x1b``; line breaks and tabs become spaces. All text from
    outside (names, reasons, classes in a manifest) is shown this way.
    """
    return _UNPRINTABLE.sub(_visible, str(text))


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] in "\t\n\r\v\f\x85\u2028\u2029":
        return " "
    if 0xDC80 <= code <= 0xDCFF:  # an undecodable byte of a file name
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


THREAD_LIMIT = (
    "no more threads can be started; raise the limit (docker --pids-limit, TasksMax of systemd, ulimit -u, ulimit -v, "
    "ulimit -d), or use fewer --threads"
)
"""Message of a process at its limit of threads."""


def lacking(error: ImportError, module: str) -> str:
    """Return the name of the missing module, or ``module`` and the reason why it does not load."""
    if isinstance(error, ModuleNotFoundError):
        return error.name or module
    return f"{module}, which is installed but does not load ({error})"


class LsEdgeError(Exception):
    """Base of all errors; a command prints its message and ends with ``exit_code``."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and attributes without calling the constructor again."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UsageError(LsEdgeError):
    """Invalid usage, which the user must correct."""

    exit_code = 2


class ConfigError(UsageError):
    """An invalid configuration file; the message begins with ``file:line:column``."""

    def __init__(self, message: str, *, path: str | Path, line: int | None = None, column: int | None = None) -> None:
        """Count ``line`` and ``column`` from 1; None if the error has no single place."""
        self.path = str(path)
        self.line = line
        self.column = column
        place = self.path if line is None else f"{self.path}:{line}:{column if column is not None else 1}"
        super().__init__(f"{place}: {message}")


class DataError(LsEdgeError):
    """A data set that cannot be used."""


class ModelError(LsEdgeError):
    """An unknown model, or one that cannot be cut into stem, equal blocks and head."""

    exit_code = 2


class RunError(LsEdgeError):
    """A run folder or checkpoint that cannot be used."""


class TrainingStopped(RunError):
    """Training ended early; the last good checkpoint is kept."""


class BundleError(LsEdgeError):
    """A bundle that cannot be used."""


class SchemaMismatch(BundleError):
    """A manifest written for a schema that this version does not read."""


class DigestMismatch(BundleError):
    """A file of a bundle that differs from the manifest."""


class VerificationError(LsEdgeError):
    """An exported part or chain whose results differ from PyTorch's."""


class EngineError(LsEdgeError):
    """A missing engine library, a part that does not load, or a failed run."""


class DeviceLost(EngineError):
    """A GPU that this process can no longer use; a new process can."""


class LinkError(LsEdgeError):
    """An address in use, a missing or refused key, or a peer with a wrong name."""


class AddressMissing(LinkError):
    """An address to listen on that no interface of this machine has, or does not have yet."""


class WireError(LinkError):
    """A malformed message; the receiver counts and drops it (guarantee R5)."""


class RequestError(LsEdgeError):
    """The end of a request without an answer (guarantee R1)."""

    record: Any = None
    """The :class:`ls_edge.core.records.RequestRecord` of the request, or None."""

    def __init__(self, message: str, *, blocks: tuple[int, ...] = (), holders: tuple[str, ...] = ()) -> None:
        """``blocks`` had no holder that ran them in time; ``holders`` failed the request."""
        super().__init__(message)
        self.blocks = blocks
        self.holders = holders


class BudgetExceeded(RequestError):
    """The budget ended, and the request may not skip the remaining blocks."""


class Overloaded(RequestError):
    """No credit from any process within the budget (guarantee R4)."""


class NotFinite(RequestError):
    """The tokens or logits of the request hold NaN or infinity; the message names the holders."""


class ImageRejected(RequestError, DataError):
    """The image cannot be decoded, or its values are too large for the stem; the message has the reason."""


class ModelMismatch(RequestError):
    """The peers serve another model than the source; the message has both ids (guarantee R7)."""


class SourceClosed(RequestError):
    """The source was closed before the answer came."""
