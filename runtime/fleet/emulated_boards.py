"""Emulated boards: peers on this machine whose engines are paced to the published throughput of a board.

Boards for which the maker published the throughput of a vision transformer are known by name; any other board is
emulated from its ``profile.json``. Only engine calls are paced. Memory, clocks and power are not emulated, and all
boards share the cores of this machine.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ls_edge.core.errors import UsageError
from ls_edge.core.logs import set_up
from ls_edge.core.parts import ENDS
from ls_edge.core.validation import unknown_name
from ls_edge.device.profile import BatchTimes, DeviceProfile, Times, load_profile
from ls_edge.engines.engine import Engine
from ls_edge.engines.opening import OnChoice
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.peer.setup import PeerSetup

_TABLE = (
    "NVIDIA's table of vision transformers, vit-base-patch16-224 "
    "(developer.nvidia.com/blog/nvidia-jetson-orin-nano-developer-kit-gets-a-super-boost)"
)
IMAGES_PER_SECOND = {"orin-nano": (98.0, _TABLE), "orin-nano-super": (158.0, _TABLE)}
"""Published images per second of ViT-B/16 at 224 pixels, and the source of the number.

Other public repositories cite that address; the page itself could not be opened when this was written.
"""
_VIT_B_BLOCKS = 12
_NEXT_CALL_S = 0.003
"""Longest pause after which an engine call counts as having waited for the previous one. Peers take less time; with a
longer limit, calls that did not wait would be shortened, too."""


@dataclass(frozen=True)
class EmulatedBoard:
    """Name of the peer, time of a block, and the source of that time."""

    name: str
    block_ms: float
    source: str


class Pacer:
    """Paces the engines of one process, which run one call at a time."""

    def __init__(self) -> None:
        self._returned_at, self._late_s = 0.0, 0.0

    def hold(self, called: float, least_s: float) -> None:
        """Sleep until a call that began at ``called`` has taken ``least_s``.

        Sleeps end late. A real board would have finished on time and started the next call, so a call that was already
        waiting is shortened by the delay.
        """
        now = time.perf_counter()
        began = called - self._late_s if called - self._returned_at < _NEXT_CALL_S else called
        ends = max(began + least_s, now)
        if ends > now:
            time.sleep(ends - now)
        self._returned_at = time.perf_counter()
        self._late_s = min(self._returned_at - ends, least_s) if called + least_s > now else 0.0


class PacedEngine:
    """An :class:`Engine` whose calls take at least ``block_ms`` for each image."""

    def __init__(self, engine: Engine, pacer: Pacer, block_ms: float) -> None:
        self.part, self.kind, self.provider, self.signature = (
            engine.part,
            engine.kind,
            engine.provider,
            engine.signature,
        )
        self._engine, self._pacer, self._block_s = engine, pacer, block_ms / 1e3

    def run(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run the engine and wait until the board would have finished."""
        called = time.perf_counter()
        result = self._engine.run(inputs)
        self._pacer.hold(called, self._block_s * len(result))
        return result

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class PacedPeer(Peer):
    """A peer on an emulated board."""

    block_ms = 0.0

    def open_engines(self, setup: PeerSetup, on_choice: OnChoice) -> Mapping[int, Engine]:
        """Open the engines; those of blocks run at the pace of the board, which the peer measures as it warms up.

        Stem and head are not paced, since the time of the blocks includes them.
        """
        pacer, opened = Pacer(), super().open_engines(setup, on_choice)
        return {b: e if b in ENDS else PacedEngine(e, pacer, self.block_ms) for b, e in opened.items()}


class BoardCluster(LocalCluster):
    """Emulated boards as processes on the loopback interface, with keys and empty stores."""

    def __init__(
        self,
        folder: Path,
        bundle: Path,
        placement: Mapping[str, Sequence[int]],
        boards: Sequence[EmulatedBoard],
        source: str,
    ) -> None:
        self._block_ms = {board.name: board.block_ms for board in boards}
        super().__init__(folder, bundle, placement, sources=[source], keys=True, stores=True)

    def peer_command(self, name: str) -> list[str]:
        """Return the command that starts this module as a peer, without its arguments."""
        return [sys.executable, "-m", __name__, "--block-ms", str(self._block_ms[name])]


def emulated_boards(kinds: Sequence[str], slowdown: float = 1.0) -> tuple[EmulatedBoard, ...]:
    """Return boards by name or by the path of a ``profile.json``, numbered by kind: ``orin-nano-0``, ``orin-nano-1``.

    A block of a board known by name takes a twelfth of ViT-B/16, stem and head included, whatever the model of the
    bundle is. ``slowdown`` multiplies all times. Raise :class:`UsageError` for another name, and as
    :func:`load_profile`.
    """
    found: list[EmulatedBoard] = []
    for kind in kinds:
        if kind in IMAGES_PER_SECOND:
            rate, source = IMAGES_PER_SECOND[kind]
            named, block_ms = kind, 1e3 / rate / _VIT_B_BLOCKS
        elif kind.endswith(".json"):
            profile = load_profile(kind)
            named, block_ms, source = profile.device.name, profile.block_ms, f"its profile {Path(kind).name}"
        else:
            raise UsageError(
                f"{unknown_name('board', kind, IMAGES_PER_SECOND)}; for any other board, give the profile.json that "
                "'ls-edge profile' wrote on it"
            )
        if slowdown != 1:
            block_ms, source = block_ms * slowdown, f"{source}, {slowdown:g} times slower"
        number = sum(board.name.rpartition("-")[0] == named for board in found)
        found.append(EmulatedBoard(f"{named}-{number}", block_ms, source))
    return tuple(found)


def emulated_profile(measured: DeviceProfile, board: EmulatedBoard) -> DeviceProfile:
    """Return the profile of an emulated board: blocks as published, stem and head as measured here, unknown power.

    Raise :class:`UsageError` if this machine is slower than the board.
    """
    if measured.block_ms > board.block_ms:
        raise UsageError(
            f"this machine needs {measured.block_ms:.2f} ms for a block and {board.name} {board.block_ms:.2f} ms: too "
            "slow to emulate it; use a smaller model or a faster machine"
        )
    one, size = measured.one_at_a_time, min(map(int, measured.batch))
    block = Times(*(round(board.block_ms * size, 4),) * 3)
    blocks = [block] * len(one.blocks_ms)
    ends = [times.p50 for times in (one.stem_ms, one.head_ms) if times is not None]
    chain = Times(*(round(sum(ends) + block.p50 * len(blocks), 4),) * 3)
    batch: dict[str, BatchTimes] = {
        str(size): msgspec.structs.replace(
            one,
            blocks_ms=blocks,
            chain_ms=chain,
            slowdown=1.0,
            power_watts=None,
            energy_mj_per_image=None,
            visits_ms={},
        )
    }
    device = msgspec.structs.replace(
        measured.device,
        name=board.name,
        board=None,
        gpus=[],
        l4t=None,
        power_mode=None,
        battery_wh=None,
        emulated=board.source,
    )
    return msgspec.structs.replace(
        measured,
        device=device,
        batch=batch,
        power_watts=None,
        idle_watts=None,
        power_scope=None,
        power_channels={},
        energy_mj_per_image=None,
        throttled=False,
        throttled_by=[],
    )


def main() -> None:
    """Serve as an emulated board until a signal or the end of standard input."""
    parser = argparse.ArgumentParser()
    for flag in ("--peers", "--name", "--store", "--secret-key"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--block-ms", type=float, required=True)
    parser.add_argument("--until-eof", action="store_true")
    given = parser.parse_args()
    set_up(as_json=False)
    peer = PacedPeer.open(given.peers, given.name, store=given.store, secret_key=given.secret_key)
    peer.block_ms = given.block_ms
    if given.until_eof:
        peer.stop_at_eof()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: peer.stop())
    peer.serve()


if __name__ == "__main__":
    main()
