"""What an order costs: the schema of ``order_costs`` in a manifest, and an estimate for any arrangement from it.

Measured by ``ls-edge export --calibrate DATA`` (``ls_edge.export.order_costs``), read by the policies ``quality`` and
``parallel`` on every decision, so it is plain Python without numpy: a dozen additions. The estimate is a sum over what
an arrangement does differently from the trained order, in nats of lost log-likelihood an image:

    cost = sum of slot[b][s]        for each block b that ran in slot s (0 where s is its trained slot)
         + sum of inverted[a][b]    for each pair a < b of which b ran first
         + sum of beside[a][b]      for each pair a < b that ran side by side, in different tracks of one wave
         + sum of skip[b]           for each block that did not run

so the trained order costs 0. It is a linear fit of measured losses: good for choosing between arrangements, not for
telling how many answers will be right. ``blocks`` are the bundle's parts. Version 1 was measured without tracks; it
is read, estimates plain orders, and refuses to guess what tracks cost. ``docs/order-costs.md`` describes the fields.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.errors import BundleError, SchemaMismatch

VERSION = 2

Table = tuple[tuple[float, ...], ...]


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured in some orders."""

    loss: float
    """Mean over images (and orders) of the negative log-likelihood, nats, each image's limited to twice a guess's."""
    top1: float | None
    """Accuracy; None where the images have no labels."""


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well the estimate ranks orders that it was not fitted to."""

    orders: int
    """Orders that were held out."""
    spearman: float
    """Rank correlation of estimate and measured loss over them."""
    rmse: float
    """Root mean square of the difference, nats."""


class OrderCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``order_costs`` of a manifest."""

    version: int
    source: str
    """The images."""
    images: int
    orders: int
    """Orders and arrangements measured; every image once in each."""
    trained: Measured
    random: Measured
    """Mean over uniformly drawn orders of all blocks."""
    slot: Table
    """``[block][slot]``."""
    inverted: Table
    """``[earlier block][later block]``; 0 on and below the diagonal."""
    skip: tuple[float, ...]
    """``[block]``."""
    fit: Fit
    """Over plain orders."""
    beside: Table | None = None
    """``[earlier block][later block]``, 0 on and below the diagonal; None where no tracks were measured."""
    fit_tracks: Fit | None = None
    """Over arrangements with tracks."""
    arrangements: int = 0
    """How many of ``orders`` have tracks."""

    @property
    def num_blocks(self) -> int:
        """How many blocks."""
        return len(self.skip)

    def cost(self, order: Arrangement | Sequence[int], skipped: Collection[int] | None = None) -> float:
        """Estimated loss of running ``order``, nats an image; ``skipped`` None is whatever is not in it.

        Raises :class:`BundleError` for blocks side by side where that was never measured (``beside`` is None).
        """
        arrangement = order if isinstance(order, Arrangement) else Arrangement.plain(order)
        missing = set(range(self.num_blocks)).difference(arrangement.order) if skipped is None else skipped
        total = sum(self.skip[block] for block in missing)
        total += sum(self.slot[block][slot] for block, slot in arrangement.steps())
        done: list[int] = []
        for wave in arrangement.waves:
            for track in wave:
                for place, block in enumerate(track):
                    total += sum(self.inverted[block][before] for before in (*done, *track[:place]) if before > block)
            if len(wave) > 1:
                total += self._side_by_side(wave)
            done += (block for track in wave for block in track)
        return total

    def _side_by_side(self, wave: Sequence[Sequence[int]]) -> float:
        if self.beside is None:
            raise BundleError(
                "order_costs has no costs of blocks in parallel tracks; export the run again with --calibrate DATA"
            )
        pairs = (
            (one, two) for at, track in enumerate(wave) for other in wave[at + 1 :] for one in track for two in other
        )
        return sum(self.beside[min(pair)][max(pair)] for pair in pairs)


def read_order_costs(value: Mapping[str, Any], blocks: int) -> OrderCosts | None:
    """Read ``order_costs`` of a manifest of ``blocks`` blocks; None where nothing was measured.

    Raises :class:`SchemaMismatch` for another version and :class:`BundleError` where it is not what it should be.
    """
    if not value:
        return None
    version = value.get("version")
    if version != VERSION:
        raise SchemaMismatch(
            f"order_costs has version {version!r}, this ls-edge reads {VERSION}; export the run again "
            "with --calibrate DATA, or install the version that wrote it"
        )
    try:
        costs = msgspec.convert(value, OrderCosts)
    except msgspec.ValidationError as error:
        raise BundleError(f"order_costs is not of version {version} ({error}); export the run again") from None
    square = [costs.slot, costs.inverted, *([] if costs.beside is None else [costs.beside])]
    rows = [costs.skip, *(row for table in square for row in table)]
    sizes = {len(row) for row in rows} | {len(table) for table in square}
    if sizes != {blocks} or not all(math.isfinite(number) for row in rows for number in row):
        raise BundleError(
            f"order_costs has tables of {sorted(sizes)} blocks, the bundle has {blocks}, or holds what is no number; "
            "export the run again"
        )
    return costs
