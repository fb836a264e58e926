"""Table of training methods.

To add a method, write a class in its own module and add a row to :data:`METHODS`; other packages register theirs
(:mod:`ls_edge.core.plugins`). The modules are imported on use, so that the command line can list the methods without
loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import msgspec

from ls_edge.core import plugins, validation
from ls_edge.core.errors import UsageError

if TYPE_CHECKING:
    from ls_edge.training.methods.base import Method

METHODS = {
    "sequential": "base.Method",
    "shuffle": "paper.Shuffle",
    "position": "paper.PositionMethod",
    "predict": "paper.PredictMethod",
    "layerdrop": "paper.LayerDrop",
    "layerdrop+shuffle": "paper.LayerDropShuffle",
    "anyorder": "anyorder.AnyOrder",
    "shared": "shared.SharedTrunk",
}
"""Module and class of each method."""


def find_method(name: str, *, reference: bool = True) -> type[Method]:
    """Return the class of a method; raise :class:`UsageError` if there is none.

    With ``reference``, a name may be ``package.module:Class``. Do not allow this for names from outside, since it
    imports the module.
    """
    from ls_edge.training.methods.base import Method

    if name not in METHODS:
        return plugins.load("methods", name, Method, METHODS, reference=reference)
    module, _, attribute = METHODS[name].partition(".")
    kind: type[Method] = getattr(importlib.import_module(f"ls_edge.training.methods.{module}"), attribute)
    return kind


def make_method(name: str, args: dict[str, Any], *, reference: bool = True) -> Method:
    """Return a method with these settings; raise :class:`UsageError` for an unknown method or an invalid setting."""
    kind = find_method(name, reference=reference)
    try:
        return kind(msgspec.convert(args, kind.settings_type))
    except msgspec.ValidationError as error:
        text = validation.explain(str(error), args, kind.settings_type).text
        known = ", ".join(kind.settings_type.__struct_fields__) or "none"
        raise UsageError(f"method {name} with settings {args}: {text}; its settings are {known}") from None
