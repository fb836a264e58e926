"""Charts of accuracy and order: what skipping costs, which block ran when, how runs compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.report.axes import chance_line, percent_axis
from ls_edge.report.data import RunData
from ls_edge.report.formatting import counted
from ls_edge.report.svg import Scale, Svg, shorten, show_percent


def accuracy_by_skips(data: RunData, width: int = 880) -> Svg | None:
    """Accuracy of the answers by how many blocks they skipped, with 95 % intervals and how many there were."""
    rows = data.summary.accuracy_by_skips
    if not rows:
        return None
    left, right, row_height, top = 86, 150 if width > 500 else 104, 34, 30
    height = top + row_height * len(rows) + 34
    x = Scale(0, 1, left, width - right)
    said = [f"{_blocks(row.skipped)}: {show_percent(row.top1)} of {row.labelled}" for row in rows]
    svg = Svg(width, height, "Accuracy against skipped blocks", "; ".join(said) + ".")
    bottom = top + row_height * len(rows)
    percent_axis(svg, x, top, bottom)
    svg.text(0, 14, "skipped", "t")
    svg.text(width, 14, "answers", "t", anchor="end")
    chance = data.summary.chance
    if chance is not None:
        chance_line(svg, x(chance), top, bottom)
    for index, row in enumerate(rows):
        y = top + row_height * (index + 0.5)
        svg.text(0, y + 4, _blocks(row.skipped), "ti")
        svg.text(width, y + 4, f"{row.answers:,}", "ti", anchor="end")
        if row.top1 is None or row.low is None or row.high is None:
            svg.text(left, y + 4, "no labels")
            continue
        svg.line(x(row.low), y, x(row.high), y, "ci")
        svg.dots([(x(row.top1), y)], "pt" if row.skipped == 0 else "pt2", 5)
        svg.text(width - right + 12, y + 4, show_percent(row.top1), "tb")
    return svg


def slot_heatmap(data: RunData, width: int = 880) -> Svg | None:
    """How often each block ran in each slot, and how often it was skipped; None where nothing ran."""
    blocks = data.blocks
    counts, skipped = slot_counts(data)
    if not counts.any():
        return None
    with_skips = bool(skipped.any())
    left, top = 62, 40
    columns = blocks + (1.35 if with_skips else 0)
    cell = min(46.0, (width - left - 4) / columns)
    height = top + cell * blocks + 8
    answers = max(len(data.answers), 1)
    in_place = float(np.trace(counts)) / max(float(counts.sum()), 1.0)
    svg = Svg(
        width,
        height,
        "Which block ran in which slot",
        f"Blocks by slots over {counted(answers, 'answer')}; {show_percent(in_place)} of the blocks ran in their "
        + (f"trained slot; skipped: {counted(int(skipped.sum()), 'block run')}." if with_skips else "trained slot."),
    )
    svg.text(left, 14, "slot: how many blocks ran before", "t")
    labels = cell >= 15
    peak = max(float(counts.max()), float(skipped.max(initial=0)), 1.0)
    for block in range(blocks):
        y = top + cell * block
        if labels or block % 4 == 0:
            svg.text(left - 10, y + cell / 2 + 4, f"block {block}" if cell > 17 else block, "ti", anchor="end")
            svg.text(left + cell * (block + 0.5), top - 8, block, "t", anchor="middle")
        row = [(left + cell * slot, counts[block, slot]) for slot in range(blocks)]
        for at, count in row:
            _cell(svg, at, y, cell, float(count) / peak, float(count) / answers, "cell", f"block {block}")
        if with_skips:
            at = left + cell * (blocks + 0.35)
            share = float(skipped[block]) / answers
            _cell(svg, at, y, cell, float(skipped[block]) / peak, share, "cellx", f"block {block} skipped")
    if with_skips:
        svg.text(left + cell * (blocks + 0.85), top - 8, "skipped" if cell > 38 else "skip", "t", anchor="middle")
    return svg


def _cell(svg: Svg, x: float, y: float, size: float, depth: float, share: float, css: str, name: str) -> None:
    svg.rect(x + 0.5, y + 0.5, size - 1, size - 1, "lane")
    if depth <= 0:
        return
    level = min(10, max(1, round(10 * depth**0.7)))
    svg.rect(x + 0.5, y + 0.5, size - 1, size - 1, f"{css} o{level}", tip=f"{name}: {show_percent(share)} of answers")
    if size >= 26:
        css = "on lit" if level >= 6 else "on ti"
        text = f"{100 * share:.0f}" if share >= 0.01 else "<1"
        svg.text(x + size / 2, y + size / 2 + 4, text, css, anchor="middle")


def slot_counts(data: RunData) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Answers in which block ran in slot, ``[blocks, blocks]``, and in which it was skipped, ``[blocks]``."""
    size = data.blocks
    counts = np.zeros((size, size), dtype=np.int64)
    skipped = np.zeros(size, dtype=np.int64)
    for record in data.answers:
        for block, slot in record.arrangement.steps():
            counts[block, slot] += 1
        for block in record.skipped:
            skipped[block] += 1
    return counts, skipped


def accuracy_comparison(runs: Sequence[tuple[str, RunSummary]], width: int = 880) -> Svg | None:
    """Accuracy of several runs with 95 % intervals, and that of a guess; runs of one model stand together."""
    rows = [(name, run) for name, run in runs if run.top1 is not None and run.top1_interval is not None]
    if not rows:
        return None
    narrow = width <= 500
    left, right, top = (0 if narrow else 270), 66, 28
    row_height = 44 if narrow else 34
    heights, y = [], float(top)
    titles = len({run.method for _, run in rows}) > 1
    last: str | None = None
    for _, run in rows:
        if titles and run.method != last:
            y += 30
            last = run.method
        heights.append(y)
        y += row_height
    svg = Svg(
        width,
        y + 34,
        "Accuracy of the runs",
        "; ".join(f"{name}: {show_percent(run.top1)}" for name, run in rows) + ".",
    )
    x = Scale(0, 1, left + 4, width - right)
    percent_axis(svg, x, top, y)
    chance = next((run.chance for _, run in rows if run.chance is not None), None)
    if chance is not None:
        chance_line(svg, x(chance), top, y)
    last = None
    methods = list(dict.fromkeys(run.method for _, run in rows))
    for (name, run), at in zip(rows, heights, strict=True):
        if titles and run.method != last:
            svg.text(0, at - 8, f"trained by {shorten(run.method or 'an unknown method', 28)}", "tb halo")
            last = run.method
        assert run.top1 is not None
        assert run.top1_interval is not None
        middle = at + row_height / 2 + (8 if narrow else 0)
        svg.text(0, at + 14 if narrow else middle + 4, shorten(name, 42), "ti halo")
        css = "bar" if methods.index(run.method) == 0 else "s-wire"
        svg.rect(x(0), middle - 5, x(run.top1) - x(0), 10, css, tip=f"{name}: {show_percent(run.top1)}")
        svg.line(x(run.top1_interval[0]), middle, x(run.top1_interval[1]), middle, "ci")
        svg.text(width, middle + 4, show_percent(run.top1), "tb", anchor="end")
    return svg


def _blocks(count: int) -> str:
    return "none" if count == 0 else counted(count, "block")
