"""``ls_edge.publish``: a run or a bundle with a model card, into a folder or onto the Hub."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ls_edge.api.models import is_bundle
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, UsageError, printable
from ls_edge.core.files import ask_hub, check_folder, hub_library, hub_repository, is_hub, local_folder
from ls_edge.core.text import byte_size, counted, show_percent
from ls_edge.core.validation import InvalidDocument, read_json
from ls_edge.data.datasets import is_timm_name
from ls_edge.device.requirements import require_import
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.report.card import model_card
from ls_edge.report.shown import Shown

EVALUATION = "eval.json"
CARD = "README.md"


class Published(Shown, msgspec.Struct, frozen=True):
    """Result of :func:`publish`."""

    source: str
    to: str
    """Folder, or name on the Hub with the commit."""
    files: list[str]
    bytes: int
    timm: bool
    """Whether timm alone loads the plain model with the same logits."""
    why_not: str
    """Reason if timm alone does not load it."""

    def show(self, console: Console) -> None:
        """Print the location, and whether timm loads the model."""
        console.print(f"{self.to}: {counted(len(self.files), 'file')}, {byte_size(self.bytes)}")
        if self.timm:
            console.print("timm alone loads the plain model, with the same logits in trained order")
        elif self.why_not:
            console.print(f"timm alone does not load it: {self.why_not}")


def publish(source: str | Path, to: str | Path) -> Published:
    """Publish a run or a bundle to a new folder or ``hf-hub:OWNER/NAME``; as ``ls-edge publish``.

    The card has the results of ``eval.json`` in the folder of the run or bundle, if there is one.
    """
    folder = local_folder(source)
    name = hub_repository(to)[0] if is_hub(to) else Path(to).absolute().name
    if is_hub(to):
        hub_library()
    elif Path(to).is_symlink() or (Path(to).exists() and (not Path(to).is_dir() or any(Path(to).iterdir()))):
        raise UsageError(f"{to} exists and is not an empty folder; name a new one")
    else:
        check_folder(to)
    with contextlib.ExitStack() as stack:
        if is_hub(to):
            target = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ls-edge-")))
        else:
            target = Path(to)
            target.mkdir(parents=True, exist_ok=True)
        write = _write_bundle if is_bundle(folder) else _write_run
        described, problem = write(folder, target)
        card = model_card(name, **described, timm_problem=problem)
        (target / CARD).write_text(card, encoding="utf-8")
        if described["evaluation"] is not None:
            (target / EVALUATION).write_bytes(msgspec.json.encode(described["evaluation"]))
        files = sorted(path for path in target.rglob("*") if path.is_file())
        where = _upload(target, str(to), name) if is_hub(to) else printable(to)
        return Published(
            source=printable(source),
            to=where,
            files=[path.relative_to(target).as_posix() for path in files],
            bytes=sum(path.stat().st_size for path in files),
            timm=problem == "",
            why_not=problem or "",
        )


def _evaluation(folder: Path, weights: str) -> Evaluation | None:
    """Return the evaluation in a folder, without local paths; raise :class:`DataError` if not of these ``weights``."""
    path = folder / EVALUATION
    if not path.is_file():
        return None
    try:
        found = read_json(path, Evaluation)
    except InvalidDocument as error:
        raise DataError(f"{path} is not a document of 'ls-edge eval --json'{error}; write it again") from None
    if found.settings.get("weights") != weights or found.models is not None:
        raise DataError(
            f"{path} has the results of another model or of several, or of this one before it was trained again; write "
            f"it again with 'ls-edge eval {folder} --data DATA --json', or remove it"
        )
    settings = {**found.settings, "of": folder.name, "account": {}}
    data = str(settings.get("data", ""))
    if not is_timm_name(data):
        settings["data"] = Path(data).name
    return msgspec.structs.replace(found, settings=settings)


def _write_run(folder: Path, target: Path) -> tuple[dict[str, Any], str]:
    """Write a run; return its description for the card, and the reason if timm cannot load the plain model."""
    require_import("publishing a run", ("torch", "timm", "safetensors"), "train")
    from ls_edge.training.precision import own_torch_state
    from ls_edge.training.runs.checkpoint import load_run, shown_model
    from ls_edge.training.runs.published import write_published

    with own_torch_state():
        run = load_run(folder)
        evaluation = _evaluation(folder, run.weights_sha256)
        problem = write_published(run, target)
        view = run.view
        flops, block = view.count_flops()
    cost = {
        "parameters": f"{sum(p.numel() for p in view.parameters()) / 1e6:.2f} million",
        "operations": f"{flops / 1e9:.3g} GFLOPs per image, {show_percent(block / flops)} in each block",
        "tokens between blocks": f"{byte_size(view.token_spec.bytes_per_image)} per image",
    }
    about = {"model": shown_model(run.record, view), "method": run.record.method}
    return {
        "about": about,
        "bands": run.bands,
        "classes": run.record.classes,
        "cost": cost,
        "evaluation": evaluation,
    }, problem


def _write_bundle(folder: Path, target: Path) -> tuple[dict[str, Any], None]:
    """Write a bundle; return its description for the card."""
    bundle = Bundle.open(folder)
    manifest = bundle.manifest
    evaluation = _evaluation(folder, manifest.bundle_id)
    for part_name, part in manifest.part_names():
        (target / part.file).parent.mkdir(exist_ok=True)
        (target / part.file).write_bytes(bundle.read(part_name))
    shutil.copyfile(folder / "manifest.json", target / "manifest.json")
    sizes = {part_name: part.bytes for part_name, part in manifest.part_names()}
    cost = {
        "files": f"stem {byte_size(sizes['stem'])}, blocks of up to "
        f"{byte_size(max(part.bytes for part in manifest.parts.blocks))}, head {byte_size(sizes['head'])}",
        "precision": manifest.precision,
        "tokens between blocks": f"{byte_size(manifest.tokens.bytes_per_image)} per image",
    }
    about = {"model": manifest.model, "method": manifest.method}
    return {
        "about": about,
        "bands": bundle.bands,
        "classes": manifest.classes,
        "cost": cost,
        "evaluation": evaluation,
    }, None


def _upload(folder: Path, to: str, name: str) -> str:
    """Upload a folder in one commit, and return its name with that commit."""

    def send() -> Any:
        hub = hub_library().HfApi()
        hub.create_repo(name, exist_ok=True)
        return hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            revision=hub_repository(to)[1] or None,
            commit_message="Publish with ls-edge",
            delete_patterns=["config.*", "eval.json", "manifest.json", "method.safetensors"],  # of an earlier model
        )

    return f"hf-hub:{name}@{ask_hub(to, send).oid}"
