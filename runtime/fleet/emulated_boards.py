"""Boards that are not there: peers on this machine, paced to the published figures of a board.

Only boards with a figure that their maker published for a vision transformer are known by name; any other is emulated
from a ``profile.json`` of it. What is paced is the engine: a call takes as long as on the board, and this machine
computes meanwhile. Memory, clocks and power are not emulated, and all boards share the cores of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ls_edge.core.errors import UsageError
from ls_edge.core.validation import unknown_name
from ls_edge.device.profile import BatchTimes, DeviceProfile, Times, load_profile
from ls_edge.runtime.chaos.faults import Faults

_TABLE = (
    "NVIDIA's table of vision transformers, vit-base-patch16-224 "
    "(developer.nvidia.com/blog/nvidia-jetson-orin-nano-developer-kit-gets-a-super-boost)"
)
IMAGES_PER_SECOND = {"orin-nano": (98.0, _TABLE), "orin-nano-super": (158.0, _TABLE)}
"""Published images a second of ViT-B/16 at 224 pixels, and where that stands.

Other public repositories cite that address; the page itself could not be opened when this was written, so the two
figures were not read again.
"""
_VIT_B_BLOCKS = 12


@dataclass(frozen=True)
class EmulatedBoard:
    """A board to stand for: its name as a peer, what a block takes it, and who says so."""

    name: str
    block_ms: float
    source: str

    @property
    def pace(self) -> Faults:
        """What its peer is started with: engine calls that take at least as long as on the board."""
        return Faults(least_ms=self.block_ms)


def emulated_boards(kinds: Sequence[str], slowdown: float = 1.0) -> tuple[EmulatedBoard, ...]:
    """Boards by name or by the path of a ``profile.json``, numbered by kind: ``orin-nano-0``, ``orin-nano-1``.

    A board that is known by name takes ``1 / (12 images a second)`` for a block: a twelfth of ViT-B/16, stem and head
    counted in, whatever the blocks of the bundle are. ``slowdown`` multiplies all times. Raises
    :class:`UsageError` for another name, and as :func:`load_profile`.
    """
    found: list[EmulatedBoard] = []
    for kind in kinds:
        if kind in IMAGES_PER_SECOND:
            figure, source = IMAGES_PER_SECOND[kind]
            named, block_ms = kind, 1e3 / figure / _VIT_B_BLOCKS
        elif kind.endswith(".json"):
            profile = load_profile(kind)
            named, block_ms, source = profile.device.name, profile.block_ms, f"its profile {Path(kind).name}"
        else:
            raise UsageError(
                f"{unknown_name('board', kind, IMAGES_PER_SECOND)}; of any other board give the profile.json that "
                "'ls-edge profile' wrote on one"
            )
        if slowdown != 1:
            block_ms, source = block_ms * slowdown, f"{source}, {slowdown:g} times slower"
        number = sum(board.name.rpartition("-")[0] == named for board in found)
        found.append(EmulatedBoard(f"{named}-{number}", block_ms, source))
    return tuple(found)


def emulated_profile(measured: DeviceProfile, board: EmulatedBoard) -> DeviceProfile:
    """The profile that a board would have: blocks as published, stem and head as measured here, marked as emulated.

    Power is unknown. Raises :class:`UsageError` where this machine is slower than the board, so cannot stand for it.
    """
    if measured.block_ms > board.block_ms:
        raise UsageError(
            f"a block takes this machine {measured.block_ms:.2f} ms and {board.name} {board.block_ms:.2f} ms, so it "
            "cannot stand for one; take a smaller model, or a faster machine"
        )
    one, size = measured.one_at_a_time, min(map(int, measured.batch))
    block = Times(*(round(board.block_ms * size, 4),) * 3)
    blocks = [block] * len(one.blocks_ms)
    chain = Times(*(round(one.stem_ms.p50 + one.head_ms.p50 + block.p50 * len(blocks), 4),) * 3)
    batch: dict[str, BatchTimes] = {
        str(size): msgspec.structs.replace(
            one, blocks_ms=blocks, chain_ms=chain, slowdown=1.0, power_watts=None, energy_mj_per_image=None
        )
    }
    device = msgspec.structs.replace(
        measured.device, name=board.name, board=None, gpus=[], l4t=None, power_mode=None, battery_wh=None,
        emulated=board.source,
    )  # fmt: skip
    return msgspec.structs.replace(
        measured, device=device, batch=batch, power_watts=None, idle_watts=None, power_scope=None, power_channels={},
        energy_mj_per_image=None, throttled=False, throttled_by=[],
    )  # fmt: skip
