"""Wait for a warm holder of every block before the first image, and report blocks without one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console

from ls_edge.cli.interrupts import StopRequest
from ls_edge.core.errors import LinkError, ModelMismatch
from ls_edge.core.records import PeerState
from ls_edge.core.text import name_blocks
from ls_edge.runtime.routing.policies import POLICIES
from ls_edge.runtime.source.source import Source

_LOOK_EVERY_S = 0.1


def wait_for_holders(source: Source, seconds: float, stop: StopRequest | None = None) -> tuple[int, ...]:
    """Wait until each block has a warm holder, ``seconds`` have passed, or a signal came; return blocks without one."""
    end = time.monotonic() + seconds
    missing = source.missing_blocks()
    if not missing or seconds <= 0:
        return missing

    console = Console(stderr=True)
    with console.status("waiting for peers") as status:  # shown on a terminal only
        while missing and not stop and time.monotonic() < end:
            missing = source.wait_ready(min(_LOOK_EVERY_S, max(0.0, end - time.monotonic())))
            status.update(f"waiting up to {seconds:g} s for a holder of {name_blocks(missing)}")
    return missing


def check_holders(source: Source, missing: Sequence[int], waited: float) -> str:
    """Return a warning about blocks without a holder, empty if there are none.

    Raises :class:`ModelMismatch` if every peer serves another model, and :class:`LinkError` if the policy may not skip
    that many blocks.
    """
    if not missing:
        return ""
    mismatched = source.mismatched
    if len(mismatched) == len(source.peers.peers):
        raise ModelMismatch("; ".join(mismatched.values()))
    blocks = name_blocks(missing)
    has = "has" if len(missing) == 1 else "have"
    what = f"{blocks} {has} no holder after {waited:g} s ({'; '.join(reasons(source, missing))})"
    if source.may_skip(missing):
        return (
            f"{what}; starting without: at most {source.max_skips} of {source.bundle.num_blocks} blocks may be "
            "skipped, so answers will be degraded"
        )
    advice = "start a holder, and wait for it with --wait SECONDS"
    if not POLICIES[source.settings.policy].may_skip:
        allowed, flags = "never skips a block", f"--policy nearest --max-skips {len(missing)}"
    else:
        allowed = f"may skip at most {source.max_skips} of {source.bundle.num_blocks} blocks"
        flags = f"--max-skips {len(missing)}"
    if len(missing) < source.bundle.num_blocks:
        advice += f", or answer without with {flags}"
    raise LinkError(f"{what}; the policy {source.settings.policy} {allowed}, so no image could be answered: {advice}")


def reasons(source: Source, missing: Sequence[int]) -> list[str]:
    """Return why blocks have no holder: one text per peer that should hold some, and one for unassigned blocks."""
    states, problems = source.view(), source.problems
    texts = []
    for peer in source.peers.peers:
        if not set(peer.blocks) & set(missing):
            continue
        state = states[peer.name].state
        if peer.name in problems:
            texts.append(f"{peer.name}: {problems[peer.name]}")
        elif state == PeerState.LOST:
            texts.append(f"{peer.name} cannot be reached at {peer.address}")
        else:
            texts.append(f"{peer.name} is {'not warm yet' if state == PeerState.COLD else state}")
    listed = {block for peer in source.peers.peers for block in peer.blocks}
    nowhere = [block for block in missing if block not in listed]
    if nowhere:
        texts.append(f"no peer of {source.peers.path} has {name_blocks(nowhere)}")
    return texts
