"""The timeline of one request as text: a line for each holder, what it ran when, and what the answer waited for.

Each character is the stage that took most of its stretch of time. Heavy ones are on the critical path, so it can be
followed without colour; block numbers stand in a bar where there is room. Where the output cannot hold Unicode,
ASCII stands in. Left out: times of less than a character, and holders beyond :data:`MOST_ROWS`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ls_edge.core.errors import printable
from ls_edge.core.records import RequestRecord
from ls_edge.report.formatting import counted, shorten, show, show_ms, tick_label, ticks
from ls_edge.report.terminal import open_console
from ls_edge.report.theme import STAGES
from ls_edge.report.timeline import RequestTimeline, Span, has_tracks, timeline_of, typical

WIDTH = 80
MOST_ROWS = 16
NAME = 14
_KINDS = {"engine": 0, "stem": 0, "head": 0, "wire": 1, "queue": 2, "codec": 2, "other": 2, "wait": 3}
_UNICODE = ("█▒", "━─", "▄▁", "··", "▚")
_ASCII = ("#%", "=-", "+:", "..", "x")
_STYLES = ("blue", "yellow", "magenta", "dim")
_SOURCE = "the source"


def print_typical(records: Sequence[RequestRecord], console: Console | None = None) -> None:
    """Print the median of the answers in which tracks ran side by side; nothing where there are none."""
    console = console or open_console()
    record = typical(records)
    if record is None:
        return
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    console.print()
    count = sum(one.error is None and has_tracks(one) for one in records)
    title = f"median of {count:,} requests in waves of tracks" if count > 1 else "the one request in waves of tracks"
    for line in text_timeline(record, width, title=title, ascii_only=console.options.ascii_only):
        console.print(line, no_wrap=True, crop=False, overflow="ignore")


def text_timeline(
    record: RequestRecord, width: int = WIDTH, *, title: str = "request", ascii_only: bool = False
) -> list[Text]:
    """The lines of a picture of ``record``, none longer than ``width``."""
    laid = timeline_of(record)
    glyphs = _ASCII if ascii_only else _UNICODE
    holders = list(dict.fromkeys(laid.rows))
    shown = holders[:MOST_ROWS]
    column = min(NAME, max(width // 4, 4), max(map(len, [_SOURCE, *shown])))
    cells = max(width - column - 2, 8)
    lines = [_title(title, record, width)]
    at_source = [span for span in laid.spans if span.stage in ("stem", "head")]
    lines.append(_line(_SOURCE if column >= len(_SOURCE) else "source", column, _row(at_source, record, cells, glyphs)))
    for holder in shown:
        rows = {row for row, name in enumerate(laid.rows) if name == holder}
        spans = [span for span in laid.spans if span.row in rows and span.stage not in ("stem", "head")]
        lines.append(_line(holder, column, _row(spans, record, cells, glyphs)))
    if len(holders) > len(shown):
        lines.append(Text(f"and {len(holders) - len(shown)} more", style="dim"))
    lines.append(_line("", column, _axis(record.latency_us / 1e3, cells)))
    lines += _legend(laid, width, glyphs)
    return [Text(line.plain.encode("ascii", "replace").decode()) if ascii_only else line for line in lines]


def _title(title: str, record: RequestRecord, width: int) -> Text:
    waves = 0 if record.is_plain else len(record.waves)
    text = f"{title}: {show_ms(record.latency_us / 1e3)}"
    if waves:
        text += f", {counted(waves, 'wave')}"
    return Text(text if len(text) <= width else f"request: {show_ms(record.latency_us / 1e3)}", style="bold")


def _line(name: str, column: int, row: Text) -> Text:
    return Text.assemble(f"{shorten(name, column):<{column}}  ", row)


def _row(spans: Sequence[Span], record: RequestRecord, cells: int, glyphs: tuple[str, ...]) -> Text:
    """The cells of one line, with the numbers of the blocks of each track that has room for them."""
    step = record.latency_us / cells or 1.0
    chars, styles = [" "] * cells, [""] * cells
    best = [0.0] * cells
    owner: list[Span | None] = [None] * cells
    for span in spans:
        begin, end = (span.start - record.submitted_us) / step, (span.end - record.submitted_us) / step
        for cell in range(max(0, int(begin)), min(cells, int(end) + 1)):
            share = min(end, cell + 1) - max(begin, cell)
            # What is critical wins against what is not, as in a tie of rounding.
            if share + 1e-9 > best[cell] and share > 0:
                best[cell], owner[cell] = share, span
    for cell, taken in enumerate(owner):
        if taken is not None:
            kind = _KINDS[taken.stage]
            chars[cell] = glyphs[4] if taken.why else glyphs[kind][not taken.critical]
            styles[cell] = "red" if taken.why else _STYLES[kind] + ("" if taken.critical or kind == 3 else " dim")
    _label(spans, owner, chars)
    text = Text()
    for char, style in zip(chars, styles, strict=True):
        text.append(char, style)
    return text


def _label(spans: Sequence[Span], owner: Sequence[Span | None], chars: list[str]) -> None:
    """Write the numbers of adjoining blocks into their bar."""
    groups: list[list[Span]] = []
    for span in spans:
        if span.block is not None:
            if groups and groups[-1][-1].end == span.start and groups[-1][-1].row == span.row:
                groups[-1].append(span)
            else:
                groups.append([span])
    for group in groups:
        cells = [cell for cell, span in enumerate(owner) if any(span is one for one in group)]
        text = " ".join(str(span.block) for span in group)
        if cells and len(text) + 4 <= len(cells) == cells[-1] - cells[0] + 1:
            text = f" {text} "
            begin = cells[0] + (len(cells) - len(text)) // 2
            chars[begin : begin + len(text)] = text


def _axis(latency_ms: float, cells: int) -> Text:
    line = [" "] * cells
    free = 0
    for tick in ticks(0.0, latency_ms, 5):
        label = tick_label(tick) + (" ms" if tick == 0 else "")
        at = min(int(tick / (latency_ms or 1.0) * cells), cells - len(label))
        if at >= free:
            line[at : at + len(label)] = label
            free = at + len(label) + 1
    return Text("".join(line).rstrip(), style="dim")


def _legend(laid: RequestTimeline, width: int, glyphs: tuple[str, ...]) -> list[Text]:
    """What the characters mean, then what the critical path is made of."""
    names = ("runs", "on the wire", "queue, codec, other", "waits")
    meaning = [f"{''.join(dict.fromkeys(pair))} {name}" for pair, name in zip(glyphs, names, strict=False)]
    if any(span.why for span in laid.spans):
        whys = dict.fromkeys(shorten(span.why, 20) for span in laid.spans if span.why)
        meaning.append(f"{glyphs[4]} {', '.join(whys)}")
    sums = {stage.name: 0.0 for stage in STAGES}
    for span in laid.spans:
        if span.critical:
            sums[span.stage] += (span.end - span.start) / 1e3
    parts = [f"{stage} {show(ms)}" for stage, ms in sums.items() if ms > 0]
    return [
        *_wrapped([*meaning, "(first of each pair: critical path)"], width),
        *_wrapped(["on the critical path, in ms:", *parts], width),
    ]


def _wrapped(words: Sequence[str], width: int) -> list[Text]:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 2 + len(word) > width:
            lines.append("")
        lines[-1] += ("  " if lines[-1] else "") + word
    wrapped = [part for line in lines for part in textwrap.wrap(line, width) or [""]]
    return [Text(printable(line), style="dim") for line in wrapped]
