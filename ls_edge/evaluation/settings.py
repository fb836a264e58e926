"""Settings of evaluations: each is a flag of the command, an argument of the function, and a key of the JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from ls_edge.core.bands import Bands
from ls_edge.core.peers_file import Threads
from ls_edge.core.validation import Settings, flag

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]
Orders = Annotated[int, Meta(ge=1, le=100_000)]
Images = Annotated[int, Meta(ge=1, le=10_000_000)]
BatchSize = Annotated[int, Meta(ge=1, le=65_536)]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Seed that torch, numpy, and scikit-learn take."""


class ModelSettings(Settings, frozen=True, kw_only=True):
    """Settings of all measurements on a run or a bundle; device and precision are for runs."""

    bands: Annotated[
        str | None,
        flag("Groups in which blocks may be reordered, such as 0/1-6/7.  [default: the model's own]", "BANDS"),
    ] = None
    limit: Annotated[Images | None, flag("Number of images; above the size of the data, images repeat.")] = None
    seed: Annotated[Seed, flag("Seed of orders and subsets.")] = 0
    batch_size: Annotated[BatchSize, flag("Images at a time.")] = 100
    device: Annotated[Device, flag("Device of a run's model.")] = "auto"
    precision: Annotated[Precision, flag("Precision of a run's matrix products; a bundle has its own.")] = "fp32"
    threads: Annotated[Threads | None, flag("Threads of the engines or of torch.  [default: their own]")] = None

    def bands_of(self, own: Bands) -> Bands:
        """Return the bands in force, by default a model's ``own``; raise :class:`UsageError` if they do not fit it."""
        return own if self.bands is None else Bands.from_json(self.bands, own.num_blocks)


class EvaluationSettings(ModelSettings, frozen=True, kw_only=True):
    """Settings of an evaluation."""

    orders: Annotated[Orders, flag("Random orders of all blocks.")] = 64
    keep: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=10_000)], ...] | None,
        flag("Numbers of blocks to keep.  [default: quarters]", "N,N"),
    ] = None
    freedom: Annotated[bool, flag("Also evaluate bands, from a fixed order to full freedom.")] = False
