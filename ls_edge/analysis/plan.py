"""Settings and orders of an analysis; one seed draws all orders."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ls_edge.core.bands import Bands
from ls_edge.core.validation import flag
from ls_edge.evaluation.measure import Order
from ls_edge.evaluation.orders import DRAWS
from ls_edge.evaluation.settings import BatchSize, Images, ModelSettings, Orders


class AnalysisSettings(ModelSettings, frozen=True, kw_only=True):
    """Settings of an analysis."""

    what: Annotated[
        tuple[str, ...] | None, flag("Kinds of analysis, listed above.  [default: all that apply]", "A,B")
    ] = None
    limit: Annotated[Images | None, flag("Maximum number of images, each of which is used once.")] = None
    orders: Annotated[Orders, flag("Random orders of all blocks.")] = 16
    pool: Literal["mean", "first"] = "mean"
    """Tokens that represent an image: their mean, or the first one (the class token, if any)."""
    batch_size: Annotated[BatchSize, flag("Images at a time.")] = 32


class AnalysisPlan(msgspec.Struct, frozen=True):
    """Settings of an analysis and the bands in force."""

    settings: AnalysisSettings
    bands: Bands

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds to measure."""
        return self.settings.what or ()

    @property
    def mapped(self) -> int:
        """Block whose outputs are mapped: the middle one of the largest band."""
        largest = max(self.bands.groups, key=len)
        return largest[len(largest) // 2]

    @property
    def trained(self) -> Order:
        """The trained order of all blocks."""
        return tuple(range(self.bands.num_blocks))

    def random(self) -> list[Order]:
        """Return the random orders of all blocks."""
        return self.bands.random_orders(self.settings.orders, self.settings.seed)

    def left_out(self) -> dict[int, list[Order]]:
        """Return random orders of random subsets, by the number of blocks left out."""
        num_blocks = self.bands.num_blocks
        counts = sorted({1, *(round(num_blocks * part / 4) for part in (1, 2, 3))} & set(range(1, num_blocks)))
        return {
            count: [
                self.bands.random_subset_order(num_blocks - count, self.settings.seed, draw, shuffled=True)
                for draw in range(DRAWS)
            ]
            for count in counts
        }
