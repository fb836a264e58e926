"""Wait for warm holders of all blocks before the first image, and report blocks without one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console

from ls_edge.cli.interrupts import StopRequest
from ls_edge.cli.output import warn
from ls_edge.core.errors import LinkError, ModelMismatch
from ls_edge.core.parts import ENDS
from ls_edge.core.peer_reports import PeerState
from ls_edge.core.text import counted, name_blocks
from ls_edge.runtime.routing.policies import find_policy
from ls_edge.runtime.source.source import Source

_LOOK_EVERY_S = 0.1


def wait_for_holders(source: Source, seconds: float, stop: StopRequest | None = None) -> None:
    """Wait until each block has a warm holder, ``seconds`` have passed, or a signal came.

    Warn about blocks without a holder. Raise :class:`ModelMismatch` if
    every peer serves another model, :class:`LinkError` if the policy may not skip that many blocks, and
    ``KeyboardInterrupt`` after a signal.
    """
    end = time.monotonic() + seconds
    missing = source.snapshot.missing_blocks
    with Console(stderr=True).status("waiting for peers") as status:  # shown on a terminal only
        while missing and not stop and time.monotonic() < end:
            status.update(f"waiting up to {seconds:g} s for a holder of {name_blocks(missing)}")
            missing = source.wait_ready(min(_LOOK_EVERY_S, max(0.0, end - time.monotonic())))
    if stop:
        raise KeyboardInterrupt
    if missing:
        warn(_judge(source, missing, seconds))


def _judge(source: Source, missing: Sequence[int], waited: float) -> str:
    """Return a warning about blocks without a holder; raise an error if no image could be answered without them."""
    mismatched = source.snapshot.mismatched
    if len(mismatched) == len(source.peers.peers):
        raise ModelMismatch("; ".join(mismatched.values()))
    blocks, count = name_blocks(missing), source.bundle.num_blocks
    of = f"{source.max_skips} of {counted(count, 'block')}"
    what = (
        f"{blocks} {'has' if len(missing) == 1 else 'have'} no holder after {waited:g} s "
        f"({'; '.join(_reasons(source, missing))})"
    )
    if source.may_skip(missing):
        return f"{what}; starting without: at most {of} may be skipped, so answers will be degraded"
    advice = "start a holder, and wait for it with --wait SECONDS"
    allowed, flags = f"may skip at most {of}", f"--max-skips {len(missing)}"
    if not find_policy(source.settings.policy).may_skip:
        allowed, flags = "never skips a block", f"--policy nearest {flags}"
    if len(missing) < count and ENDS.keys().isdisjoint(missing):
        advice += f", or answer without with {flags}"
    raise LinkError(f"{what}; the policy {source.settings.policy} {allowed}, so no image could be answered: {advice}")


def _reasons(source: Source, missing: Sequence[int]) -> list[str]:
    """Return why blocks have no holder: a reason per peer that should hold some, and one for unassigned blocks."""
    states, problems = source.snapshot.peers, source.snapshot.problems
    texts = []
    for peer in source.peers.peers:
        if not set(peer.blocks) & set(missing):
            continue
        state = states[peer.name].state
        if peer.name in problems:
            texts.append(f"{peer.name}: {problems[peer.name]}")
        else:
            texts.append(f"{peer.name} is {'not warm yet' if state == PeerState.COLD else state}")
    listed = {block for peer in source.peers.peers for block in peer.blocks}
    nowhere = [block for block in missing if block not in listed]
    if nowhere:
        texts.append(f"no peer of {source.peers.path} has {name_blocks(nowhere)}")
    return texts
