"""Checks of files that a command will write, made before it spends time on what goes into them."""

from __future__ import annotations

import os
from pathlib import Path

from ls_edge.errors import UsageError

_EXAMPLES = {"--trace": "trace.jsonl", "--report": "report.html"}


def check_output(flag: str, path: Path) -> None:
    """Raise :class:`UsageError` where ``path``, given with ``flag``, cannot be written; leaves what is there as it is.

    A device or a pipe is left to the writing itself, since opening a pipe waits for its reader.
    """
    if path.is_dir() or not path.name:
        raise UsageError(f"{flag} {path} is a folder; name a file, for example {path / _EXAMPLES.get(flag, 'out')}")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if path.exists() and not path.is_file():
        return
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
            if flag != "--report":
                return
        # A report is written beside its place and then moved there, so that it is never half of one.
        trial = path.with_name(f".{path.name}.{os.getpid()}.part")
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        trial.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}; give another path") from None
