"""What an order costs: the schema of ``order_costs`` in a manifest, and an estimate for any order from it.

Measured by ``ls-edge export --calibrate DATA`` (``ls_edge.export.order_costs``), read by the policy ``quality`` on
every decision, so it is plain Python without numpy: a dozen additions. The estimate of an order is a sum over what it
does differently from the trained one, in nats of lost log-likelihood an image:

    cost(order) = sum of slot[b][s]        for each block b that ran as the s-th (0 where s is its trained slot)
                + sum of inverted[a][b]    for each pair a < b of which b ran first
                + sum of skip[b]           for each block that did not run

so the trained order costs 0. It is a linear fit of measured losses: good for choosing between orders, not for telling
how many answers will be right. ``blocks`` are the bundle's parts. ``docs/order-costs.md`` describes the fields.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from ls_edge.errors import BundleError, SchemaMismatch

VERSION = 1


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured in some orders."""

    loss: float
    """Mean over images (and orders) of the negative log-likelihood, nats, each image's limited to twice a guess's."""
    top1: float | None
    """Accuracy; None where the images have no labels."""


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well the estimate tells orders apart that it was not fitted to."""

    orders: int
    """Orders that were held out."""
    spearman: float
    """Rank correlation of estimate and measured loss over them."""
    rmse: float
    """Root mean square of the difference, nats."""


class OrderCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``order_costs`` of a manifest, version 1."""

    version: int
    source: str
    """The images."""
    images: int
    orders: int
    """Orders measured; every image once in each."""
    trained: Measured
    random: Measured
    """Mean over uniformly drawn orders of all blocks."""
    slot: tuple[tuple[float, ...], ...]
    """``[block][slot]``."""
    inverted: tuple[tuple[float, ...], ...]
    """``[earlier block][later block]``; 0 on and below the diagonal."""
    skip: tuple[float, ...]
    """``[block]``."""
    fit: Fit

    @property
    def blocks(self) -> int:
        """How many blocks."""
        return len(self.skip)

    def cost(self, order: Sequence[int], skipped: Collection[int] | None = None) -> float:
        """Estimated loss of running ``order``, nats an image; ``skipped`` None is whatever is not in it."""
        missing = set(range(self.blocks)).difference(order) if skipped is None else skipped
        total = sum(self.skip[block] for block in missing)
        for place, block in enumerate(order):
            total += self.slot[block][place]
            total += sum(self.inverted[later][block] for later in order[place + 1 :] if later < block)
        return total

    def next_cost(self, done: Sequence[int], block: int, skipped: Collection[int] = ()) -> float:
        """What running ``block`` after ``done`` adds: its slot, and each earlier block that will now run after it.

        The sum over an order's steps, with the skips, is :meth:`cost`. ``skipped`` will not run at all.
        """
        row = self.slot[block][len(done)]
        return row + sum(
            self.inverted[earlier][block] for earlier in range(block) if earlier not in done and earlier not in skipped
        )

    def skip_cost(self, block: int) -> float:
        """What leaving a block out adds."""
        return self.skip[block]


def read_order_costs(value: Mapping[str, Any], blocks: int) -> OrderCosts | None:
    """Read ``order_costs`` of a manifest of ``blocks`` blocks; None where nothing was measured.

    Raises :class:`SchemaMismatch` for another version and :class:`BundleError` where it is not what it should be.
    """
    if not value:
        return None
    if value.get("version") != VERSION:
        raise SchemaMismatch(
            f"order_costs has version {value.get('version')!r}, this ls-edge reads {VERSION}; export the run again "
            "with --calibrate DATA, or install the version that wrote it"
        )
    try:
        costs = msgspec.convert(value, OrderCosts)
    except msgspec.ValidationError as error:
        raise BundleError(f"order_costs is not of version {VERSION} ({error}); export the run again") from None
    tables = (*costs.slot, *costs.inverted, costs.skip)
    sizes = {len(row) for row in tables} | {len(costs.slot), len(costs.inverted)}
    if sizes != {blocks} or not all(math.isfinite(number) for row in tables for number in row):
        raise BundleError(
            f"order_costs has tables of {sorted(sizes)} blocks, the bundle has {blocks}, or holds what is no number; "
            "export the run again"
        )
    return costs
