"""A run in two or three sentences."""

from __future__ import annotations

from ls_edge.core.records import PeerState
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.report.formatting import counted, shorten, show, show_ms, show_percent
from ls_edge.report.statistics import RunData


def narrative(data: RunData) -> str:
    """What was answered, how fast, and what happened to the peers on the laid."""
    summary = data.summary
    if not summary.requests:
        return "No request was made."
    served = sum(peer.requests > 0 for peer in summary.peers.values())
    through = f" through {counted(served, 'peer')}" if served else ""
    many = f"All {summary.requests:,}" if summary.requests > 1 else "The one"
    if summary.answered < summary.requests:
        many = f"{summary.answered:,} of {summary.requests:,}"
    sentences = [f"{many} {_images(summary.requests)} answered{through}"]
    if not summary.answered:
        sentences = [f"None of {summary.requests:,} {_images(summary.requests)} answered"]
    if summary.answered == 1:
        sentences[0] += f", in {show_ms(summary.latency_ms.p50)}"
    elif summary.throughput is not None:
        sentences[0] += f", {show(summary.throughput)} a second, half of them within {show_ms(summary.latency_ms.p50)}"
    if summary.top1 is not None:
        guess = f", where a guess would be right in {show_percent(summary.chance)}" if summary.chance else ""
        sentences.append(f"{show_percent(summary.top1)} of the answers were right{guess}")
    sentences += _tracks(data) + _losses(data)
    if summary.degraded:
        sentences.append(f"{counted(summary.degraded, 'answer')} had to skip blocks{_why_skipped(summary)}")
    if summary.failed and summary.answered:
        sentences.append(f"{counted(summary.failed, 'request')} failed")
    return ". ".join(sentences) + "."


def _why_skipped(summary: RunSummary) -> str:
    """The most frequent reason."""
    for why, count in summary.skips.reasons.items():
        of_all = "" if count == summary.degraded else f", {count:,} of them"
        return f"{of_all} because {shorten(why, 200)}"
    return ""


def _images(count: int) -> str:
    return "image was" if count == 1 else "images were"


def _tracks(data: RunData) -> list[str]:
    waves = [record.waves for record in data.answers if not record.is_plain]
    if not waves:
        return []
    most = max(len(wave) for each in waves for wave in each)
    return [f"In {counted(len(waves), 'answer')}, blocks ran side by side, in up to {counted(most, 'track')} at a time"]


def _losses(data: RunData) -> list[str]:
    spells = data.away
    if not spells:
        return []
    if len(spells) > 3:
        names = sorted({spell.peer for spell in spells})
        shown = ", ".join(shorten(name, 40) for name in names[:4])
        return [f"Peers were lost {len(spells)} times ({shown})"]
    sentences = []
    returns = {(event.peer, event.at_us / 1e3) for event in data.events if event.state == PeerState.ALIVE}
    for spell in spells:
        came_back = (spell.peer, spell.end) in returns
        after = f" and was back {show_ms(spell.end - spell.start)} later" if came_back else " and did not come back"
        sentences.append(f"{shorten(spell.peer, 40)} was lost at {spell.start / 1000:.2f} s{after}")
    return sentences
