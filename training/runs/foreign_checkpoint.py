"""Reading of checkpoints from other projects as dictionaries with timm's names, without running code from them.

Trainers wrap the weights of a model, in any nesting: in dictionaries next to optimizers and settings (:data:`_NESTED`)
and in modules that add a prefix to each name (:data:`_PREFIXES`, or any other before the blocks) or a part within it
(:data:`_WRAPPERS`). As in timm, averaged weights, with which these projects evaluate, are preferred to raw ones.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import RunError
from ls_edge.training.runs.checkpoint import read_tensors

_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "teacher")
"""Keys of averaged weights; the teacher in DINO is the average of its student."""
_NESTED = (*_AVERAGED, "state_dict", "model_state_dict", "model_state", "model", "student", "module", "net", "weights")
_AVERAGED_PREFIXES = ("ema_model.", "model_ema.", "ema.", "teacher.")
_PREFIXES = (*_AVERAGED_PREFIXES, "module.", "model.", "student.", "backbone.", "net.", "network.")
_WRAPPERS = re.compile(r"\b_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")
"""Parts of names that torch adds to each module that it compiles, shards, or checkpoints."""
_PARENT = re.compile(r"([A-Za-z_]\w*\.)(?:[A-Za-z_]\w*\.)*blocks\.\d")
"""Start of a name in a module that has the blocks, but not in one of several stages."""
_DECODER = ("decoder", "mask_token")
"""Prefixes of names in the decoder of an autoencoder (MAE)."""


_SETTINGS = ("args", "config", "cfg", "hyper_parameters", "hparams")
"""Keys of training settings next to the weights."""
_FIELDS: dict[str, tuple[tuple[str, ...], int]] = {
    "size": (("input_size", "img_size", "image_size"), 2),
    "mean": (("mean",), 3),
    "std": (("std",), 3),
    "interpolation": (("interpolation",), 0),
    "crop_pct": (("crop_pct",), 0),
}
"""Names of settings and number of their values, 0 for a single one, by field of :class:`ImageSpec`."""
_TYPES = {field.name: field.type for field in msgspec.structs.fields(ImageSpec)}


def read_foreign(
    path: str | Path, note: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a ``.safetensors`` or ``.pth`` file, and the fields of :class:`ImageSpec` that it states.

    ``note`` receives a line about each choice and omission. Raise :class:`RunError` for any other file.
    """
    path = Path(path)
    value: Any = _load(path)
    image: dict[str, Any] = {}
    while isinstance(value, dict):
        image = _image_settings(value) | image
        nested = [key for key in _NESTED if isinstance(value.get(key), dict)]
        if "student" not in nested:  # next to other weights, the teacher is another model
            nested.sort(key="teacher".__eq__)
        key = next(iter(nested), None)
        if key is None:
            break
        if key in _AVERAGED:
            note(f"{path}: the averaged weights ({key}) are used")
        value = value[key]
    content = value if isinstance(value, dict) else {}
    kinds = (
        (name, type(item).__name__ if not isinstance(item, Tensor) else "meta" if item.is_meta else str(item.layout))
        for name, item in content.items()
    )
    odd = next((f" ({name!r} is {kind.removeprefix('torch.')})" for name, kind in kinds if kind != "torch.strided"), "")
    if odd or not content:
        raise RunError(f"{path} does not hold a dictionary of dense tensors{odd}; save the model's state_dict")
    found = _without_prefixes({str(name): tensor for name, tensor in value.items()}, path, note)
    if any(name.startswith("decoder_") for name in found):
        note(f"{path}: the decoder of the autoencoder is left out")
        return {name: tensor for name, tensor in found.items() if not name.startswith(_DECODER)}, image
    return found, image


def _image_settings(value: dict[str, Any]) -> dict[str, Any]:
    """Return fields of :class:`ImageSpec` from the settings next to the weights, as timm's training writes them."""
    found: dict[str, Any] = {}
    known = [vars(one) if isinstance(one, argparse.Namespace) else one for one in map(value.get, _SETTINGS)]
    for field, (names, count) in _FIELDS.items():
        for given in (one.get(name) for one in known if isinstance(one, dict) for name in names):
            row = list(given) if isinstance(given, (list, tuple)) else [given]  # one value is for all channels or sides
            with contextlib.suppress(msgspec.ValidationError):
                found.setdefault(field, msgspec.convert((row * count)[-count:] if count else given, _TYPES[field]))
    return found


def _without_prefixes(found: dict[str, Tensor], path: Path, note: Callable[[str], None]) -> dict[str, Tensor]:
    found = {_WRAPPERS.sub("", name): tensor for name, tensor in found.items()}
    while True:
        prefixes = [prefix for prefix in _PREFIXES if any(name.startswith(prefix) for name in found)]
        if "student." not in prefixes:
            prefixes = [prefix for prefix in prefixes if prefix != "teacher."]
        parents = {parent[1] for parent in map(_PARENT.match, found) if parent}
        whole = [prefix for prefix in prefixes if prefix in parents] or (list(parents) if len(parents) == 1 else [])
        if not (whole or prefixes):
            return found
        prefix = (whole or prefixes)[0]
        chosen = {name.removeprefix(prefix): found[name] for name in found if name.startswith(prefix)}
        if len(chosen) < len(found):
            if not whole and 2 * len(chosen) < len(found):
                return found
            what = "averaged" if prefix in _AVERAGED_PREFIXES else "model's"
            note(f"{path}: the {what} weights ({prefix}*) are used, not the {len(found) - len(chosen)} of other names")
        found = chosen


def _load(path: Path) -> Any:
    """Return the content of a file, whose first bytes tell its format, since its name may not."""
    if not path.is_file():
        raise RunError(f"{path} is neither a run folder nor a file; check --init")
    with path.open("rb") as stream:
        start = stream.read(9)
    if start.endswith(b"{"):
        return read_tensors(path)[0]
    if not start.startswith((b"PK", b"\x80")):
        raise RunError(
            f"{path} is neither a safetensors file nor one of torch.save (it begins with {repr(start)[1:]}); give the "
            "file of a model's state_dict"
        )
    try:
        # Training scripts save this class with their settings; like timm, allow no other class.
        safe = torch.serialization.safe_globals([argparse.Namespace])
        with path.open("rb") as stream, warnings.catch_warnings(), safe:
            warnings.simplefilter("ignore")  # warnings about old pickle protocols
            file = f"/proc/self/fd/{stream.fileno()}"  # given another path, torch goes by its extension
            return torch.load(file, map_location="cpu", weights_only=True, mmap=start.startswith(b"PK"))
    except Exception as error:  # noqa: BLE001 - torch raises many kinds for unreadable files
        found = re.search(r"GLOBAL ([\w.]+)", str(error))  # the rest of torch's message advises to load it unsafely
        reason = f"it holds Python objects, such as {found[1]}" if found else "it is truncated or holds something else"
        raise RunError(
            f"{path} is not a checkpoint of plain tensors ({reason}); anything else could run code from the file, so "
            "it is not loaded; save the model's state_dict as .safetensors"
        ) from None
