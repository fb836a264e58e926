"""Every error that ls-edge raises on purpose, and the exit code each one ends a command with.

    LsEdgeError                      exit 1
    ├── UsageError                   exit 2   a flag, a name or a file that the user has to change
    │   └── ConfigError              exit 2   the same in a YAML or JSON file: file, line, column
    ├── DataError                    a data set without images, of one class, of other classes
    ├── ModelError                   exit 2   an unknown model, or one that cannot be cut into equal blocks
    ├── RunError                     a run folder or checkpoint that cannot be used
    │   └── TrainingStopped          training ended by what it met (NaN loss, a full disk)
    ├── BundleError                  a bundle that cannot be used
    │   ├── SchemaMismatch           written for another schema
    │   └── DigestMismatch           a file that is not the one the manifest names
    ├── VerificationError            numbers that differ from PyTorch's
    ├── EngineError                  an engine that is not there, does not load or failed on a block
    ├── LinkError                    an address in use, a key refused, a peer under a wrong name
    │   └── WireError                a malformed frame
    └── RequestError                 what a request can end with instead of an answer
        ├── BudgetExceeded           its time is over and it may not skip what remains
        ├── Overloaded               no credit anywhere within its time
        ├── NotFinite                its tokens or logits hold NaN or infinity
        ├── ModelMismatch            the peers serve another model
        └── SourceClosed             the source was closed before the answer

A message is one line: what is wrong, the value that was received, what to do about it. Values come from outside, so
``str(error)`` is always :func:`printable`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters, marks that turn the direction of writing or are invisible, and what UTF-8 or XML cannot hold."""


def printable(text: object) -> str:
    r"""Return ``text`` as one line that is safe to show on a terminal, in a log and (escaped) in HTML and XML.

    Control characters become visible escapes such as ``\x1b``, bytes of a file name that is not UTF-8 their hex, line
    breaks and tabs a space. Everything from outside (names, reasons, classes of a manifest) is shown through this.
    """
    return _UNPRINTABLE.sub(_visible, str(text))


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] in "\t\n\r\v\f\x85\u2028\u2029":
        return " "
    if 0xDC80 <= code <= 0xDCFF:  # an undecodable byte, as Python hands it over in names of files
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class LsEdgeError(Exception):
    """Base of all errors raised on purpose; a command prints its one line and ends with ``exit_code``."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class UsageError(LsEdgeError):
    """Something that the user has to write differently."""

    exit_code = 2


class ConfigError(UsageError):
    """A file of settings that cannot be used; the message begins with ``file:line:column``."""

    def __init__(self, message: str, *, path: str | Path, line: int | None = None, column: int | None = None) -> None:
        """``line`` and ``column`` count from 1; None where the error has no one place."""
        self.path = str(path)
        self.line = line
        self.column = column
        place = self.path if line is None else f"{self.path}:{line}:{column if column is not None else 1}"
        super().__init__(f"{place}: {message}")


class DataError(LsEdgeError):
    """A data set that cannot be used."""


class ModelError(LsEdgeError):
    """A model that is not known, or that does not fit "stem, blocks of one shape, head"."""

    exit_code = 2


class RunError(LsEdgeError):
    """A run folder or checkpoint that cannot be used."""


class TrainingStopped(RunError):
    """Training ended by what it met; the last good checkpoint is kept."""


class BundleError(LsEdgeError):
    """A bundle that cannot be used."""


class SchemaMismatch(BundleError):
    """A manifest written for a schema that this version does not read."""


class DigestMismatch(BundleError):
    """A file of a bundle whose bytes are not those that the manifest names."""


class VerificationError(LsEdgeError):
    """An exported part, or the chain of them, that does not compute what PyTorch computes."""


class EngineError(LsEdgeError):
    """An engine library that is not there, a part that does not load, or a run that failed."""


class LinkError(LsEdgeError):
    """Sockets: an address in use, a key that is missing or refused, a peer that is not who it claims to be."""


class WireError(LinkError):
    """A malformed message; the receiver counts and drops it (guarantee R5)."""


class RequestError(LsEdgeError):
    """What a request ends with instead of an answer (guarantee R1)."""

    record: Any = None
    """How far the request came: a :class:`ls_edge.core.records.RequestRecord`, None where nothing was recorded."""


class BudgetExceeded(RequestError):
    """The request's time is over and it may not skip the blocks that remain."""


class Overloaded(RequestError):
    """No process granted a credit within the request's time (guarantee R4)."""


class NotFinite(RequestError):
    """The tokens or logits of the request hold NaN or infinity; the message names who ran its blocks."""


class ModelMismatch(RequestError):
    """The peers serve another model than the source; the message has both ids (guarantee R7)."""


class SourceClosed(RequestError):
    """The source was closed before the answer came."""
