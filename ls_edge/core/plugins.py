"""Classes from other packages: training methods, policies, codecs, and model families.

A package registers a class with an entry point in the group ``ls_edge.{kind}``; the kinds are in :data:`_WORDS`.
See examples/plugin.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from ls_edge.core.errors import UsageError
from ls_edge.core.validation import unknown_name

Kind = TypeVar("Kind")
_WORDS = {"methods": "method", "policies": "policy", "families": "model family", "codecs": "codec"}


@functools.cache
def registered(group: str) -> dict[str, str]:
    """Return ``module:Class`` by name for the entry points of a group."""
    from importlib.metadata import entry_points  # slow, so imported only for names that are not built in

    return {entry.name: entry.value for entry in entry_points(group=f"ls_edge.{group}")}


def load(group: str, name: str, base: type[Kind], built_in: Iterable[str], *, reference: bool = False) -> type[Kind]:
    """Return the class that a package registered as ``name``; with ``reference``, also accept ``package.module:Class``.

    Raise :class:`UsageError` if there is no such class, if its module cannot be imported, or if it is not a subclass of
    ``base``.
    """
    from importlib.metadata import EntryPoint

    word, others = _WORDS[group], registered(group)
    if name not in others and not (
        reference and name.count(":") == 1 and all(map(str.isidentifier, name.replace(":", ".").split(".")))
    ):
        raise UsageError(unknown_name(word, name, [*built_in, *others]))
    value = others.get(name, name)
    entry = EntryPoint(name, value, group)
    try:
        found: Any = entry.load()
    except Exception as error:
        module = sys.modules.get(entry.module)
        if isinstance(error, AttributeError) and module is not None:
            own = [key for key, one in vars(module).items() if getattr(one, "__module__", "") == entry.module]
            raise UsageError(
                f"{word} {name!r}: {entry.module} has no {entry.attr!r}; it has {', '.join(own) or 'no classes'}"
            ) from None
        raise UsageError(
            f"{word} {name!r}: {value} cannot be imported ({type(error).__name__}: {error}); install or repair its "
            "package"
        ) from error
    if not isinstance(found, type) or not issubclass(found, base):
        raise UsageError(f"{word} {name!r}: {value} is not a subclass of {base.__module__}.{base.__name__}")
    kind: type[Kind] = found
    return kind
