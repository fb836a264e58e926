"""``ls_edge.simulate``: a fleet of devices that fail and return, or a grid of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, overload

import msgspec
from msgspec import Meta
from rich.console import Console

from ls_edge.api.models import images_for
from ls_edge.core.arrangement import Arrangement
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.logs import OnProgress, ignore_progress, warn_in_python
from ls_edge.core.validation import Settings, flag
from ls_edge.data.datasets import ImageSet, open_data
from ls_edge.data.preprocess import Preprocessor, iterate_batches
from ls_edge.engines.pipeline import Pipeline
from ls_edge.evaluation.availability import Interval
from ls_edge.evaluation.run_summary import wilson
from ls_edge.evaluation.simulation_summary import (
    FleetSettings,
    SimulationContext,
    SimulationSummary,
    SiteOutcome,
    SweepDocument,
    summarize_simulation,
)
from ls_edge.report.shown import Shown
from ls_edge.report.simulation import print_simulation, print_sweep
from ls_edge.runtime.fleet.planning.from_profiles import LATENCY_MS, MBIT, ModelSizes, problem_of, read_inputs
from ls_edge.runtime.fleet.planning.problem import MOST_BLOCKS, PlanningProblem
from ls_edge.runtime.fleet.simulation.site_pool import simulate_fleet
from ls_edge.runtime.fleet.simulation.sites import SITE_SIZE, Site, simulation_context, sites_of
from ls_edge.runtime.fleet.simulation.sweep import combinations, continued, parse_sweep, run_sweep
from ls_edge.runtime.routing.policies import find_policy
from ls_edge.runtime.simulator.churn import read_losses
from ls_edge.runtime.source.settings import Settings as SourceSettings
from ls_edge.runtime.source.settings import check_policy

SWEPT = (
    "devices", "requests", "rate", "replicas", "policy", "max-skips", "budget-ms", "concurrency", "site-size", "up",
    "down",
)  # fmt: skip


class SimulationSettings(Settings, frozen=True, kw_only=True):
    """Settings of ``ls-edge simulate``; those without a :func:`flag` are options that other commands share."""

    devices: Annotated[int, Meta(ge=1, le=1_000_000), flag("Number of devices.")]
    requests: Annotated[int, Meta(ge=1, le=10_000_000), flag("Images to answer, at all sites together.")]
    concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        flag("Requests at the same time at a site.  [default: enough to keep it busy]"),
    ] = None
    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        flag("Minimum holders of a block at a site.  [default: 2, or 1 if memory is short]"),
    ] = None
    site_size: Annotated[int, Meta(ge=1, le=64), flag("Maximum devices of a site, which has one source.")] = SITE_SIZE
    rate: Annotated[float, Meta(gt=0)] | None = None
    policy: str = "nearest"
    max_skips: int | None = None
    budget_ms: Annotated[float, Meta(ge=1, le=600_000)] = 10_000.0
    seed: int = 0
    churn: tuple[str, ...] = ()
    until: Annotated[float, Meta(gt=0, lt=1)] | None = None
    execute: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        flag("Answers whose orders run through the engines here, each on an image of --data."),
    ] = None
    data: str | None = None
    source: str | None = None
    links: str | None = None
    codec: Literal["raw", "fp16", "int8"] = "raw"
    mbit: Annotated[float, Meta(gt=0)] = MBIT
    link_ms: Annotated[float, Meta(ge=0)] = LATENCY_MS
    batch: Annotated[int, Meta(ge=1, le=1024)] | None = None
    max_replicas: Annotated[int, Meta(ge=1, le=64)] | None = None
    allow_throttled: bool = False
    blocks: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_BLOCKS)] | None,
        flag("Blocks of a model without a bundle; each takes the time of a block of the profile."),
    ] = None
    tokens_bytes: Annotated[
        Annotated[int, Meta(ge=1, le=10**9)] | None, flag("Size of its tokens on a link, with --blocks.")
    ] = None
    seeds: Annotated[int, Meta(ge=1, le=1000), flag("Independent runs of each combination of --sweep.")] = 1

    def model(self, bundle: str | Path | None) -> Bundle | ModelSizes:
        """Open the bundle, or return the sizes of a model without one."""
        sizes = self.blocks, self.tokens_bytes
        if bundle is not None and sizes == (None, None):
            return Bundle.open(bundle)
        if bundle is not None or self.blocks is None or self.tokens_bytes is None:
            raise UsageError("give --bundle, or for a model without one both --blocks and --tokens-bytes")
        if self.links is not None or self.execute is not None or self.codec != "raw":
            raise UsageError(
                "--links, --execute and --codec are for a bundle; with --blocks, give --mbit, --link-ms, and with "
                "--tokens-bytes the size of the encoded tokens"
            )
        return ModelSizes(self.blocks, self.tokens_bytes)

    def with_values(self, values: Mapping[str, str]) -> SimulationSettings:
        """Replace some settings, written as in ``--sweep``; ``up`` and ``down`` are times of the first churn.

        Unless ``max_replicas`` is set, ``replicas`` also replaces it: if memory allows more, all combinations would
        otherwise be the same.
        """
        times = {key: values[key] for key in ("up", "down") if key in values}
        pieces = [piece for piece in "".join(self.churn[:1]).split(",") if piece]
        if times and not any(piece.strip().startswith(("up=", "down=")) for piece in pieces):
            raise UsageError(
                f"--sweep {'='.join(next(iter(times.items())))} replaces a time of the first --churn, which has none; "
                "write up=1h,down=3m there, and traces after it"
            )
        kept = [piece for piece in pieces if piece.partition("=")[0].strip() not in times]
        churn = ",".join([*(f"{key}={value}" for key, value in times.items()), *kept])
        others = {key.replace("-", "_"): value for key, value in values.items() if key not in times}
        given = {**msgspec.structs.asdict(self), "churn": [churn, *self.churn[1:]] if churn else [], **others}
        given["max_replicas"] = self.max_replicas or values.get("replicas")
        try:
            return self.of(given, strict=False)
        except UsageError as error:
            raise UsageError(
                f"--sweep {','.join(f'{key}={value}' for key, value in values.items())}: {error}"
            ) from None


class SimulationResult(Shown, SimulationSummary, frozen=True):
    """Outcome of a simulated fleet; see :class:`SimulationSummary`."""

    def show(self, console: Console) -> None:
        """Print the answer, and the facts behind it."""
        print_simulation(self, console)


class SweepResult(Shown, SweepDocument, frozen=True):
    """Outcomes of a grid of simulated fleets; see :class:`SweepDocument`."""

    def show(self, console: Console) -> None:
        """Print a row for each combination."""
        print_sweep(self, console)

    def chart(self) -> str:
        """Return the chart of ``simulate --sweep --report`` as an SVG."""
        from ls_edge.report.charts import svg_of
        from ls_edge.report.charts.sweep_chart import missed_by_value

        return svg_of(missed_by_value(self))


@dataclass(frozen=True)
class Fleet:
    """A model, the devices that a simulated fleet repeats, and settings."""

    asked: SimulationSettings
    bundle: Bundle | None
    """None for a model with known sizes only."""
    problem: PlanningProblem
    assumptions: Sequence[str]

    @classmethod
    def open(cls, bundle: str | Path | None, profiles: Sequence[str], **settings: Any) -> Fleet:
        """Read a bundle and profiles; ``settings`` are :class:`SimulationSettings`."""
        asked = SimulationSettings.of(settings)
        model = asked.model(bundle)
        inputs = {name: getattr(asked, name) for name in _PLANNING}
        problem, assumptions = problem_of(model, read_inputs(profiles, **inputs, objective="throughput"))
        if isinstance(model, ModelSizes):
            assumptions += [
                "every block takes the time and memory of a block of the profiles, whatever model they are of",
                "images have 224 pixels, and answers 1,000 classes",
            ]
            return cls(asked, None, problem, assumptions)
        return cls(asked, model, problem, assumptions)

    def prepare(self, asked: SimulationSettings) -> tuple[list[Site], SimulationContext]:
        """Plan the sites."""
        policy = find_policy(asked.policy)
        if self.bundle is not None:
            check_policy(self.bundle, policy)
        skips = SourceSettings.of({"policy": asked.policy, "max_skips": asked.max_skips}).skips_of(
            self.problem.num_blocks
        )
        churn = read_losses(asked.churn)
        shared = {name: value for name, value in msgspec.structs.asdict(asked).items() if name in _SHARED}
        shared |= {"execute": asked.execute or 0, "max_skips": skips}
        settings = FleetSettings(**shared, outage_s=max((loss.down for loss in churn), default=0.0))
        problem = replace(self.problem, max_replicas=asked.max_replicas)
        sites, assumed = sites_of(problem, settings, site_size=asked.site_size, churn=churn)
        context = simulation_context(
            sites,
            bundle_id="" if self.bundle is None else self.bundle.manifest.bundle_id,
            churn=asked.churn,
            assumptions=[*self.assumptions, *assumed],
        )
        return sites, context

    def simulate(
        self, executor: Executor | None, on_progress: OnProgress
    ) -> tuple[SimulationResult, list[SiteOutcome]]:
        """Simulate all sites, and run some of the orders."""
        if (self.asked.execute is None) != (self.asked.data is None):
            raise UsageError("orders run on labeled images: give both --execute N and --data DATA")
        images = None if self.asked.data is None else open_data(self.asked.data, "eval")
        if images is not None and self.bundle is not None:
            if len(images) < (self.asked.execute or 0):
                raise UsageError(
                    f"--execute {self.asked.execute} needs as many images, {self.asked.data} has {len(images)}; give "
                    "more images, or a smaller number"
                )
            about = self.bundle.manifest
            images = images_for(images, about.trained_on, about.classes, self.asked.execute, warn_in_python)
        sites, context = self.prepare(self.asked)
        if self.asked.until is not None and not any(loss.per_second(1) for loss in sites[0].churn):
            raise UsageError(
                "--until repeats until enough outages were seen; give --churn up=1h,down=3m, or a trace with losses, "
                "too"
            )
        outcomes = simulate_fleet(sites, executor, lambda done, total: on_progress(done, total, "requests"))
        found = msgspec.structs.asdict(summarize_simulation(outcomes, context))
        if images is not None:
            found |= self._run_orders([order for one in outcomes for order in one.orders], images)
        return SimulationResult(**found), outcomes

    def _run_orders(self, orders: list[Arrangement], images: ImageSet) -> dict[str, Any]:
        """Run orders through the engines of this machine, each on another image, and return the accuracy."""
        random.Random(self.asked.seed).shuffle(orders)
        wanted = orders[: self.asked.execute]
        if not wanted:
            return {}
        assert self.bundle is not None
        with Pipeline.open(self.bundle, threads=1) as pipeline:
            batches = iterate_batches(images, Preprocessor(self.bundle.manifest.image), 1)
            hits = [
                bool(pipeline.forward(pixels, order).argmax() == labels[0])
                for (pixels, labels), order in zip(batches, wanted, strict=False)
            ]
        return {
            "top1": sum(hits) / len(hits),
            "top1_interval": Interval(*(wilson(sum(hits), len(hits)) or (0.0, 1.0))),
            "executed": len(hits),
        }

    def sweep(
        self,
        sweep: dict[str, list[str]],
        out: Path | None,
        executor: Executor | None,
        on_progress: OnProgress,
    ) -> SweepResult:
        """Simulate all combinations of a grid that the file ``out`` lacks."""
        if self.asked.until is not None or self.asked.execute is not None:
            raise UsageError("--sweep has --seeds instead of --until, and no --execute; leave them out")
        prepared = [self.prepare(self.asked.with_values(values)) for values in combinations(sweep)]
        read = f"{self.problem} {read_losses(self.asked.churn)}"
        digest = hashlib.sha256(read.encode()).hexdigest()[:16]
        document = SweepDocument(sweep, self.asked.seeds, f"{msgspec.structs.asdict(self.asked)} {digest}", [])
        if out is not None:
            document = continued(document, out)
        found = run_sweep(
            document, prepared, path=out, executor=executor, on_step=lambda d, total: on_progress(d, total, "cells")
        )
        return SweepResult(**msgspec.structs.asdict(found))


def check_grid(sweep: Mapping[str, Any] | None, seeds: int, out: str | Path | None) -> None:
    """Raise :class:`UsageError` if settings of a grid are given without one."""
    if not sweep and (seeds != 1 or out is not None):
        raise UsageError("--seeds and --out are for --sweep; add one, or use --seed, --until 10%, and --json > FILE")


_SHARED = set(FleetSettings.__struct_fields__) & set(SimulationSettings.__struct_fields__)
_PLANNING = ("source", "links", "codec", "mbit", "link_ms", "batch", "max_replicas", "allow_throttled")


@overload
def simulate(
    bundle: str | Path | None, profiles: Sequence[str], *, sweep: None = None, **settings: Any
) -> SimulationResult: ...
@overload
def simulate(
    bundle: str | Path | None, profiles: Sequence[str], *, sweep: Mapping[str, Any], **settings: Any
) -> SweepResult: ...


def simulate(
    bundle: str | Path | None,
    profiles: Sequence[str],
    *,
    sweep: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    executor: Executor | None = None,
    on_progress: OnProgress = ignore_progress,
    **settings: Any,
) -> SimulationResult | SweepResult:
    """Simulate a fleet, or with ``sweep`` all combinations of values, as ``ls-edge simulate``.

    ``profiles`` are files, or ``"NAME,NAME=FILE"``; ``settings`` are :class:`SimulationSettings`. ``sweep`` maps a
    setting to its values: a sequence, or text as in ``--sweep`` (``"1m,1h"``). Sites and seeds are
    independent tasks of ``executor``, any of ``concurrent.futures``, such as ``client.get_executor()`` of Dask; without
    it, they run one after the other.
    """
    check_grid(sweep, settings.get("seeds", 1), out)
    churn = settings.get("churn", ())
    fleet = Fleet.open(bundle, profiles, **{**settings, "churn": (churn,) if isinstance(churn, str) else churn})
    if sweep is None:
        return fleet.simulate(executor, on_progress)[0]
    listed = {key: [values] if isinstance(values, (str, int, float)) else values for key, values in sweep.items()}
    texts = [f"{key.replace('_', '-')}={','.join(map(str, values))}" for key, values in listed.items()]
    return fleet.sweep(parse_sweep(texts, SWEPT), None if out is None else Path(out), executor, on_progress)
