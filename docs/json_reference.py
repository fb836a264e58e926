"""Write ``docs/json.md``, the keys of every JSON output, from the structs: ``python docs/json_reference.py``.

Documents that commands put together from several results have a struct here; a test compares it with their output.
"""
# ruff: noqa: D101

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import types
import typing
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec

from ls_edge.analysis import Analysis
from ls_edge.api.publishing import Published
from ls_edge.api.simulation import SimulationResult
from ls_edge.cli.commands.predict import Prediction
from ls_edge.core.bundle import Folded, TokenSpec
from ls_edge.device.profile import DeviceProfile
from ls_edge.engines.benchmark import Bench
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.runtime.clients.sender import PushResult
from ls_edge.runtime.clients.status import PeerStatus
from ls_edge.runtime.fleet.planning.document import PlanDocument
from ls_edge.training.config import TrainConfig
from ls_edge.training.progress import Epoch, TrainingResult

_HEAD = """# JSON outputs

The keys of what commands print with `--json` and write to files, in the words of the terminal.
`make docs` generates this page; change the structs instead.

`--json` prints one document to standard output, `predict` and `status --watch` one a line. Several runs or models in
one command come as a list: `runs` of `train --seeds`, `evaluations` of `eval`, `analyses` of `analyze`. Accuracies and
shares are from 0 to 1. Unknown values are null, never NaN. The paths of `serve` are described by its `/openapi.json`.
"""

WORDS: dict[str, str] = {
    "bundle_id": "id of the bundle",
    "model_id": "id of the weights and their interface",
    "model": "name of the model",
    "method": "method of its training",
    "schema": "version of this document",
    "bundle": "folder of the bundle",
    "run": "folder of the run",
    "blocks": "blocks",
    "parameters": "number of weights",
    "images": "number of images",
    "skipped": "images that could not be read",
    "settings": "settings in force",
    "account": "images, classes, and ignored files, by reason",
    "seconds": "duration",
    "device": "device of the training",
    "precision": "type of the numbers",
    "seed": "seed",
    "warnings": "what the command warned about",
    "bands": "bands, in which blocks may be reordered",
    "folded": "bands whose blocks are part of stem or head",
    "tokens": "shape and type of the tokens",
    "TrainingResult.blocks": "number of blocks",
    "Kept.sequential": "mean accuracy in trained order",
    "Kept.arbitrary": "mean accuracy in random order",
    "name": "name",
    "files": "files that were written",
    "source": "run or bundle",
    "bytes": "size",
    "error": "reason why there is no answer; null for an answer",
    "validation_images": "number of validation images",
    "epochs": "number of epochs",
    "best_epoch": "epoch of the weights that were kept",
    "val_loss": "validation cross-entropy of these weights",
    "val_top1": "validation accuracy",
    "top1_by_class": "accuracy of each class",
    "teacher_top1": "accuracy of the teacher",
    "epoch": "epoch",
    "train_loss": "mean training loss",
    "lr": "learning rate at the end of the epoch",
    "sequential": "accuracy in trained order",
    "arbitrary": "accuracy in random orders",
    "kept": "accuracy with some blocks kept, by their number",
    "models": "spread over several runs",
    "freedom": "accuracy by bands, with `--freedom`",
    "top1": "accuracy",
    "top1_mean": "mean accuracy of the orders",
    "top1_std": "deviation over the orders",
    "top1_p5": "5th percentile of the accuracies",
    "top1_worst": "accuracy of the worst order",
    "orders": "number of orders",
    "sequential_std": "deviation of `sequential`",
    "arbitrary_std": "deviation of `arbitrary`",
    "count": "number",
    "runs": "the runs",
    "own": "whether these are the bands of the model",
    "Models.count": "number of runs",
    "Evaluation.skipped": "images that could not be read",
    "Folded.stem": "blocks in the stem",
    "Folded.head": "blocks in the head",
    "TokenSpec.count": "number of tokens of an image",
    "dim": "values of a token",
    "dtype": "type of a value",
    "checked_with": "what loaded the files",
    "parts": "parts",
    "file": "file of the part",
    "ok": "whether it is valid",
    "part": "`stem`, `head`, or for example `block 3`",
    "trained": "accuracy in trained order",
    "block": "block",
    "left_out": "accuracy without the block",
    "moved": "accuracy with the block in the slot `moved_to`",
    "left_out_changes": "answers that change without the block",
    "moved_changes": "answers that change with the block in the slot `moved_to`",
    "lost": "answers that became wrong",
    "won": "answers that became right",
    "loss": "mean cross-entropy",
    "reasons": "why a kind was not measured, by kind",
    "steps": "steps",
    "pool": "how the tokens of an image are pooled",
    "cka_images": "images for CKA",
    "random": "answers in random orders",
    "accuracy": "accuracy by block and slot",
    "mean": "mean",
    "chance": "accuracy of a guess",
    "of": "what the points are",
    "points": "places on the map",
    "Map.slots": "slot of each point",
    "grid": "rows and columns of the patches",
    "pictures": "pictures",
    "text": "caption",
    "PatchFilters.filters": "number of filters",
    "layers": "names of the layers",
    "branches": "magnitude in each layer, by residual branch",
    "channels": "channels",
    "Excitation.reached": "value that was reached",
    "Inversion.reached": "distance that was reached",
    "Contribution.trained": "means by block in trained order",
    "Analysis.parts": "accuracy without norms, attention, MLP, or residual path",
    "Agreement.left_out": "answers in random orders of fewer blocks",
    "AnswersCompared.left_out": "number of blocks that were left out",
    "AnswersCompared.orders": "number of orders",
    "SlotAccuracy.images": "number of images",
    "state": "state of the peer",
    "warm": "whether its engines are loaded",
    "engine": "library and provider of its engines",
    "address": "address from `peers.yaml`",
    "peers": "peers by name",
    "sources": "names of the sources",
    "insecure": "whether links are not encrypted",
    "findings": "what was checked",
    "status": "`ok`, `warn`, or `bad`",
    "changes": "steps of the change, by peer",
    "reason": "reason; null without a problem",
    "image": "name of the image",
    "top": "`label` and `probability` of the most likely classes",
    "degraded": "whether the answer skipped blocks",
    "latency_ms": "time from the submission of the preprocessed image to the answer",
    "why_skipped": "reason for skipped blocks",
    "policy": "policy",
    "audit": "answers that were computed a second time",
    "rejected": "impossible messages, by peer",
    "requests": "number of requests",
    "answered": "requests with an answer",
    "failed": "requests with an error",
    "RunSummary.degraded": "answers that skipped blocks",
    "SimulationResult.degraded": "answers that skipped blocks",
    "skips": "skipped blocks of answers",
    "retries": "branches that sources started again",
    "duplicates_dropped": "late answers that were dropped",
    "hops": "transfers of tokens",
    "preprocess_ms": "time to decode and preprocess an image",
    "top1_interval": "95 % CI of the accuracy",
    "accuracy_by_skips": "accuracy by number of skipped blocks",
    "errors": "number of failed requests by kind of error",
    "share": "fraction of the answers to recompute",
    "matched": "answers that agreed",
    "mismatched": "answers that differ",
    "waiting": "audits that were still waiting",
    "suspects": "holders of wrong answers",
    "Rejection.count": "number of messages",
    "why": "reason",
    "p50": "median",
    "p95": "95th percentile",
    "p99": "99th percentile",
    "max": "largest value",
    "min": "smallest value",
    "Skips.mean": "blocks per answer",
    "Skips.max": "most blocks of an answer",
    "Skips.reasons": "number of answers by reason",
    "Hops.mean": "transfers per answer",
    "wire_ms_p50": "median time on the wire",
    "queue_ms_p50": "median time in the queue",
    "engine_ms_p50": "median time in the engine",
    "codec_ms_p50": "median time of the codec",
    "PeerSummary.requests": "answers that it worked on",
    "blocks_run": "number of blocks that it ran",
    "PeerSummary.lost": "number of times that it was lost",
    "SkipAccuracy.skipped": "number of skipped blocks",
    "answers": "number of answers",
    "labeled": "answers with a label",
    "low": "lower end of the 95 % CI",
    "high": "upper end of the 95 % CI",
    "id": "number of the request",
    "label": "class of the image",
    "prediction": "class of the answer",
    "TraceLine.skipped": "blocks that the answer skipped",
    "logits": "logits of the answer",
    "submitted_ms": "time of the submission since the start of the run",
    "stem_ms": "time of the stem",
    "head_ms": "time of the head",
    "visits": "stays with holders",
    "holder": "name of the peer or source",
    "queue_ms": "time in the queue",
    "engine_ms": "time in the engine",
    "codec_ms": "time of reading and writing tokens",
    "wave": "number of the wave",
    "begin_ms": "begin, since the tokens arrived at the joiner",
    "end_ms": "end, since the tokens arrived at the joiner",
    "expected_ms": "planned duration",
    "TraceSpan.why": "reason why it was not summed",
    "repeats": "number of runs",
    "power_watts": "mean power",
    "energy_mj_per_image": "energy of an image",
    "provider": "provider of the engines",
    "threads": "number of threads",
    "batch": "images per engine call",
    "DeviceProfile.batch": "times by number of images per engine call",
    "monolith_ms": "time of the whole model in one engine",
    "chain_over_monolith": "chain divided by monolith",
    "monolith_default_ms": "the same with the engine's default options",
    "monolith_reason": "why there is no monolith",
    "DeviceProfile.device": "what the device is",
    "power_channels": "power by channel of the sensor",
    "throttled": "whether the device throttled",
    "DeviceState.throttled": "active limits",
    "throttled_by": "what throttled it",
    "before": "state before the measurement",
    "after": "state after the measurement",
    "board": "name of the board",
    "cpu": "processor",
    "cores": "number of cores",
    "cpu_quota": "cores that a container may use",
    "gpus": "names of the GPUs",
    "memory_bytes": "memory",
    "available_bytes": "free memory",
    "l4t": "version of Jetson Linux",
    "versions": "versions of the packages",
    "load_ms": "time of loading",
    "built": "whether its engine was built",
    "file_bytes": "size of the file",
    "temperatures_c": "temperatures by sensor",
    "clocks_mhz": "clocks by unit",
    "max_batch": "largest number of images per engine call",
    "engines": "engines",
    "objective": "`latency`, `throughput`, or `energy`",
    "PlanDocument.reason": "reason of the recommendation",
    "replicas": "holders of a block",
    "expected": "estimates of the placement",
    "assumptions": "what was assumed instead of measured",
    "throughput": "images per second",
    "energy_mj": "energy of an image",
    "placement": "parts by device",
    "devices": "number of devices",
    "max_skips": "blocks that an answer may skip",
    "budget_ms": "time budget of a request",
    "churn": "how devices fail and return",
    "sites": "number of sites",
    "WithoutPart.name": "name of the part",
}
"""Meanings of keys that need no docstring in their struct: ``key`` or ``Struct.key``."""


class Finding(msgspec.Struct):
    status: Literal["ok", "warn", "bad"]
    what: str
    """What was checked."""
    detail: str
    """What was found."""
    fix: str | None
    """What to do."""


class Doctor(msgspec.Struct):
    status: Literal["ok", "warn", "bad"]
    """Worst status of the findings."""
    findings: list[Finding]


class PeerFindings(msgspec.Struct):
    status: Literal["ok", "warn", "bad"]
    """Worst status of its findings."""
    reason: str | None
    """Reason why the peer did not answer."""
    findings: list[Finding]


class DoctorOfPeers(msgspec.Struct):
    status: Literal["ok", "warn", "bad"]
    """Worst status of the peers."""
    peers: dict[str, PeerFindings]


class CheckedPart(msgspec.Struct):
    part: str
    """``stem``, ``head``, or for example ``block 3``."""
    file: str
    ok: bool
    problem: str | None
    """Why the file cannot be used."""


class Verify(msgspec.Struct):
    bundle: str
    bundle_id: str
    model_id: str
    ok: bool
    """Whether all files match the manifest and load."""
    checked_with: list[str]
    parts: list[CheckedPart]
    numbers: dict[str, Any] | None
    """Differences from PyTorch with ``--run``, as ``verified`` in the manifest of the bundle."""
    account: dict[str, Any] | None


class Export(msgspec.Struct):
    bundle: str
    bundle_id: str
    model_id: str
    model: str
    method: str
    blocks: int
    """Number of blocks."""
    bands: list[list[int]]
    folded: Folded
    shared: list[list[int]]
    """Groups of blocks that share one file."""
    tokens: TokenSpec
    precision: str
    opset: int
    """Version of the ONNX operators."""
    bytes: dict[str, int]
    """Size of the file of each part."""
    account: dict[str, Any] | None
    verified: dict[str, Any]
    """Differences from PyTorch, as in the manifest."""
    seconds: float
    engines_built: int | None
    """Number of TensorRT engines; null if none were asked for or TensorRT is missing."""
    warnings: list[str]


class Change(msgspec.Struct):
    change: Literal["add", "switch", "follow", "remove"]
    """``follow``: the peer is told of the others."""
    gains: list[int | str]
    """Parts that it gets."""
    loses: list[int | str]
    """Parts that it no longer serves."""
    bytes: int
    """Size of the files that it lacks."""
    holders: dict[str, int]
    """Number of holders of each part while the peer switches."""


class Apply(msgspec.Struct):
    version: int
    """Version of ``peers.yaml`` that the change has."""
    changes: dict[str, Change]
    outage: str | None
    """Why requests may fail during the change."""
    peers: dict[str, PushResult]


class Status(msgspec.Struct):
    peers: dict[str, PeerStatus]
    unreached: dict[str, list[str]]
    """Usable peers to which a peer has no link."""


class FilePeer(msgspec.Struct):
    address: str
    blocks: list[int | str]


class FileCheck(msgspec.Struct):
    peers: dict[str, FilePeer]
    sources: list[str]
    keys: bool
    """Whether the file has keys."""
    insecure: bool
    holders: dict[str, list[str]]
    """Peers that hold each part."""


class BuiltEngine(msgspec.Struct):
    part: str
    key: str
    """Digest of what the engine depends on."""
    built: bool
    """Whether it was built now; otherwise it was in the cache."""
    bytes: int
    seconds: float


class Build(msgspec.Struct):
    provider: str | None
    max_batch: int
    engines: list[BuiltEngine]


class TraceSpan(msgspec.Struct):
    wave: int
    holder: str
    blocks: list[int | str]
    begin_ms: float
    end_ms: float
    expected_ms: float
    queue_ms: float
    engine_ms: float
    codec_ms: float
    why: str


class TraceVisit(msgspec.Struct):
    holder: str
    blocks: list[int | str]
    queue_ms: float
    engine_ms: float
    codec_ms: float
    wait_ms: float
    """Time spent waiting for tracks of other holders (policy ``parallel``)."""
    tracks: list[TraceSpan]
    """Tracks of the waves that were joined here, including the holder's own."""


class TraceLine(msgspec.Struct):
    id: int
    image: str
    label: int | None
    prediction: int | None
    latency_ms: float
    degraded: bool
    error: str | None
    order: list[tuple[int, str]] | None
    """Blocks with their holders; null if blocks ran in parallel."""
    skipped: list[int]
    attempts: int
    """Number of branches that the source started."""
    logits: list[float] | None
    waves: list[list[list[tuple[int, str]]]] | None
    """Waves of tracks of blocks with their holders, if blocks ran in parallel."""
    submitted_ms: float
    stem_ms: float
    head_ms: float
    visits: list[TraceVisit]
    why_skipped: str


DOCUMENTS: dict[str, type] = {
    "train --json": TrainingResult,
    "metrics.jsonl of a run, a line an epoch": Epoch,
    "eval --json": Evaluation,
    "export --json": Export,
    "verify --json": Verify,
    "analyze --json": Analysis,
    "publish --json": Published,
    "status --json": Status,
    "status --check --json": FileCheck,
    "doctor --json": Doctor,
    "doctor --peers --json": DoctorOfPeers,
    "apply --json": Apply,
    "predict --json, a line an image": Prediction,
    "run --json": RunSummary,
    "run --trace, a line a request": TraceLine,
    "bench --json": Bench,
    "bench --out": DeviceProfile,
    "build --json": Build,
    "plan --json": PlanDocument,
    "simulate --json": SimulationResult,
}


def reference() -> str:
    """Return the whole of ``docs/json.md``."""
    shown: set[type] = set()
    lines = [_HEAD]
    for title, kind in DOCUMENTS.items():
        lines.append(f"## {title}\n")
        waiting = [kind]
        while waiting:
            struct = waiting.pop(0)
            if struct in shown:
                continue
            shown.add(struct)
            lines.append(f'<a id="{struct.__name__.lower()}"></a>\n')
            if struct is not kind:
                lines.append(f"**{struct.__name__}**\n")
            rows, inner = _rows(struct)
            lines += ["| key | type | unit | meaning |", "| --- | --- | --- | --- |", *rows, ""]
            waiting += [one for one in inner if one not in waiting]
    return "\n".join(lines)


def structs() -> list[type]:
    """Return the structs of all documents."""
    found = list(DOCUMENTS.values())
    for struct in found:  # which grows
        found += [one for one in _rows(struct)[1] if one not in found]
    return found


def _rows(struct: type) -> tuple[list[str], list[type]]:
    """Return the rows of a struct's table, and the structs of its fields."""
    meanings, rows, inner = meanings_of(struct), [], []
    for name, hint in typing.get_type_hints(struct, include_extras=True).items():
        if name in struct.__struct_fields__:
            text = _type(hint, inner)
            meaning = meanings[name][:1].upper() + meanings[name][1:]
            rows.append(f"| `{name}` | {text} | {_unit(name, struct)} | {meaning} |")
    return rows, inner


def meanings_of(struct: type) -> dict[str, str]:
    """Return the meaning of each field: its docstring, or an entry of :data:`WORDS`; empty for one without."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct or not _own(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for field, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                found[field.target.id] = _plain(after.value.value) if is_text else ""
    hints = typing.get_type_hints(struct)
    return {
        name: found.get(name) or WORDS.get(f"{struct.__name__}.{name}") or WORDS.get(name) or _about(hints[name])
        for name in struct.__struct_fields__
    }


def _about(hint: Any) -> str:
    """Return the docstring of the struct that a type contains."""
    inner: list[type] = []
    _type(hint, inner)
    return _plain((inspect.getdoc(inner[0]) or "").partition("\n\n")[0]) if inner else ""


def _own(base: type) -> bool:
    return base.__module__ != "ls_edge.report.shown"


def _plain(text: str) -> str:
    """Return a docstring as one line of Markdown."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda role: f"`{role[1].rpartition('.')[2]}`", text)
    return " ".join(text.replace("``", "`").split()).rstrip(".").replace("|", "\\|")


def _type(hint: Any, inner: list[type]) -> str:
    """Return a type in words; collect the structs that it names."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _type(arguments[0], inner)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        known = dict.fromkeys(_type(one, inner) for one in arguments if one is not types.NoneType)
        return " or ".join(known) + (" or null" if types.NoneType in arguments else "")
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{one.value}`" for one in hint)
    if hint is TrainConfig:
        return "object"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        inner.append(hint)
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    name = getattr(origin or hint, "__name__", str(hint))
    if name in ("list", "tuple", "Sequence"):
        parts = dict.fromkeys(_type(one, inner) for one in arguments if one is not Ellipsis)
        return f"list of {' and '.join(parts)}"
    if name in ("dict", "Mapping"):
        return f"object of {_type(arguments[1], inner)}".removesuffix(" of any")
    return {
        "int": "integer",
        "float": "number",
        "str": "string",
        "bool": "boolean",
        "Any": "any",
        "NoneType": "null",
    }.get(name, name)


def _unit(name: str, struct: type) -> str:
    """Return the unit of a number, which its name tells."""
    if struct.__name__ in ("Times", "Quantiles"):
        return "ms"
    units = {"_ms": "ms", "_ms_p50": "ms", "_s": "s", "seconds": "s", "duration": "s", "bytes": "bytes", "_watts": "W",
             "_c": "°C", "_mhz": "MHz", "throughput": "1/s", "_per_second": "1/s", "power_channels": "W"}  # fmt: skip
    if name.endswith("_mj_per_image") or name == "energy_mj":
        return "mJ"
    return next((unit for end, unit in units.items() if name.endswith(end)), "")


if __name__ == "__main__":
    sys.stdout.buffer.write(reference().encode())  # UTF-8, whatever the locale
