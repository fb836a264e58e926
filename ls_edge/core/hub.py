"""Folders of runs and bundles on the Hugging Face Hub, named ``hf-hub:OWNER/NAME`` or ``hf-hub:OWNER/NAME@REVISION``.

They are kept in ``$LS_EDGE_CACHE/hub`` (default ``~/.cache/ls-edge/hub``), one folder for each commit, which is
complete once it has its final name. Nothing but the files of runs and bundles is downloaded.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from ls_edge.core.errors import RunError, UsageError

PREFIX = "hf-hub:"
FILES = ("README.md", "config.yaml", "config.json", "eval.json", "manifest.json", "*.safetensors", "*.onnx")
"""Files of runs and bundles; ``*`` also matches folders."""


def is_hub(name: str | Path) -> bool:
    """Return whether a name is one on the Hub, and not a path."""
    return str(name).startswith(PREFIX)


def repository(name: str | Path) -> tuple[str, str]:
    """Return ``OWNER/NAME`` and the revision, which may be empty; raise :class:`UsageError`."""
    found = re.fullmatch(rf"{PREFIX}([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", str(name))
    if found is None:
        raise UsageError(f"{name} is not a name on the Hub; write {PREFIX}OWNER/NAME, or {PREFIX}OWNER/NAME@REVISION")
    return found[1], found[2] or ""


def pin(name: str | Path) -> str:
    """Return a name on the Hub with the commit that its revision stands for now."""
    owner_name, revision = repository(name)
    if not re.fullmatch("[0-9a-f]{40}", revision):
        revision = ask(name, lambda: library().HfApi().model_info(owner_name, revision=revision or None).sha)
    return f"{PREFIX}{owner_name}@{revision}"


def local_folder(name: str | Path) -> Path:
    """Return the folder of a name on the Hub, downloaded if needed; any other path unchanged."""
    if not is_hub(name):
        return Path(name)
    pinned = pin(name)
    owner_name, commit = repository(pinned)
    base = os.environ.get("LS_EDGE_CACHE")
    top = (Path(base) if base else Path.home() / ".cache" / "ls-edge") / "hub" / owner_name.replace("/", "--")
    if not (top / commit).is_dir():
        folder = top / f".{commit}.{secrets.token_hex(4)}"
        try:
            ask(
                pinned,
                lambda: library().snapshot_download(
                    owner_name, revision=commit, local_dir=folder, allow_patterns=list(FILES)
                ),
            )
            shutil.rmtree(folder / ".cache", ignore_errors=True)
            if not (top / commit).is_dir():
                folder.rename(top / commit)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return top / commit


def ask(name: str | Path, request: Any) -> Any:
    """Return the result of a request to the Hub; raise :class:`RunError` with one line if it fails."""
    try:
        return request()
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - the library and its HTTP client raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise RunError(
            f"cannot reach {name} on the Hub: {reason}; check the name, the network, and HF_TOKEN for private ones"
        ) from None


def library() -> Any:
    """Return the module ``huggingface_hub``; raise :class:`UsageError` if it is not installed."""
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise UsageError(
            f"{PREFIX} names need huggingface_hub (extra hub); to install it: pip install huggingface_hub"
        ) from None
