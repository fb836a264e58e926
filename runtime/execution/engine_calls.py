"""An engine call of a peer: consecutive blocks over a batch of requests, in one job."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ls_edge.engines.block_runner import BlockRunner
from ls_edge.engines.bound_blocks import BlockFailed
from ls_edge.runtime.protocol.codecs import is_finite
from ls_edge.runtime.protocol.codecs.wire_codec import Tokens
from ls_edge.runtime.routing.events import Compute, Computed, ComputeFailed


def run_blocks(runner: BlockRunner, compute: Compute) -> Computed | ComputeFailed:
    """Run the blocks of ``compute`` one after the other over its batch; errors of the engines are returned, not raised.

    Where some outputs are not finite, the result is a :class:`ComputeFailed` for the requests they belong to, with the
    first block that made one, and its ``rest`` has the outputs of the other requests.
    """
    started = time.perf_counter_ns()
    block = compute.blocks[0]
    steps: Sequence[Tokens] = ()
    try:
        slots = np.asarray(compute.slots, dtype=np.int64) if runner.needs_slot else None
        outputs = runner.run(compute.blocks, compute.tokens, slots)
        # NaN and infinity stay in the tokens, so checking the last ones is enough.
        finite = is_finite(outputs.last)
        if not finite:
            steps = outputs.steps()
    except Exception as error:  # noqa: BLE001  an engine library may raise anything
        return ComputeFailed(error.block if isinstance(error, BlockFailed) else block, compute.transfers, str(error))
    spent = (time.perf_counter_ns() - started) // 1000
    return _computed(compute, outputs.last, spent) if finite else _not_finite(compute, outputs.last, steps, spent)


def _computed(compute: Compute, tokens: Tokens, spent: int, rows: Sequence[int] | None = None) -> Computed:
    """The outputs of an engine call, or only some ``rows`` of its batch."""
    if rows is None and len(tokens) == 1:
        return Computed(compute.blocks, compute.transfers, (tokens,), spent)
    rows = range(len(compute.transfers)) if rows is None else rows
    transfers = tuple(compute.transfers[row] for row in rows)
    return Computed(compute.blocks, transfers, tuple(tokens[row : row + 1] for row in rows), spent)


def _not_finite(compute: Compute, last: Tokens, steps: Sequence[Tokens], spent: int) -> ComputeFailed:
    """The first block that made NaN or infinity and the requests concerned; the others of the batch are ``rest``.

    ``last`` is what the call returned, ``steps`` the tokens after each block. Those may come of a second run; where
    that one was fine, it is put down to the last block.
    """
    rows = range(len(compute.transfers))
    good = [row for row in rows if is_finite(last[row : row + 1])]
    bad = [row for row in rows if row not in good]
    made = (
        block
        for block, tokens in zip(compute.blocks, steps, strict=True)
        if not all(is_finite(tokens[row : row + 1]) for row in bad)
    )
    return ComputeFailed(
        next(made, compute.blocks[-1]),
        tuple(compute.transfers[row] for row in bad),
        "the engine returned NaN or infinity",
        not_finite=True,
        rest=_computed(compute, last, spent, good) if good else None,
    )
