"""Accuracy of training methods as one picture: by order, and by how many blocks are kept.

The counterparts of Figure 1 (b) and (c) of arXiv 2407.04513, for any set of evaluations. On the left each method's
accuracy in trained order and its mean in random order, whose line reaches from the 5th percentile of the orders to a
standard deviation above the mean. On the right the accuracy that remains with fewer blocks, solid in random
order and dashed in trained order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ls_edge.errors import UsageError
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.report.axes import percent_axis
from ls_edge.report.formatting import distinct_names
from ls_edge.report.html import check_whole, write_whole
from ls_edge.report.svg import Scale, Svg, shorten, show_percent
from ls_edge.report.theme import CHART, VARIABLES

_COLOURS = ("engine", "wire", "head", "codec", "bad", "soft", "stem", "other")
_STYLE = "".join(
    f".k{index}{{fill:none;stroke:var(--{name});stroke-width:2;stroke-linejoin:round}}"
    f".d{index}{{fill:none;stroke:var(--{name});stroke-width:1.4;stroke-dasharray:4 3}}"
    f".p{index}{{fill:var(--{name});stroke:var(--bg);stroke-width:1.5}}"
    f".o{index}x{{fill:var(--bg);stroke:var(--{name});stroke-width:2}}"
    for index, name in enumerate(_COLOURS)
)
SHORT = 17
"""Characters of a name that there is room for."""
WIDTH, LEFT, ROW, TOP, HEIGHT = 980, 450, 42, 58, 330


def write_figure(path: str | Path, evaluations: Sequence[Evaluation]) -> None:
    """Write the picture as an SVG file; raises :class:`UsageError` for more evaluations than colours, and none."""
    check_figure(path, len(evaluations))
    drawing = figure(evaluations)
    write_whole(path, drawing.render("picture", style=VARIABLES + CHART + _STYLE, margin=20) + "\n")


def check_figure(path: str | Path, count: int) -> None:
    """Raise :class:`UsageError` where a picture of ``count`` evaluations cannot be drawn or ``path`` is a folder."""
    if not 1 <= count <= len(_COLOURS):
        raise UsageError(f"a figure holds 1 to {len(_COLOURS)} runs or folders of runs, not {count}")
    check_whole(path)


def figure(evaluations: Sequence[Evaluation]) -> Svg:
    """Both charts side by side."""
    names = _names(evaluations)
    said = "; ".join(
        f"{name}: {show_percent(item.sequential.top1)} in trained order, {show_percent(item.arbitrary.top1_mean)} in "
        "random order"
        for name, item in zip(names, evaluations, strict=True)
    )
    height = max(HEIGHT, TOP + ROW * len(evaluations) + 34)
    svg = Svg(WIDTH, height, "Accuracy by order and by blocks kept", said + ".")
    _by_order(svg, evaluations, names)
    _by_kept(svg, evaluations, names, height)
    return svg


def _names(evaluations: Sequence[Evaluation]) -> list[str]:
    """The methods; where two are of one, the names of the evaluations, no two alike even when shortened."""
    methods = [str(item.settings.get("method", "")) for item in evaluations]
    if len(set(methods)) == len(methods):
        return methods
    names = distinct_names([item.name or str(item.settings.get("of", "")) for item in evaluations])
    short = {shorten(name, SHORT) for name in names}
    return names if len(short) == len(names) else [f"{number} {name}" for number, name in enumerate(names, 1)]


def _by_order(svg: Svg, evaluations: Sequence[Evaluation], names: Sequence[str]) -> None:
    svg.text(0, 14, "Accuracy by order of the blocks", "tb")
    svg.dots([(6, 32)], "o5x", 4)
    svg.text(16, 36, "trained order")
    svg.dots([(112, 32)], "p5", 5)
    svg.text(124, 36, "random order: mean, 5th percentile, deviation")
    x = Scale(0, 1, 118, LEFT - 14)
    bottom = TOP + ROW * len(evaluations)
    percent_axis(svg, x, TOP, bottom)
    for index, (name, item) in enumerate(zip(names, evaluations, strict=True)):
        y = TOP + ROW * (index + 0.5)
        a = item.arbitrary
        svg.text(0, y + 4, shorten(name, SHORT), "ti")
        svg.line(x(a.top1_p5), y, x(min(1.0, a.top1_mean + a.top1_std)), y, f"k{index}")
        svg.dots([(x(item.sequential.top1), y)], f"o{index}x", 4)
        svg.dots([(x(a.top1_mean), y)], f"p{index}", 5)
        right = a.top1_mean > 0.86
        svg.text(
            x(a.top1_mean), y - 9, show_percent(a.top1_mean), "t halo", anchor="end" if right else "middle"
        )  # fmt: skip


def _by_kept(svg: Svg, evaluations: Sequence[Evaluation], names: Sequence[str], height: float) -> None:
    left, right, bottom = LEFT + 60, WIDTH - 130, height - 40
    svg.text(left - 34, 14, "Accuracy with fewer blocks", "tb")
    svg.line(left - 34, 32, left - 10, 32, "k5")
    svg.text(left - 4, 36, "random order")
    svg.line(left + 86, 32, left + 110, 32, "d5")
    svg.text(left + 116, 36, "trained order")
    y = Scale(0, 1, bottom, TOP)
    for share in (0, 0.25, 0.5, 0.75, 1):
        svg.line(left, y(share), right, y(share), "gr")
        svg.text(left - 8, y(share) + 4, f"{100 * share:.0f} %", anchor="end")
    depths = [int(item.settings.get("blocks", 1)) for item in evaluations]
    x = Scale(0, max(depths), left, right)
    ends: list[tuple[float, int]] = []
    shown: set[int] = set()
    for index, (item, depth) in enumerate(zip(evaluations, depths, strict=True)):
        kept = sorted((int(count), value) for count, value in item.kept.items() if int(count) < depth)
        shuffled = [(count, value.arbitrary) for count, value in kept] + [(depth, item.arbitrary.top1_mean)]
        ordered = [(count, value.sequential) for count, value in kept] + [(depth, item.sequential.top1)]
        svg.polyline([(x(count), y(value)) for count, value in ordered], f"d{index}")
        svg.polyline([(x(count), y(value)) for count, value in shuffled], f"k{index}")
        svg.dots([(x(count), y(value)) for count, value in shuffled], f"p{index}", 4)
        ends.append((y(shuffled[-1][1]), index))
        shown.update(count for count, _ in shuffled)
    for count in sorted(shown):
        svg.text(x(count), bottom + 18, count, anchor="middle")
    svg.text((left + right) / 2, bottom + 36, "blocks kept", anchor="middle")
    at = -1e9
    for wanted, index in sorted(ends):
        at = max(wanted, at + 15)
        svg.text(right + 24, at + 4, shorten(names[index], SHORT), "ti")
        svg.dots([(right + 15, at)], f"p{index}", 3.5)
