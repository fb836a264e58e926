"""Callbacks of long work: progress in steps, and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable

OnProgress = Callable[[int, int, str], None]
"""Called with the number of finished steps, the number of all steps, and what they are."""
OnWarning = Callable[[str], None]
"""Called with a warning, a sentence."""


def ignore_progress(done: int, total: int, text: str) -> None:
    """Report no progress."""


def warn_in_python(text: str) -> None:
    """Report a warning as Python's warnings do, at the call of a public function."""
    warnings.warn(text, stacklevel=3)
