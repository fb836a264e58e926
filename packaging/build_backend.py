"""The build backend: setuptools, and mypy for whoever asks for compiled modules with ``LS_EDGE_COMPILE=1``.

PEP 517 lets a backend say what a build needs. A plain wheel needs no compiler and no mypy.
"""

from __future__ import annotations

import os
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  all hooks of setuptools but the one below

COMPILE = ("mypy>=1.15", "msgspec>=0.18.6", "numpy>=1.26", "pyzmq>=26.0")
"""mypy brings mypyc; the others bring the types by which it translates."""


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What a wheel needs to be built, beyond ``build-system.requires``."""
    wanted = os.environ.get("LS_EDGE_COMPILE", "") not in ("", "0")
    return [*build_meta.get_requires_for_build_wheel(config_settings), *(COMPILE if wanted else ())]
