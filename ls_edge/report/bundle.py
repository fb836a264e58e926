"""Description of a bundle, for terminals."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.console import Console

from ls_edge.core.text import byte_size, counted, format_bands, short_id
from ls_edge.device.hardware import cpu_features, has_nvidia
from ls_edge.report.terminal import PlainTable, print_table

_FAST_INT8 = ("amx_int8", "avx512_vnni", "avx_vnni", "i8mm", "asimddp")
"""CPU instructions that multiply int8 faster than float32."""


def print_export(summary: dict[str, Any], console: Console) -> None:
    """Print the document of ``export --json``."""
    sizes, verified = summary["bytes"], summary["verified"]
    blocks = [size for name, size in sizes.items() if name.startswith("block")]
    facts = {
        "bundle": f"{summary['bundle']}  ({short_id(summary['bundle_id'])})",
        "model": f"{summary['model']}, {summary['method']}, {summary['precision']}, opset {summary['opset']}",
        "tokens": "{count} x {dim} {dtype}".format(**summary["tokens"]),
        "files": f"stem {byte_size(sizes['stem'])}, {_blocks(summary, len(blocks))} of {byte_size(max(blocks))}, "
        f"head {byte_size(sizes['head'])}" + (f", whole {byte_size(sizes['whole'])}" if "whole" in sizes else ""),
        "bands": _bands(summary),
        "verified": f"{shown(verified)}, each part and all together in trained and shuffled orders, "
        f"batches of {', '.join(map(str, verified['batches']))}, {verified['images']} images",
        "this machine": speed_here(summary["precision"], has_gpu=has_nvidia(), features=cpu_features()),
        "time": f"{summary['seconds']:.1f} s",
    }
    print_table(PlainTable.of_facts((name, text) for name, text in facts.items() if text), console)


def speed_here(precision: str, *, has_gpu: bool, features: Collection[str]) -> str:
    """Describe how well a precision suits this machine, and whether another one would be faster."""
    fast_int8 = next((name for name in _FAST_INT8 if name in features), "")
    for_cpu = f"int8 is faster on the CPU ({fast_int8})" if fast_int8 else "no precision is faster than fp32 on the CPU"
    if precision == "fp16":
        return "fast on the GPU" if has_gpu else f"fp16 is not faster than fp32; {for_cpu}"
    if precision == "int8":
        slow = "the CPU has neither VNNI nor AMX; compare it with fp32 using ls-edge bench"
        return f"fast on the CPU ({fast_int8})" if fast_int8 else slow
    return f"{'fp16 is faster on the GPU; ' if has_gpu else ''}{for_cpu}"


def _blocks(summary: dict[str, Any], count: int) -> str:
    files = count - sum(len(group) - 1 for group in summary["shared"])
    return counted(count, "block") if files == count else f"{counted(count, 'block')} in {counted(files, 'file')}"


def _bands(summary: dict[str, Any]) -> str:
    bands, folded = summary["bands"], summary["folded"]
    found = [f"{format_bands(bands)} (blocks may be reordered within each)"] if len(bands) > 1 else []
    found += [f"{counted(folded[part], 'block')} folded into the {part}" for part in ("stem", "head") if folded[part]]
    return ", ".join(found)


def shown(verified: dict[str, Any]) -> str:
    """Describe the results in ``verified`` of a manifest."""
    if verified["measure"] == "cosine":
        text = f"cosine {verified['min_cosine']:.5f} with {verified['reference']} (tolerance {verified['tolerance']:g})"
        text += f", the same class for {verified['agreement']:.1%} of the images"
    else:
        text = (
            f"within {verified['max_rel_error']:.1e} of {verified['reference']} (tolerance {verified['tolerance']:.0e})"
        )
    if verified["top1"] is not None:
        text += ", top-1 {bundle:.4f} against {pytorch:.4f} on {images} images".format(**verified["top1"])
    return text
