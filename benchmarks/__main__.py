"""``python -m benchmarks``: run benchmarks by name and print their tables."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import ONE_THREAD
from ls_edge.core.errors import LsEdgeError
from ls_edge.core.files import check_writable, write_output

USUAL = ("hop", "throughput", "recovery", "tracks")
BY_NAME = ("chain", "train", "idle", "serve", "apply", "memory")
"""Benchmarks that run by name only: they take long or need a GPU."""


def main(argv: list[str] | None = None) -> int:
    """Run the named benchmarks; return 0 even if a bar was missed, which the tables show."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(USUAL)} (the default), {', '.join(BY_NAME)}",
    )
    parser.add_argument("--quick", action="store_true", help="tiny runs that only check that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="recovery: also measure ipyparallel and Dask, installed from the package index",
    )
    asked = parser.parse_args(argv)
    unknown = [name for name in asked.names if name not in (*USUAL, *BY_NAME)]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join((*USUAL, *BY_NAME))}")
    os.environ.update(ONE_THREAD)  # read when numpy is loaded
    if asked.json is not None:
        try:
            check_writable(asked.json)
        except LsEdgeError as error:
            parser.error(str(error))

    from rich.console import Console

    from benchmarks.common import load, machine, report_progress

    console = Console()
    document: dict[str, Any] = {"machine": machine(), "quick": asked.quick, "benchmarks": {}}
    m = document["machine"]
    console.print(f"{m['cpu']}, {m['cores']} cores, load {m['load'][0]}; {m['libraries']}", highlight=False)
    code = 0
    for name in asked.names or USUAL:
        report_progress(f"{name} ...")
        started, before = time.monotonic(), load()
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            results = module.run(asked.quick, **({"compare": asked.compare} if name == "recovery" else {}))
        except (LsEdgeError, ModuleNotFoundError) as error:
            print(f"benchmarks: {name}: {error}", file=sys.stderr)
            code = 1
            continue
        results = {**results, "load": {"before": before, "after": load()}, "seconds": round(time.monotonic() - started)}
        document["benchmarks"][name] = results
        if hasattr(module, "show"):
            module.show(results, console)
        else:
            console.print_json(data=results)
        console.print(f"{name}: load {before[0]} before, {load()[0]} after", highlight=False)
    if asked.json is not None:
        write_output(asked.json, json.dumps(document, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
