"""Memory of a model from its start to peers that serve it, and the CPU time of its export.

Each command and each peer is a process of its own. Resident memory and its peak are those that Linux reports
(``VmRSS`` and ``VmHWM`` in ``/proc/PID/status``). The weights are those of the model for a command, and the files of
the blocks for a peer. A peer has answered nothing yet, but is warm.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import BenchmarkError, local_cluster, new_table, report_progress
from ls_edge.core.bundle import Bundle

MODELS = ("vit_base_patch16_224", "vit_large_patch16_224")
PRECISIONS = ("fp32", "fp16", "int8")
MIB = 2**20


def run(quick: bool) -> dict[str, Any]:
    """Measure each model in each precision."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in ("vit_digits",) if quick else MODELS:
            made, again = folder / model, folder / f"{model}-again"
            train = ("train", "--data", "digits", "--epochs", 0, "--device", "cpu", "--out")
            rows.append({"model": model, "what": "train --epochs 0", **_command(*train, made, "--model", model)})
            rows.append({"model": model, "what": "train --init", **_command(*train, again, "--init", made)})
            weights = (made / "model.safetensors").stat().st_size
            for precision in ("fp32",) if quick else PRECISIONS:
                out = folder / f"{model}-{precision}"
                found = _command("export", made, "--out", out, "--per-block", "--precision", precision)
                rows.append({"model": model, "what": f"export, {precision}", **found})
                for row in rows:
                    row.setdefault("weights_mib", weights / MIB)
                rows += _peers(Bundle.open(out), f"{model}", precision)
    return {"rows": [{key: round(v, 1) if isinstance(v, float) else v for key, v in row.items()} for row in rows]}


def _command(*arguments: object) -> dict[str, float]:
    """Return the peak memory and the CPU time of a command of ``ls-edge``."""
    words = [*map(str, arguments)]
    report_progress(" ".join(["  ls-edge", *words]))
    process = subprocess.Popen([sys.executable, "-m", "ls_edge", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BenchmarkError(f"ls-edge {words[0]} ended with {process.returncode}; see above")
    return {"peak_mib": usage.ru_maxrss / 1024, "cpu_s": usage.ru_utime + usage.ru_stime}


def _peers(bundle: Bundle, model: str, precision: str) -> list[dict[str, Any]]:
    """Measure a peer with a quarter of the blocks, and one with all of them."""
    rows = []
    for what, count in (("a quarter", bundle.num_blocks // 4), ("all", bundle.num_blocks)):
        with local_cluster(bundle.folder, {"peer": list(range(count))}) as peers:
            status = Path(f"/proc/{peers.processes['peer'].pid}/status").read_text(encoding="utf-8")
            resident, peak = (int(re.findall(rf"{key}:\s+(\d+)", status)[0]) / 1024 for key in ("VmRSS", "VmHWM"))
        weights = sum(bundle.part(f"block {index}").bytes for index in range(count)) / MIB
        found = {"weights_mib": weights, "resident_mib": resident, "peak_mib": peak}
        rows.append({"model": model, "what": f"peer with {what}, {precision}", **found})
    return rows


def show(document: dict[str, Any], console: Console) -> None:
    """Print the table."""
    table = new_table(
        "memory", ("", "weights, MiB", "resident", "peak", "peak / weights", "CPU, s"),
    )  # fmt: skip
    for row in document["rows"]:
        values = (row["weights_mib"], row.get("resident_mib"), row["peak_mib"], row.get("cpu_s"))
        weights, resident, peak, cpu = ("" if value is None else f"{value:,.0f}" for value in values)
        ratio = f"{row['peak_mib'] / row['weights_mib']:.2f}"
        table.add_row(f"{row['model']}: {row['what']}", weights, resident, peak, ratio, cpu)
    console.print(table)
