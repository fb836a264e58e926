"""An engine call of a peer: consecutive blocks over a batch of requests, in one job of the worker thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from ls_edge.engines.engine import Engine
from ls_edge.runtime.protocol.codecs import is_finite
from ls_edge.runtime.protocol.codecs.wire_codec import Tokens
from ls_edge.runtime.routing.events import Compute, Computed, ComputeFailed


def run_blocks(engines: Mapping[int, Engine], compute: Compute, *, needs_slot: bool) -> Computed | ComputeFailed:
    """Run the blocks of ``compute`` one after the other over its batch; errors of the engines are returned, not raised.

    Where some outputs are not finite, the result is a :class:`ComputeFailed` for the requests they belong to, with the
    first block that made one, and its ``rest`` has the outputs of the other requests.
    """
    started = time.perf_counter_ns()
    block = compute.blocks[0]
    steps: list[Tokens] = []
    try:
        tokens: Tokens = compute.tokens[0] if len(compute.tokens) == 1 else np.concatenate(compute.tokens)
        for index, block in enumerate(compute.blocks):
            inputs: dict[str, np.ndarray] = {"tokens": tokens}
            if needs_slot:
                inputs["slot"] = np.asarray(compute.slots, dtype=np.int64) + index
            tokens = engines[block].run(inputs)
            steps.append(tokens)
    except Exception as error:  # noqa: BLE001  an engine library may raise anything
        return ComputeFailed(block, compute.transfers, str(error))
    # NaN and infinity stay in the tokens, so checking the last ones is enough.
    finite = is_finite(tokens)
    spent = (time.perf_counter_ns() - started) // 1000
    return _computed(compute, tokens, spent) if finite else _not_finite(compute, steps, spent)


def _computed(compute: Compute, tokens: Tokens, spent: int, rows: Sequence[int] | None = None) -> Computed:
    """The outputs of an engine call, or only some ``rows`` of its batch."""
    rows = range(len(compute.transfers)) if rows is None else rows
    transfers = tuple(compute.transfers[row] for row in rows)
    return Computed(compute.blocks, transfers, tuple(tokens[row : row + 1] for row in rows), spent)


def _not_finite(compute: Compute, steps: Sequence[Tokens], spent: int) -> ComputeFailed:
    """The first block that made NaN or infinity and the requests concerned; the others of the batch are ``rest``."""
    rows = range(len(compute.transfers))
    good = [row for row in rows if is_finite(steps[-1][row : row + 1])]
    bad = [row for row in rows if row not in good]
    block = next(
        block
        for block, tokens in zip(compute.blocks, steps, strict=True)
        if not all(is_finite(tokens[row : row + 1]) for row in bad)
    )
    return ComputeFailed(
        block,
        tuple(compute.transfers[row] for row in bad),
        "the engine returned NaN or infinity",
        not_finite=True,
        rest=_computed(compute, steps[-1], spent, good) if good else None,
    )
