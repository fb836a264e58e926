"""Costs and savings of a source that sends images, compared with one that runs stem and head itself.

- *links* (root only): a chain of two or three boards in network namespaces with limited links, over CURVE. The first
  board has the stem, the last one the head. Two sources answer the same JPEG files in turn, one at a time, on the same
  boards: one with the bundle, which decodes and runs stem and head itself, so that tokens cross the network once more
  at each end; and a *thin* one without a bundle. Compared are the time of
  an answer including decoding, the same without the engine calls on any process (*rest*), the bytes that all processes
  send, and the CPU time of the source's process.
- *copies*: boards that hold everything and a thin source, compared with as many independent processes that decode the
  same files and run the same engine. Boards and processes have one engine thread and are pinned to a core each.

Ratios are taken within rounds, results are medians over rounds.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from rich.console import Console

from benchmarks.common import (
    Child,
    bundle_of,
    in_turn,
    local_cluster,
    median,
    ms,
    new_table,
    ready_source,
    report_progress,
)
from benchmarks.policy_runs import PAUSE_S, pin, two_cores
from benchmarks.throughput import answering, in_rounds, rate, ratio, workers
from ls_edge.core.bundle import Bundle
from tests.faults.namespaces import NamespaceCluster, Net, reason_to_skip

MODEL = "vit_small_patch16_224"
CHAINS = {2: ("stem, 0-5", "6-11, head"), 3: ("stem, 0-3", "4-7", "8-11, head")}
QUICK_CHAIN = ("stem, 0-2", "3-5, head")
RATES_MBIT = (100, 1000)
BARRED = 2, 100
"""Boards and Mbit/s to which the bars apply."""
BARS = {"ms": 0.45, "bytes": 0.4, "source_cpu_ms": 0.2}
"""Bars of the thin source, relative to one with the bundle."""
RATIOS = ("ms", "rest_ms", "bytes", "source_cpu_ms")
BAR_COPIES = 0.97
SOURCES = ("bundle", "thin")
IN_FLIGHT = 4
"""Requests in flight for each board that holds everything."""


def run(quick: bool) -> dict[str, Any]:
    """Measure chains over limited links, and copies of the model."""
    path = bundle_of("vit_digits", {"depth": 6}) if quick else bundle_of(MODEL)
    chains = {2: QUICK_CHAIN} if quick else CHAINS
    with tempfile.TemporaryDirectory() as folder:
        files = _jpegs(Path(folder))
        reason = reason_to_skip()
        return {
            "model": Bundle.open(path).manifest.model,
            "image_bytes": round(median([file.stat().st_size for file in files])),
            "links": {"skipped": reason} if reason else _links(path, chains, Path(folder), quick=quick),
            "copies": _copies(path, files, quick=quick),
        }


def _jpegs(folder: Path) -> list[Path]:
    """Write pictures of 320 x 240 pixels with few sharp edges, like those of a camera."""
    files = []
    for index in range(8):
        draw = np.random.default_rng(index)
        coarse = PIL.Image.fromarray(draw.integers(0, 256, (30, 40, 3), np.uint8)).resize((320, 240))
        noise = draw.normal(0, 6, (240, 320, 3))
        files.append(folder / f"{index}.jpg")
        PIL.Image.fromarray(np.uint8(np.clip(np.asarray(coarse) + noise, 0, 255))).save(files[-1], quality=80)
    return files


# Links.


def _links(path: Path, chains: dict[int, Sequence[str]], files: Path, *, quick: bool) -> dict[str, Any]:
    rows = []
    for count, held in chains.items():
        names = [f"board{index}" for index in range(count)]
        placement = dict(zip(names, held, strict=True))
        with (
            Net(*names, "src") as net,
            tempfile.TemporaryDirectory() as folder,
            NamespaceCluster(net, folder, path, placement) as cluster,
            contextlib.ExitStack() as stack,
        ):
            sources = {}
            for name in SOURCES:
                arguments = [str(cluster.path), str(cluster.source_key), str(files), str(path)]
                with net.inside("src"):  # the process inherits the namespace
                    sources[name] = stack.enter_context(Child(__name__, *arguments[: 4 if name == "bundle" else 3]))
                sources[name].read()
            for mbit in RATES_MBIT[: 1 if quick else None]:
                report_progress(f"  {count} boards, {mbit} Mbit/s")
                net.rate(mbit)
                found = _measured(net, sources, 3 if quick else 15, 3 if quick else 6)
                net.rate(None)
                bars = BARS if (count, mbit) == BARRED else {}
                holds = {key: found["ratio"][key] <= bar for key, bar in bars.items()}
                rows.append({"boards": count, "mbit": mbit, **found, "bars": bars, "holds": holds})
    return {"rows": rows}


def _measured(net: Net, sources: dict[str, Child], rounds: int, burst: int) -> dict[str, Any]:
    """Let each source answer ``burst`` images in each round; the first round does not count."""
    replies: dict[str, list[dict[str, Any]]] = {name: [] for name in sources}
    for _, name in in_turn(tuple(sources), rounds):
        before = _sent(net)
        sources[name].send(burst)
        reply = sources[name].read()
        replies[name].append({**reply, "bytes": (_sent(net) - before) / burst})
    each = {
        key: {name: [median(reply[key]) for reply in found[1:]] for name, found in replies.items()} for key in RATIOS
    }
    return {
        "sources": {
            name: {
                "ms": ms([value / 1e3 for reply in found[1:] for value in reply["ms"]]),
                **{key: round(median(each[key][name]), 2) for key in RATIOS[1:]},
            }
            for name, found in replies.items()
        },
        "rounds": rounds - 1,
        "ratio": {key: ratio(each[key]["bundle"], each[key]["thin"]) for key in RATIOS},
    }


def _sent(net: Net) -> int:
    """Return the bytes that all processes have sent."""
    return sum(map(net.sent_bytes, net.names))


def main() -> None:
    """Answer as many images as each line of standard input says; arguments: ``PEERS KEY FILES [BUNDLE]``."""
    peers, key, folder, *bundle = sys.argv[1:]
    files = sorted(Path(folder).glob("*.jpg"))
    with ready_source(Path(peers), Path(bundle[0]) if bundle else None, policy="sequential", secret_key=key) as source:
        print("{}", flush=True)
        for line in sys.stdin:
            seconds, rest, cpu = [], [], time.process_time()
            for index in range(int(line)):
                time.sleep(PAUSE_S)
                started = time.perf_counter()
                record = source.submit(files[index % len(files)]).result().record
                seconds.append(time.perf_counter() - started)
                engines_us = record.stem_us + record.head_us + sum(visit.engine_us for visit in record.visits)
                rest.append(seconds[-1] - engines_us / 1e6)
            cpu = (time.process_time() - cpu) / len(seconds)
            reply = {
                "ms": [1e3 * value for value in seconds],
                "rest_ms": [1e3 * value for value in rest],
                "source_cpu_ms": 1e3 * cpu,
            }
            print(json.dumps(reply), flush=True)


# Copies.


def _copies(path: Path, files: Sequence[Path], *, quick: bool) -> dict[str, Any]:
    report_progress("  copies")
    cores = two_cores()
    count, rounds = (12, 2) if quick else (80, 7)
    names = ("ann", "ben")
    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(local_cluster(path, dict.fromkeys(names, "all")))
        source = stack.enter_context(ready_source(peers.path, None))
        arguments = ("files", str(path), str(files[0].parent))
        alone = [stack.enter_context(Child("benchmarks.workers", *arguments)) for _ in names]
        for child in alone:
            child.read()
        pin((process.pid for process in peers.processes.values()), cores)
        pin((child.process.pid for child in alone), cores)
        stretches = {
            "boards": answering(source, files, IN_FLIGHT * len(names)),
            "processes": workers(alone),
        }
        seconds = in_rounds(stretches, rounds, count)
    over = ratio(seconds["boards"], seconds["processes"])
    return {
        "boards": len(names), "images": count, "rounds": rounds,
        "images_per_s": {name: rate(values, count) for name, values in seconds.items()},
        "over_processes": over, "bar": BAR_COPIES, "holds": over >= BAR_COPIES,
    }  # fmt: skip


def show(document: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    links = document["links"]
    if "skipped" in links:
        console.print(f"links not measured: {links['skipped']}", highlight=False)
    else:
        columns = ("boards", "Mbit/s", "source", "p50, ms (p10 to p90)", "rest, ms", "KB", "CPU of the source, ms")
        table = new_table(f"{document['model']}, JPEG files of {document['image_bytes'] / 1e3:.0f} KB", columns)
        for row in links["rows"]:
            for name, of in row["sources"].items():
                times = f"{of['ms']['p50']:.1f} ({of['ms']['p10']:.1f} to {of['ms']['p90']:.1f})"
                rest = (f"{of['rest_ms']:.1f}", f"{of['bytes'] / 1e3:.0f}", f"{of['source_cpu_ms']:.2f}")
                table.add_row(str(row["boards"]), str(row["mbit"]), name, times, *rest)
            table.add_row("", "", "thin over bundle", *(_ratio(row, key) for key in RATIOS))
        console.print(table)
    copies = document["copies"]
    rates = ", ".join(f"{name} {value:.1f} images/s" for name, value in copies["images_per_s"].items())
    console.print(
        f"{copies['boards']} boards that hold everything over as many independent processes: "
        f"{copies['over_processes']:.3f}, bar {copies['bar']}: {'holds' if copies['holds'] else 'missed'} ({rates})",
        highlight=False,
    )


def _ratio(row: dict[str, Any], key: str) -> str:
    verdict = f", bar {row['bars'][key]}: {'holds' if row['holds'][key] else 'missed'}" if key in row["bars"] else ""
    return f"{row['ratio'][key]:.3f}{verdict}"


if __name__ == "__main__":
    main()
