"""The engines of a peer's blocks, and the calls that routing asks for.

A call is one job: it runs consecutive blocks over a batch of requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DeviceLost, EngineError, LsEdgeError
from ls_edge.core.peer_reports import MAX_TEXT
from ls_edge.core.peers_file import EngineKind, PeerConfig
from ls_edge.device.profile import DeviceProfile
from ls_edge.engines.engine import Engine
from ls_edge.engines.executor import Executor, PartFailed
from ls_edge.engines.opening import EngineChoice, OnChoice, announce
from ls_edge.engines.profiling import MeasuredDevice, profile_blocks
from ls_edge.runtime.peer.counts import EngineCounts
from ls_edge.runtime.protocol.codecs import Tokens, is_finite
from ls_edge.runtime.protocol.payload import EncodedImage
from ls_edge.runtime.routing.state.events import Compute, Computed, ComputeFailed, Warm


class BlockExecutor:
    """Executor of a peer's blocks; its methods run one at a time, on any thread."""

    def __init__(
        self, entry: PeerConfig, kind: EngineKind, open_engines: Callable[[OnChoice], Mapping[int, Engine]]
    ) -> None:
        """Open no engine yet; the first :meth:`load` calls ``open_engines``."""
        self.counts = EngineCounts(entry.blocks)
        self.text: str = kind
        """Description of the requested engine, and then of the chosen one, for other processes."""
        self._entry = entry
        self._open_engines = open_engines
        self._executor = Executor({})
        self._warm: Warm | None = None

    @property
    def provider(self) -> str:
        """Provider that runs the blocks, after :meth:`load`."""
        return next(iter(self._executor.engines.values())).provider

    @property
    def is_on_host(self) -> bool:
        """Whether the tokens stay in the memory of the host."""
        return self._executor.workspace is None

    def load(self) -> Warm | LsEdgeError:
        """Open the engines and warm them up, unless that is done; return an error instead of raising it."""
        if self._warm is not None:
            return self._warm
        try:
            self._executor = Executor(self._open_engines(self._on_choice))
            block_ms = self._executor.measure(self._entry.max_batch)
        except LsEdgeError as error:
            return error
        except Exception as error:  # noqa: BLE001  an engine library may raise anything
            return EngineError(f"the engines of {self._entry.name} do not load: {error}; run 'ls-edge doctor'")
        self._warm = Warm(max(1, round(block_ms * 1e3)))
        return self._warm

    def _on_choice(self, choice: EngineChoice) -> None:
        announce(choice)
        self.text = str(choice)[:MAX_TEXT]

    def run(self, compute: Compute) -> Computed | ComputeFailed | DeviceLost:
        """Run a call; see :func:`run_blocks`."""
        return run_blocks(self._executor, compute)

    def profile(self, bundle: Bundle, seconds: float, call: Callable[[Callable[[], object]], None]) -> DeviceProfile:
        """Time the blocks; ``call`` runs a function on the thread of the engine."""
        return profile_blocks(
            bundle,
            self._executor,
            MeasuredDevice(self._entry.name),
            max_batch=self._entry.max_batch,
            duration=seconds,
            call=call,
        )

    def close(self) -> None:
        """Close the engines."""
        self._executor.close()


def run_blocks(executor: Executor, compute: Compute) -> Computed | ComputeFailed | DeviceLost:
    """Run the blocks of a call over its batch; return errors of the engines instead of raising them.

    If some outputs are not finite, return a :class:`ComputeFailed` for their requests that names the first block with
    such an output; its ``rest`` holds the outputs of the other requests.
    """
    started = time.perf_counter_ns()
    steps: Sequence[Tokens] = ()
    rows = [one.pixels if isinstance(one, EncodedImage) else one for one in compute.tokens]
    try:
        slots = np.asarray(compute.slots, dtype=np.int64) if executor.needs_slot else None
        last = executor.run(compute.blocks, rows, slots)
        # NaN and infinity stay in the tokens, so checking the last output is enough.
        finite = is_finite(last)
        if not finite:
            steps = executor.steps(compute.blocks, rows, slots)
    except DeviceLost as error:
        return error
    except Exception as error:  # noqa: BLE001  an engine library may raise anything
        block = error.part if isinstance(error, PartFailed) else compute.blocks[0]
        return ComputeFailed(block, compute.transfers, str(error))
    spent = (time.perf_counter_ns() - started) // 1000
    if finite:
        return _computed(compute, last, spent, range(len(compute.transfers)))
    return _not_finite(compute, last, steps, spent)


def _computed(compute: Compute, tokens: Tokens, spent: int, rows: Sequence[int]) -> Computed:
    transfers = tuple(compute.transfers[row] for row in rows)
    return Computed(compute.blocks, transfers, tuple(tokens[row : row + 1] for row in rows), spent)


def _not_finite(compute: Compute, last: Tokens, steps: Sequence[Tokens], spent: int) -> ComputeFailed:
    """Return a failure that names the first block that returned NaN or infinity, and the requests concerned.

    ``last`` is the output of the call, ``steps`` has the tokens after each block of a second run. If the second run was
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
