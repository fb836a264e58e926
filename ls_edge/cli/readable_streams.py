r"""Standard output and error that show every text, whatever characters the terminal has.

Where the encoding lacks a character (``PYTHONIOENCODING=ascii``, an old locale) or the user asked for the C locale, a
readable stand-in is written instead of an error: ``+-`` for a plus-minus sign, ASCII for lines of tables and bars, and
an escape such as ``\xe9`` for a letter, so that a name of a file stays unambiguous.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys

from ls_edge.core.errors import printable

_STAND_INS = {
    "…": "...", "±": "+-", "\u2013": "-", "\u2014": "-", "\u00d7": "x", "·": ",", "→": "->", "←": "<-",
    "τ": "tau", "≤": "<=", "≥": ">=", "≈": "~", "\u2018": "'", "\u2019": "'", "“": '"', "”": '"', "•": "*", "✓": "ok",
    "✔": "ok", "✗": "x", "✘": "x", "\N{NO-BREAK SPACE}": " ", "µ": "u", "μ": "u", "Δ": "d", "°": " deg", "²": "^2",
}  # fmt: skip
_HANDLER = "ls_edge.readable"


def fit_streams() -> None:
    """Make standard output and error write stand-ins for what they cannot hold; call it once a process."""
    codecs.register_error(_HANDLER, _readable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError, OSError):  # closed, or somebody's own
                stream.reconfigure(encoding="ascii" if _asks_for_ascii() else stream.encoding, errors=_HANDLER)


def stand_in(character: str) -> str:
    """Return ASCII for one character."""
    if character in _STAND_INS:
        return _STAND_INS[character]
    code = ord(character)
    if 0x2500 <= code <= 0x257F:  # lines of boxes
        return "-" if character in "─━┄┅┈┉╌╍═╴╶╸╺╼╾" else "|" if character in "│┃┆┇┊┋╎╏║╵╷╹╻╽╿" else "+"
    if 0x2580 <= code <= 0x259F:  # bars
        return "#"
    if 0x2800 <= code <= 0x28FF:  # braille, of spinners
        return "*"
    shown = printable(character)
    return shown if shown.isascii() else character.encode("ascii", "backslashreplace").decode()


def _readable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(stand_in, error.object[error.start : error.end])), error.end


def _asks_for_ascii() -> bool:
    """Whether the user named the C locale; Python itself then writes UTF-8 all the same, and changes ``LC_CTYPE``."""
    if os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8"):
        return False
    named = [os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG")]
    if named[1] == "C.UTF-8" and named[2] in ("C", "POSIX"):
        named[1] = ""
    return next((name for name in named if name), "") in ("C", "POSIX")
