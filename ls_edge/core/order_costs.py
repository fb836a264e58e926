"""Order costs: the schema of ``order_costs`` in a manifest, which gives an estimate for any arrangement.

``ls-edge export --calibrate DATA`` measures them (``ls_edge.export.order_costs``). The policies ``quality`` and
``parallel`` read them for every decision, so this module is plain Python without numpy. The estimate sums the
differences between an arrangement and the trained order, in nats of lost log-likelihood per image:

    cost = sum of slot[b][s]        for each block b that ran in slot s (0 for its trained slot)
         + sum of inverted[a][b]    for each pair a < b that ran with b first
         + sum of beside[a][b]      for each pair a < b that ran in different tracks of one wave
         + sum of skip[b]           for each block that did not run

The trained order costs 0. The estimate is a linear fit of measured losses: it is suitable for choosing between
arrangements, but does not predict the accuracy. Blocks are the parts of the bundle. ``docs/order-costs.md`` describes
the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ls_edge.core.errors import BundleError, SchemaMismatch

VERSION = 2

Nats = Annotated[float, Meta(ge=-1e6, le=1e6)]
Table = tuple[tuple[Nats, ...], ...]


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean results over some orders."""

    loss: float
    """Mean negative log-likelihood in nats over images and orders; the loss of an image is at most twice guessing."""
    top1: float | None


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quality of the estimate for held-out orders."""

    orders: int
    spearman: float
    rmse: float
    """Root-mean-square error in nats."""


class OrderCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``order_costs`` of a manifest."""

    version: int
    source: str
    images: int
    orders: int
    trained: Measured
    random: Measured
    """Mean over uniformly drawn orders of all blocks."""
    slot: Table
    """``[block][slot]``."""
    inverted: Table
    """``[earlier block][later block]``; 0 on and below the diagonal."""
    skip: tuple[Nats, ...]
    """``[block]``."""
    fit: Fit
    """Quality of the fit on plain orders."""
    beside: Table | None = None
    """``[earlier block][later block]``, 0 on and below the diagonal; None if no tracks were measured."""
    fit_tracks: Fit | None = None
    arrangements: int = 0


def read_order_costs(value: Mapping[str, Any], blocks: int) -> OrderCosts | None:
    """Return ``order_costs`` from a manifest with this number of blocks, or None if nothing was measured.

    Raise :class:`SchemaMismatch` for another version and :class:`BundleError` for invalid content.
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
        raise BundleError(f"order_costs is invalid for version {version} ({error}); export the run again") from None
    square = [costs.slot, costs.inverted, *([] if costs.beside is None else [costs.beside])]
    rows = [costs.skip, *(row for table in square for row in table)]
    sizes = {len(row) for row in rows} | {len(table) for table in square}
    if sizes != {blocks}:
        raise BundleError(
            f"order_costs has tables of {sorted(sizes)} blocks, the bundle has {blocks}; export the run again"
        )
    return costs
