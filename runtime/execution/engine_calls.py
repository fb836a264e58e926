"""An engine call of a peer: consecutive blocks over a batch of requests, in one job."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ls_edge.engines.executor import Executor, PartFailed
from ls_edge.runtime.protocol.codecs import is_finite
from ls_edge.runtime.protocol.codecs.wire_codec import Tokens
from ls_edge.runtime.routing.events import Compute, Computed, ComputeFailed


def run_blocks(executor: Executor, compute: Compute) -> Computed | ComputeFailed:
    """Run the blocks of ``compute`` over its batch; return errors of the engines instead of raising them.

    If some outputs are not finite, return a :class:`ComputeFailed` for those requests that names the first block with
    such an output; its ``rest`` holds the outputs of the other requests.
    """
    started = time.perf_counter_ns()
    steps: Sequence[Tokens] = ()
    try:
        slots = np.asarray(compute.slots, dtype=np.int64) if executor.needs_slot else None
        last = executor.run(compute.blocks, compute.tokens, slots)
        # NaN and infinity stay in the tokens, so checking the last ones is enough.
        finite = is_finite(last)
        if not finite:
            steps = executor.steps(compute.blocks, compute.tokens, slots)
    except Exception as error:  # noqa: BLE001  an engine library may raise anything
        block = error.part if isinstance(error, PartFailed) else compute.blocks[0]
        return ComputeFailed(block, compute.transfers, str(error))
    spent = (time.perf_counter_ns() - started) // 1000
    return _computed(compute, last, spent) if finite else _not_finite(compute, last, steps, spent)


def _computed(compute: Compute, tokens: Tokens, spent: int, rows: Sequence[int] | None = None) -> Computed:
    """Return the outputs of an engine call, or only some ``rows`` of its batch."""
    if rows is None and len(tokens) == 1:
        return Computed(compute.blocks, compute.transfers, (tokens,), spent)
    rows = range(len(compute.transfers)) if rows is None else rows
    transfers = tuple(compute.transfers[row] for row in rows)
    return Computed(compute.blocks, transfers, tuple(tokens[row : row + 1] for row in rows), spent)


def _not_finite(compute: Compute, last: Tokens, steps: Sequence[Tokens], spent: int) -> ComputeFailed:
    """Name the first block that returned NaN or infinity and the requests concerned; the others are ``rest``.

    ``last`` is the output of the call, ``steps`` the tokens after each block in a second run. If the second run was
    fine, the last block is named.
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
