"""Pictures of the run: which peer ran which block when.

Spans come from :mod:`ls_edge.report.spans`, on the source's clock, so the parts of a request are exact and
its place among others is as good as the equal shares of its wire time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ls_edge.evaluation.run_summary import Floats
from ls_edge.records import PeerState
from ls_edge.report.axes import time_axis
from ls_edge.report.data import Engines, RunData
from ls_edge.report.formatting import block_ranges, counted
from ls_edge.report.svg import Scale, Svg, shorten, show_ms, show_percent, text_width
from ls_edge.report.theme import block_colour, ink_on

MOST_LANES = 24


class Window(NamedTuple):
    """A stretch of the run, in milliseconds since its start."""

    start: float
    end: float


def utilisation(data: RunData, width: int = 880, window: Window | None = None) -> Svg | None:
    """A lane a peer over the whole run: the share of time that its engine ran, coloured by block.

    ``window`` is framed: the stretch that :func:`served` shows.
    """
    engines = data.engines
    lanes = _lanes(data)
    if not len(engines) or not lanes:
        return None
    left, top, lane_height, gap = _left(width), 8, 46, 12
    height = top + len(lanes) * (lane_height + gap) + 30
    x = Scale(data.start_ms, data.end_ms, left, width - 14)
    bins = int(max(20, min((width - left) / 3, 9000 / (len(lanes) * max(data.blocks, 1)))))
    edges = np.linspace(data.start_ms, data.end_ms, bins + 1)
    svg = Svg(
        width,
        height,
        "Who served what over the run",
        "; ".join(_lane_says(data, data.lanes[lane]) for lane in lanes) + ".",
    )
    for row, lane in enumerate(lanes):
        y = top + row * (lane_height + gap)
        name = data.lanes[lane]
        svg.rect(left, y, width - 14 - left, lane_height, "lane")
        _away(svg, data, name, x, y, lane_height)
        _lane_label(svg, name, show_percent(data.summary.peers[name].busy) + " busy", y, lane_height, width)
        base = np.zeros(bins)
        for block in range(data.blocks):
            chosen = (engines.lane == lane) & (engines.block == block)
            if not chosen.any():
                continue
            share = coverage(engines.start[chosen], engines.end[chosen], edges)
            share = np.minimum(share, 1.0 - base)
            bars = [
                (x(edges[i]), y + lane_height * (1 - base[i] - part), x(edges[i + 1]) - x(edges[i]), lane_height * part)
                for i, part in enumerate(share)
                if part > 0.004
            ]
            svg.boxes(bars, "b", fill=block_colour(block, data.blocks))
            base = base + share
    bottom = top + len(lanes) * (lane_height + gap) - gap + 6
    if window is not None:
        svg.rect(x(window.start), top - 4, max(x(window.end) - x(window.start), 3), bottom - top + 4, "win")
    time_axis(svg, Scale(data.start_ms / 1000, data.end_ms / 1000, x.start, x.end), bottom, "s", width)
    return svg


def coverage(start: Floats, end: Floats, edges: Floats) -> Floats:
    """Share of each bin between ``edges [n+1]`` that the spans ``start``..``end`` cover, ``[n]``; overlaps add up."""

    def until(times: Floats) -> Floats:
        ordered = np.sort(times)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        count = np.searchsorted(ordered, edges)
        return np.asarray(edges * count - sums[count])

    return np.maximum(np.diff(until(start) - until(end)) / np.diff(edges), 0.0)


def pick_window(data: RunData, most: int) -> Window:
    """The stretch around the first loss of a peer (else the middle) with at most ``most`` runs of a block in it."""
    engines = data.engines
    whole = Window(data.start_ms, data.end_ms)
    if len(engines) <= most:
        return whole
    anchor = next((e.at_us / 1e3 for e in data.changes if e.state == PeerState.LOST), (data.start_ms + data.end_ms) / 2)
    starts = np.sort(engines.start)
    low, high = 0.0, data.end_ms - data.start_ms
    for _ in range(40):
        middle = (low + high) / 2
        begin, end = np.searchsorted(starts, (anchor - middle / 3, anchor + middle * 2 / 3))
        low, high = (middle, high) if end - begin <= most else (low, middle)
    return Window(max(whole.start, anchor - low / 3), min(whole.end, anchor + low * 2 / 3))


def served(data: RunData, width: int = 880, window: Window | None = None) -> Svg | None:
    """A lane a peer: every block that it ran inside ``window``, with its number where there is room."""
    engines = data.engines
    lanes = _lanes(data)
    if not len(engines) or not lanes:
        return None
    window = window or pick_window(data, width // 6)
    left, top, row_height, gap = _left(width), 26, 22, 14
    inside = (engines.end > window.start) & (engines.start < window.end)
    packed = {lane: _pack(engines, np.flatnonzero(inside & (engines.lane == lane))) for lane in lanes}
    depth = {lane: min(4, max((row for _, row in packed[lane]), default=0) + 1) for lane in lanes}
    height = top + sum(max(depth[lane] * row_height, 34) + gap for lane in lanes) + 30
    x = Scale(window.start, window.end, left, width - 14)
    svg = Svg(
        width,
        height,
        "Who ran which block when",
        f"From {window.start / 1000:.3f} s to {window.end / 1000:.3f} s: "
        + ", ".join(f"{data.lanes[lane]} ran {counted(len(packed[lane]), 'block')}" for lane in lanes)
        + ".",
    )
    svg.text(left, 14, f"from {window.start / 1000:.3f} s, for {show_ms(window.end - window.start)}")
    y = float(top)
    for lane in lanes:
        name = data.lanes[lane]
        lane_height = max(depth[lane] * row_height, 34)
        svg.rect(left, y, width - 14 - left, lane_height, "lane")
        _away(svg, data, name, x, y, lane_height)
        blocks = block_ranges(data.summary.peers[name].blocks)
        blocks = f"blocks {blocks}" if len(data.summary.peers[name].blocks) < 6 and width > 500 else blocks
        _lane_label(svg, name, blocks, y, lane_height, width)
        each = lane_height / depth[lane]
        for index, row in packed[lane]:
            _block(svg, data, engines, int(index), x, y + each * min(row, 3), each)
        y += lane_height + gap
    short = window.end - window.start < 2000
    low, high = (0.0, window.end - window.start) if short else (window.start / 1000, window.end / 1000)
    time_axis(svg, Scale(low, high, x.start, x.end), y - gap + 6, "ms" if short else "s", width)
    return svg


def _block(svg: Svg, data: RunData, engines: Engines, index: int, x: Scale, y: float, height: float) -> None:
    block = int(engines.block[index])
    colour = block_colour(block, data.blocks)
    begin, end = x(float(engines.start[index])), x(float(engines.end[index]))
    record = data.answers[int(engines.request[index])]
    tip = f"block {block}, request {record.id}, {show_ms(float(engines.end[index] - engines.start[index]))}"
    svg.rect(begin, y + 1, max(end - begin, 0.9), height - 2, edge(end - begin), fill=colour, tip=tip)
    if end - begin >= text_width(str(block), 10.5) + 3:
        svg.text((begin + end) / 2, y + height / 2 + 4, block, ink_on(colour), anchor="middle")


def _pack(engines: Engines, chosen: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int]]:
    """Rows for spans that overlap; a visit's blocks, which touch, stay in one row."""
    free: list[float] = []
    placed = []
    for index in chosen[np.argsort(engines.start[chosen], kind="stable")]:
        start = float(engines.start[index]) + 1e-3
        row = next((i for i, until in enumerate(free) if until <= start), len(free))
        if row == len(free):
            free.append(0.0)
        free[row] = float(engines.end[index])
        placed.append((int(index), row))
    return placed


def _lanes(data: RunData) -> list[int]:
    """Lanes that are drawn: all, or those of the busiest peers."""
    count = len(data.lanes)
    if count <= MOST_LANES:
        return list(range(count))
    busiest = sorted(range(count), key=lambda lane: -data.summary.peers[data.lanes[lane]].busy)[:MOST_LANES]
    return sorted(busiest)


def _lane_says(data: RunData, name: str) -> str:
    peer = data.summary.peers[name]
    return f"{name}: busy {show_percent(peer.busy)}, {counted(peer.requests, 'answer')}"


def _left(width: int) -> int:
    return 150 if width > 500 else 84


def edge(width: float) -> str:
    """An outline where there is room for one; thin bars would drown in it."""
    return "edge" if width > 4 else "b"


def _lane_label(svg: Svg, name: str, below: str, y: float, height: float, width: int) -> None:
    room = 19 if width > 500 else 10
    below = below if len(below) <= room + 3 else below[: room + 1] + "…"
    svg.text(0, y + height / 2 - 3, shorten(name, room), "tb")
    svg.text(0, y + height / 2 + 12, below, "ts")


def _away(svg: Svg, data: RunData, name: str, x: Scale, y: float, height: float) -> None:
    for spell in data.away:
        if spell.peer == name and spell.end > x.low and spell.start < x.high:
            begin, end = x(spell.start), x(spell.end)
            tip = f"{name} lost at {spell.start / 1000:.2f} s for {show_ms(spell.end - spell.start)}"
            svg.rect(begin, y, max(end - begin, 1), height, "gone", tip=tip)
            if end - begin > 34:
                svg.text((begin + end) / 2, y + height / 2 + 4, "lost", "tx", anchor="middle")
