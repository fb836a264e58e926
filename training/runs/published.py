"""Published runs: folders from which timm can load the plain model, and ``ls-edge export`` the whole run.

``model.safetensors`` contains timm's parameters, with a copy for each block that shares its weights, and
``method.safetensors`` those of the method, if any. The metadata has the digest of the original file, which is checked
when the run is loaded, so an export of the run has the same model id.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import timm
import torch

from ls_edge.core.files import is_hub, write_file
from ls_edge.data.datasets import is_timm_name
from ls_edge.training.config import RunFile, to_yaml
from ls_edge.training.models.small_models import SMALL_MODELS
from ls_edge.training.models.view import METHOD
from ls_edge.training.runs.checkpoint import (
    CONFIG,
    DIGEST,
    METHOD_WEIGHTS,
    WEIGHTS,
    LoadedRun,
    read_tensors,
    write_tensors,
)

T = TypeVar("T", bound=msgspec.Struct)
TIMM_CONFIG = "config.json"
_DIGITS = {
    "img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 8, "num_heads": 4, "mlp_ratio": 2.0,
    "init_values": 0.5, "class_token": False, "global_pool": "avg",
}  # fmt: skip
"""Arguments that turn timm's smallest vision transformer into ``vit_digits``."""
SAME_LOGITS = 1e-4
"""Maximum difference between the logits of timm's model and the run's model, relative to the largest logit."""


def write_published(run: LoadedRun, folder: Path) -> str:
    """Write the files of a run; return the reason why timm alone cannot load its plain model, or an empty string."""
    state = run.view.model.state_dict()
    stored = read_tensors(run.folder / WEIGHTS)[0]
    plain = {name: value.to(stored.get(name, value).dtype) for name, value in state.items()}
    if (run.folder / METHOD_WEIGHTS).is_file():  # the run was itself published
        stored.update(read_tensors(run.folder / METHOD_WEIGHTS)[0])
    added = {name: value for name, value in stored.items() if name.startswith(METHOD)}
    record = run.record
    about = {
        "format": "pt",
        "model": record.model,
        "method": record.method,
        "bands": json.dumps(run.bands.to_json()),
        DIGEST: run.weights_sha256,
    }
    write_tensors(folder / WEIGHTS, plain, about)
    if added:
        write_tensors(folder / METHOD_WEIGHTS, added, about)
    write_file(folder / CONFIG, to_yaml(_without_folders(run.config)).encode())
    (folder / TIMM_CONFIG).write_text(json.dumps(_timm_config(run), indent=2) + "\n", encoding="utf-8")
    return _why_not_plain(run, folder)


def _without_folders(config: RunFile) -> RunFile:
    """Return a configuration without the folders of this machine, but with the names of the files in them."""

    def named(part: T, *fields: str) -> T:
        paths = {field: path for field in fields if (path := getattr(part, field)) is not None}
        own = {field: Path(path).name for field, path in paths.items() if not (is_hub(path) or is_timm_name(path))}
        return msgspec.structs.replace(part, **own)

    return msgspec.structs.replace(
        config,
        data=named(config.data, "source", "class_order"),
        model=named(config.model, "init"),
        teacher=named(config.teacher, "model", "weights"),
        run=config.run and msgspec.structs.replace(config.run, start_remark=""),  # it names the start
    )


def _timm_config(run: LoadedRun) -> dict[str, Any]:
    """Return timm's ``config.json`` of the plain model."""
    record, view = run.record, run.view
    model: Any = view.model
    name, args = record.model, dict(record.model_args)
    if name == "vit_digits":
        name, args = "vit_tiny_patch16_224", {**_DIGITS, **args}
    if "depth" in args or record.kept != tuple(range(len(record.kept))) or run.config.model.depth is not None:
        args["depth"] = view.num_blocks
    return {
        "architecture": name,
        "num_classes": view.num_classes,
        "num_features": model.num_features,
        "label_names": list(record.classes),
        "model_args": args,
        "pretrained_cfg": {
            "input_size": [3, *record.image.size],
            "fixed_input_size": True,
            "interpolation": record.image.interpolation,
            "crop_pct": record.image.crop_pct,
            "crop_mode": record.image.crop_mode or "center",
            "mean": list(record.image.mean),
            "std": list(record.image.std),
            "num_classes": view.num_classes,
            "pool_size": None,
            "first_conv": model.pretrained_cfg.get("first_conv"),
            "classifier": model.pretrained_cfg.get("classifier"),
            "custom_load": False,
        },
    }


def _why_not_plain(run: LoadedRun, folder: Path) -> str:
    """Load the plain model with timm, and compare logits in trained order; return the problem or an empty string."""
    if run.record.model in SMALL_MODELS and run.record.model != "vit_digits":
        return f"timm knows {run.record.model} only after `import ls_edge.training.models.small_models`"
    try:
        plain = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except Exception as error:  # noqa: BLE001 - timm and torch raise many kinds
        return f"timm cannot build it: {str(error).splitlines()[0]}"
    images = torch.randn(2, 3, *run.record.image.size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        own, other = run.view(images.to(run.view.device)).cpu(), plain(images)
    if not float((own - other).abs().max()) <= SAME_LOGITS * float(own.abs().max()):
        (folder / TIMM_CONFIG).unlink()  # timm would load a model that computes something else
        return f"the method {run.record.method} adds parameters to the blocks, which timm's model lacks"
    return ""
