"""``ls-edge run``: answer images through the peers that can be reached, and measure it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ls_edge.cli import DEGRADED, Command

if TYPE_CHECKING:
    from ls_edge.datasets import ImageRef, ImageSet
    from ls_edge.errors import DataError
    from ls_edge.runtime.source import Source

_WAIT_READY = 5.0


@click.command(cls=Command, short_help="Answer images through the peers that can be reached.")
@click.option("--peers", required=True, type=click.Path(path_type=Path), help="The peers.yaml of all machines.")
@click.option("--bundle", required=True, type=click.Path(path_type=Path), help="Folder of the exported model.")
@click.option("--data", required=True, help="Folder of class folders, a tar of one, or 'digits'.")
@click.option(
    "--policy", type=click.Choice(["nearest", "sequential", "fastest", "random", "quality", "parallel"]),
    default="nearest", show_default=True, help="How the next block is chosen.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), help="Images to answer; more than there are repeats them.")
@click.option("--concurrency", type=click.IntRange(min=1), default=4, show_default=True, help="Requests at once.")
@click.option(
    "--budget-ms", type=click.FloatRange(min=1), default=10_000.0, show_default=True, help="Time for a request."
)
@click.option("--max-skips", type=click.IntRange(min=0), help="Blocks an answer may leave out.  [default: a quarter]")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the orders of the policy random.")
@click.option(
    "--price", type=click.FloatRange(min=0, max=1e6), default=1.0, show_default=True,
    help="What a second is worth to the policy quality, in nats of log-likelihood.",
)  # fmt: skip
@click.option(
    "--waves", type=click.IntRange(min=1), default=2, show_default=True,
    help="Waves in which the policy parallel runs a model; fewer are faster.",
)  # fmt: skip
@click.option(
    "--late-tracks", type=click.Choice(["later", "skip"]), default="later", show_default=True,
    help="Policy parallel: blocks of a track that does not come back run later, or are skipped.",
)  # fmt: skip
@click.option("--via", type=click.Choice(["peers", "source"]), default="peers", show_default=True, help="Way of a hop.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads of stem and head.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("--report", type=click.Path(path_type=Path), help="Write an HTML report with pictures.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a JSON line a request.")
@click.option("--secret-key", type=click.Path(path_type=Path), help="NAME.key_secret, where peers.yaml has keys.")
@click.option("--strict-bundle", is_flag=True, help="Use only peers that serve this very bundle.")
@click.option("--log-json", is_flag=True, help="Log lines as JSON.")
def command(
    peers: Path, bundle: Path, data: str, policy: str, limit: int | None, concurrency: int, budget_ms: float,
    max_skips: int | None, seed: int, price: float, waves: int, late_tracks: Literal["later", "skip"], via: str,
    threads: int, as_json: bool, report: Path | None, trace: Path | None, secret_key: Path | None,
    strict_bundle: bool, log_json: bool,
) -> int:  # fmt: skip
    """Send images through the peers of peers.yaml and print accuracy, latency and who did what.

    Exit code 3 where an answer skipped blocks or a request failed.
    """
    from ls_edge.bundle import Bundle
    from ls_edge.errors import UsageError
    from ls_edge.logs import set_up
    from ls_edge.report.html import write_report
    from ls_edge.report.live import RunProgress
    from ls_edge.report.sketch import print_typical
    from ls_edge.report.tables import print_summary
    from ls_edge.runtime.measure import measure
    from ls_edge.runtime.source import Source
    from ls_edge.summary import summarise
    from ls_edge.trace import write_trace

    # What matters to a person is in the progress display; the log is for machines.
    set_up(as_json=log_json, level=logging.INFO if log_json else logging.ERROR)
    opened = Bundle.open(bundle)
    for path in (report, trace):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}; make it first")
    images = _images(data, limit)
    with Source.open(
        peers, opened, policy=policy, secret_key=secret_key, strict_bundle=strict_bundle, budget_ms=budget_ms,
        max_skips=max_skips, seed=seed, max_inflight=max(concurrency, 1), via_source=via == "source", threads=threads,
        price=price, waves=waves, late_tracks=late_tracks,
    ) as source:  # fmt: skip
        _wait_ready(source)
        progress = RunProgress(len(images), [peer.name for peer in source.peers.peers])

        def skip(image: ImageRef, error: DataError) -> None:
            progress.note(f"skipped {image.name}: {error}")

        with progress:
            measured = measure(
                source, images, concurrency=concurrency, on_record=progress.record, on_event=progress.event,
                on_skip=skip,
            )  # fmt: skip
    summary = summarise(measured.records, measured.events, measured.context)
    if measured.skipped_images:
        print(f"ls-edge: warning: {len(measured.skipped_images)} images could not be used", file=sys.stderr)  # noqa: T201
    if trace is not None:
        with trace.open("w", encoding="utf-8") as stream:
            write_trace(stream, measured.records)
    if report is not None:
        write_report(report, summary, measured.records, measured.events)
    if as_json:
        click.echo(summary.to_json())
    else:
        print_summary(summary)
        print_typical(measured.records)
    return DEGRADED if summary.degraded or summary.failed else 0


def _images(data: str, limit: int | None) -> ImageSet:
    from ls_edge.datasets import is_timm_name, open_data
    from ls_edge.errors import UsageError
    from ls_edge.install import install_command

    if not is_timm_name(data):
        return open_data(data, "eval").take(limit)
    try:
        from ls_edge.training.sources import open_images
    except ImportError:
        raise UsageError(
            f"{data!r} is a data set of timm's factory, which needs torch and timm: {install_command('train')}; or "
            "give a folder of class folders"
        ) from None
    return open_images(data, "eval").take(limit)


def _wait_ready(source: Source) -> None:
    """Wait for a warm holder of each block; start without the others, unless all peers are of another model."""
    from ls_edge.errors import ModelMismatch

    missing = source.wait_ready(_WAIT_READY)
    if not missing:
        return
    mismatched = source.mismatched
    if len(missing) == source.bundle.blocks and mismatched:
        raise ModelMismatch("; ".join(mismatched.values()))
    for message in mismatched.values():
        print(f"ls-edge: warning: {message}", file=sys.stderr)  # noqa: T201
    listed = ", ".join(map(str, missing))
    print(  # noqa: T201
        f"ls-edge: warning: after {_WAIT_READY:.0f} s no warm peer serves block {listed}; starting without",
        file=sys.stderr,
    )
