"""Python processes of this package."""

from __future__ import annotations

import sys

# ``python -c`` and ``-m`` would import files of the working folder, such as types.py.
NO_CWD = "import sys; sys.path[:] = filter(None, sys.path)\n"


def module_command(module: str) -> list[str]:
    """Return the command that runs a module as a program, without its arguments."""
    code = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", NO_CWD + code]
