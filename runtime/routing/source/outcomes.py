"""Outcomes of a request that lack blocks: why blocks were skipped, and the errors of requests without an answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ls_edge.core.bands import Bands
from ls_edge.core.errors import BudgetExceeded, NotFinite, Overloaded
from ls_edge.core.parts import has_ends
from ls_edge.core.text import name_blocks
from ls_edge.runtime.protocol.messages import ReturnReason
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.recovery import MTU
from ls_edge.runtime.routing.state.held_request import HeldRequest
from ls_edge.runtime.routing.state.turn import Turn

NO_HOLDER = "had no reachable holder"
_TOO_LATE = "did not run in time"
_NO_TRACK = "belonged to a track that did not come back"
_WHY_NOT_RUN = {ReturnReason.UNREACHABLE.value: NO_HOLDER, ReturnReason.CREDIT.value: "got no peer's credit"}


def why_not_run(reason: str) -> str:
    """Return why the remaining blocks of a request did not run."""
    return _WHY_NOT_RUN.get(reason, _TOO_LATE)


def why_skipped(skipped: Iterable[int], left_out: Mapping[int, str], bands: Bands) -> str:
    """Return the reasons, each with its blocks; ``left_out`` has those of the blocks that the source skipped."""
    reasons: dict[str, list[int]] = {}
    for block in skipped:
        reasons.setdefault(left_out.get(block, _NO_TRACK), []).append(block)
    return "; ".join(f"{_name(blocks, bands)} {why}" for why, blocks in reasons.items())


def _name(blocks: Collection[int], bands: Bands) -> str:
    """Return the names of blocks for a message, with their band if the model has several."""
    found = {bands.name(bands.band_of(block)) for block in blocks}
    band = found.pop() if len(found) == 1 else ""
    return f"{name_blocks(blocks)} of {band}" if band else name_blocks(blocks)


def not_finite(number: int, holders: Iterable[str]) -> NotFinite:
    """Return the error of a request with NaN or infinity in the output of ``holders``."""
    holders = tuple(holders)
    return NotFinite(
        f"request {number}: NaN or infinity in the output of {', '.join(holders)}; check the image, and the bundle "
        "with 'ls-edge verify'",
        holders=holders,
    )


def too_late(number: int, copy: HeldRequest, failed: Iterable[str], turn: Turn) -> BudgetExceeded | Overloaded:
    """Return the error of a request whose budget has ended; ``failed`` are holders that failed it."""
    it, reason, bands, cut = copy.itinerary, copy.reason, turn.bands, turn.neighbors.losing_tokens
    stuck, holders = bands.permitted(it.remaining), tuple(failed)
    left = _name(stuck, bands)
    behind = set(it.remaining) - set(stuck)
    waits = f", so {name_blocks(behind)} could not run" if behind else ""
    if cut:
        return BudgetExceeded(
            f"request {number}: {left} {_TOO_LATE} within the budget{waits}: the link to {', '.join(cut)} ends "
            f"each time that tokens are sent; {MTU}, see 'ls-edge status'",
            blocks=stuck,
            holders=tuple(cut),
        )
    if reason == ReturnReason.CREDIT:
        return Overloaded(
            f"request {number}: no peer had a credit for {left} within the budget{waits}; "
            "send more slowly, or raise the peers' credits or the budget",
            blocks=stuck,
            holders=holders,
        )
    why = NO_HOLDER if reason == ReturnReason.UNREACHABLE else _TOO_LATE
    or_skip = " or --max-skips" if policy_of(it.policy).may_skip and not has_ends(stuck) else ""
    return BudgetExceeded(
        f"request {number}: {left} {why} within the budget{waits}; at most {it.max_skips} may "
        f"be skipped; check the peers, or raise --budget-ms{or_skip}",
        blocks=stuck,
        holders=holders,
    )
