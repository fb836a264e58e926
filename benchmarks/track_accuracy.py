"""Accuracy of a trained bundle in tracks, compared with plain orders; for ``tracks``.

All policies answer the same images, in turn. If a hop costs more than it saves, ``parallel`` uses a single track, and
its accuracy says nothing about tracks. So the arrangements that the planner makes for two equal devices without network
delay are also computed, in one process. Both are compared with random orders, which the model was trained for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import BenchmarkError, new_table, report_progress
from benchmarks.policy_runs import PEERS, cells, open_local_runs, parallel, results_of, top1
from ls_edge.core.arrangement import Arrangement
from ls_edge.core.bundle import Bundle
from ls_edge.core.order_costs import read_order_costs
from ls_edge.data.datasets import ImageSet, image_warnings, match_classes, open_data
from ls_edge.data.preprocess import Preprocessor, iterate
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.protocol.messages import MINOR, Hello, Itinerary, State
from ls_edge.runtime.routing.policies.wave_planner import plan_wave
from ls_edge.runtime.routing.state.candidates import LocalNode, Model
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.neighbors import Neighbors

IMAGES = 2000
"""Largest number of images of a data set to answer."""
BAR = 0.02
"""Largest loss of accuracy in tracks, compared with random orders."""


def run(path: Path, data: str, cores: Sequence[int], waves: Sequence[int], *, quick: bool) -> dict[str, Any]:
    """Measure top-1 by policy and waves, the share of answers that ran in tracks, and their time."""
    report_progress(f"  {path.name} on {data}")
    bundle = Bundle.open(path)
    images = open_data(data, "eval")
    for warning in image_warnings(images, bundle.manifest.trained_on):
        report_progress(f"  warning: {warning}")
    images = match_classes(images.take(min(20 if quick else IMAGES, len(images))), bundle.manifest.classes)
    if not images.classes:
        raise BenchmarkError(f"{data} has no labels, which accuracy needs; name a folder of class folders or a tar")
    settings = {"nearest": ("nearest", {}), "random": ("random", {}), **parallel(waves)}
    with contextlib.ExitStack() as stack:
        runs = open_local_runs(stack, path, cores, settings)
        for index, image, array in iterate(images, next(iter(runs.values())).source.preprocess):
            for name in list(runs) if index % 2 == 0 else reversed(runs):
                runs[name].ask(array, image.label)
    results = results_of(runs, len(images) // 10)
    for name, policy_run in runs.items():
        results[name]["top1"] = top1([(r.prediction, r.label) for r in policy_run.records])
    least = results["random"]["top1"] - BAR
    equal = _in_one_process(bundle, images, waves)
    return {
        "bundle": path.name, "model": bundle.manifest.model, "method": bundle.manifest.method, "data": data,
        "images": len(images), "policy_runs": results, "two_equal_devices": equal, "bar": round(least, 4),
        "holds": {name: results[name]["top1"] >= least and equal[name]["top1"] >= least for name in equal},
    }  # fmt: skip


def _in_one_process(bundle: Bundle, images: ImageSet, waves: Sequence[int]) -> dict[str, Any]:
    """Compute top-1 of the planner's arrangements for two equal devices without network delay."""
    chosen = {name: split(bundle, number) for name, number in zip(parallel(waves), waves, strict=True)}
    found: dict[str, list[tuple[int | None, int | None]]] = {name: [] for name in chosen}
    with Pipeline.open(bundle, threads=1) as chain:
        for _, image, array in iterate(images, Preprocessor(bundle.manifest.image)):
            for name, arrangement in chosen.items():
                found[name].append((int(np.argmax(chain.forward(array[None], arrangement)[0])), image.label))
    return {name: {"arrangement": chosen[name].to_json(), "top1": top1(found[name])} for name in chosen}


def split(bundle: Bundle, waves: int) -> Arrangement:
    """Return the planner's waves for two equal devices with all blocks and no network delay."""
    blocks = frozenset(range(bundle.num_blocks))
    costs = read_order_costs(bundle.manifest.order_costs, bundle.num_blocks)
    own = LocalNode(blocks, 0, 1000, Model(costs=costs))
    neighbors = Neighbors(PEERS[0], Limits())
    other = neighbors.add(Hello(PEERS[1], "peer", 0, MINOR, "", "", tuple(blocks)))
    neighbors.update(other.name, State(True, False, False, credits=1, queue=0, calls=0, block_us=1000))
    itinerary = Itinerary("source", "parallel", tuple(sorted(blocks)), 0, waves_wanted=waves)
    while itinerary.remaining:
        tracks, _ = plan_wave(itinerary, PEERS[0], own, [other])
        itinerary = itinerary.joined(tuple(tuple((block, t.holder) for block in t.blocks) for t in tracks))
    return Arrangement(tuple(tuple(tuple(b for b, _ in track) for track in wave) for wave in itinerary.waves))


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    table = new_table(
        f"{document['bundle']} on {document['images']} images of {document['data']}",
        ("", "p50, ms (p10 to p90)", "ratio", "tracks of blocks", "top-1", "two equal devices", "bar"),
        left=("", "tracks of blocks"),
    )
    for name, policy_run in document["policy_runs"].items():
        equal, holds = document["two_equal_devices"].get(name), document["holds"].get(name)
        table.add_row(
            name, *cells(policy_run)[:3], f"{policy_run['top1']:.2%}", f"{equal['top1']:.2%}" if equal else "",
            {True: "holds", False: "missed"}.get(holds, ""),
        )  # fmt: skip
    console.print(table, f"bar: top-1 of random, less {BAR:.0%}: {document['bar']:.2%}", highlight=False)
