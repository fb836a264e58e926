"""``ls-edge run``: classify images through the reachable peers, and measure it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from ls_edge.api.cluster import Cluster
from ls_edge.cli import interrupts, options, source_options
from ls_edge.cli.command import Command, describe, exit_code
from ls_edge.cli.holder_check import wait_for_holders
from ls_edge.cli.inputs import open_peers, reload_source
from ls_edge.cli.metrics_listener import metrics_port
from ls_edge.cli.output import note_account, warn, warn_each
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LsEdgeError, UsageError, printable
from ls_edge.core.logs import set_up
from ls_edge.core.records import RequestRecord, TraceWriter
from ls_edge.core.text import counted, name_blocks
from ls_edge.data.content import Overlap
from ls_edge.data.datasets import ImageSet, image_warnings, open_data
from ls_edge.evaluation.run_summary import RunSummary, summarize
from ls_edge.report.progress import RunProgress
from ls_edge.report.runs.trace_events import write_trace_events
from ls_edge.report.tables import print_summary
from ls_edge.report.terminal import open_console
from ls_edge.runtime.source.run_dataset import DatasetRun, run_dataset
from ls_edge.runtime.source.source import Source

LOST_FOR_S = 0.5
"""Seconds until a block without a holder is displayed; a restart takes less."""
MAX_REMARKS = 10
"""Maximum number of idle peers that are named at the end of a run."""


@click.command(
    cls=Command,
    examples=(
        "ls-edge run --local 3 --bundle bundle --data digits",
        "ls-edge run --peers peers.yaml --bundle bundle --data digits",
        "ls-edge run --peers p.yaml --bundle b --data val --policy fastest --json",
        "ls-edge run --peers p.yaml --bundle b --data val --trace t.jsonl",
        "ls-edge run --peers p.yaml --bundle b --data digits --trace-events t.json",
        "ls-edge run --peers p.yaml --bundle b --data digits --wait 60 --max-skips 2",
        "ls-edge run --peers p.yaml --bundle b --data camera:0 --limit 1000",
    ),
)
@options.peers("peers.yaml, the same file on all machines; or use --local.")
@options.count("--local", "Peers to start on this machine for this run, instead of --peers.", most=64)
@options.SOURCE_BUNDLE
@options.text(
    "--data",
    "Images: class folders, a tar of them, 'digits', a timm data set, a video, a camera, or a stream.",
    "DATA",
    required=True,
)
@options.count("--limit", "Number of images; above the size of the data, images repeat.")
@options.concurrency(1_000_000)
@options.RATE
@source_options.SOURCE
@options.number(
    "--audit",
    "Fraction of answers to recompute, to find peers with wrong results.",
    "SHARE",
    most=1,
    default=0.0,
)
@options.wait("Time to wait for a warm holder of every block before the first image.")
@options.METRICS
@options.JSON
@options.REPORT
@options.output("--trace", "JSON lines to write, one per request.", ours=r'\{"id":')
@options.output(
    "--trace-events",
    "Chrome trace events to write, for ui.perfetto.dev or chrome://tracing.",
    ours=r'\{"displayTimeUnit',
)
@options.LOG_JSON
def command(
    peers: Path | None,
    local: int | None,
    bundle: Path | None,
    data: str,
    limit: int | None,
    concurrency: int,
    rate: float | None,
    wait: float,
    metrics: str | None,
    as_json: bool,
    report: Path | None,
    trace: Path | None,
    trace_events: Path | None,
    log_json: bool,
    **settings: Any,
) -> int:
    """Classify images through the reachable peers, and measure accuracy, latency, and throughput.

    --local starts peers on this machine for the run and ends them after it. DATA may be a video such as clip.mp4, or,
    with --limit, a camera ('camera', 'camera:1') or a stream (rtsp://..., http://...), whose newest frame is sent.

    Prints accuracy, latency, and the work of each peer. If a block has no holder after --wait and the policy may not
    skip it, no image is sent (exit code 1). The trace is written line by line. After Ctrl-C and SIGTERM, the summary,
    the report, and the trace events cover the requests so far.

    On SIGHUP, peers.yaml and the key are read again.

    Exit code 3 if an answer skipped blocks or a request failed, 1 if none was answered.
    """
    # People read the progress display; the log is for machines.
    set_up(as_json=log_json, level=logging.INFO if log_json else logging.ERROR)
    if local is not None and not options.is_typed("peers"):
        peers = None
    if (peers is None) == (local is None):
        raise UsageError("name the peers with --peers FILE, or start some on this machine with --local N; one of them")
    file = None if peers is None else open_peers(peers)
    opened = None if bundle is None else Bundle.open(bundle)
    whole = open_data(data, "eval")
    images = _checked(whole, limit, opened)

    with contextlib.ExitStack() as stack:
        reload = stack.enter_context(interrupts.ReloadRequest())
        if local is not None:
            if opened is None:
                raise UsageError("--local starts peers with a bundle; give --bundle")
            with Console(stderr=True).status(f"starting {counted(local, 'peer')}"):  # shown on a terminal only
                file = stack.enter_context(Cluster(opened, local)).peers
            settings["secret_key"] = None
        assert file is not None
        progress = RunProgress(len(images), [peer.name for peer in file.peers])
        settings.update(max_inflight=concurrency, model_wait_s=wait, on_event=progress.event)
        serve_metrics = stack.enter_context(metrics_port(metrics)) if metrics is not None else None
        source = stack.enter_context(Source.open(file, opened, **settings))
        images = images if opened is not None else _checked(whole, limit, source.bundle)
        if serve_metrics is not None:
            from ls_edge.runtime.serve.metrics import SourceCollector

            click.echo(f"ls-edge: metrics at {serve_metrics(SourceCollector(source))}", err=True)
        stop = stack.enter_context(interrupts.StopRequest())
        wait_for_holders(source, wait, stop)
        writer = stack.enter_context(TraceWriter(trace)) if trace is not None else None

        def on_record(record: RequestRecord) -> None:
            progress.record(record)
            if writer is not None:
                before = writer.problem
                writer.write(record)
                if writer.problem != before:
                    progress.note(writer.problem)

        with progress:
            measured = _with_flags(
                run_dataset(
                    source,
                    images,
                    concurrency=concurrency,
                    on_record=on_record,
                    on_skip=lambda name, error: progress.note(f"skipped {name}: {error}"),
                    on_tick=_watch_peers(source, progress, reload.take),
                    stop=lambda: bool(stop),
                    rate=rate,
                ),
                images.source,
            )
        problems = [] if measured.error is None else [str(measured.error)]
        if writer is not None:
            writer.close()
            problems += [writer.problem] if writer.problem else []
        summary = summarize(measured.records, measured.events, measured.context)
        problems += _print(summary, as_json=as_json)
        unused = [
            f"{name} took no part: {why}"
            for name, why in source.snapshot.problems.items()
            if name not in summary.peers or not summary.peers[name].requests
        ]
        warn_each(unused[:MAX_REMARKS])
        warn_each(_remarks(measured, summary))
        problems += _write_files(summary, measured, report, trace_events)
    if problems:
        raise LsEdgeError("; ".join(problems))
    if stop:
        warn(
            f"{interrupts.word()} after {summary.requests} of {counted(len(images), 'request')}; "
            f"{measured.given_up} in flight were given up"
        )
        return interrupts.exit_code()
    return exit_code(summary.answered, summary.degraded + summary.failed + _missing_frames(images, summary))


def _missing_frames(images: ImageSet, summary: RunSummary) -> int:
    """Return the number of images that a camera did not give before it ended, and warn about them."""
    missing = 0 if images.live is None else len(images) - summary.requests
    if images.live is not None and missing:
        warn(f"{images.live.problem}; {counted(missing, 'image')} of --limit {len(images)} did not come")
    return missing


def _checked(images: ImageSet, limit: int | None, bundle: Bundle | None) -> ImageSet:
    """Return the images of a run; if the model is known, refuse other classes, and warn."""
    taken = images.take(limit)
    if bundle is not None:
        warn_each(image_warnings(images))
        Overlap.of(taken, bundle.manifest.trained_on, warn)
        taken.labels_for(bundle.manifest.classes)
    return taken


def _print(summary: RunSummary, *, as_json: bool) -> list[str]:
    """Print the summary; return the problems."""
    note_account(summary.account)
    try:
        if as_json:
            click.echo(summary.to_json())
        else:
            print_summary(summary)
    except OSError as error:
        print_summary(summary, open_console(stderr=True))
        return [f"the summary could not be printed on standard output: {describe(error)}"]
    return []


def _write_files(
    summary: RunSummary, measured: DatasetRun, report: Path | None, trace_events: Path | None
) -> list[str]:
    """Write report and trace events, even if one of them fails, and return the problems."""

    def write_html(path: Path, *run: Any) -> None:
        from ls_edge.report.html import write_report

        write_report(path, *run, classes=measured.context.classes)

    problems = []
    for name, path, write in (("report", report, write_html), ("trace events", trace_events, write_trace_events)):
        if path is not None:
            try:
                write(path, summary, measured.records, measured.events)
            except Exception as error:  # noqa: BLE001  the run is over and its summary printed
                problems.append(str(error) if isinstance(error, LsEdgeError) else f"the {name} failed: {error!r}")
    return problems


def _remarks(measured: DatasetRun, summary: RunSummary) -> Iterator[str]:
    """Yield warnings about images and answers."""
    if measured.skipped_images:
        name, why = measured.skipped_images[0]
        yield f"{counted(len(measured.skipped_images), 'image')} could not be used, the first is {name}: {why}"
    if summary.missed:
        yield summary.missed
    if summary.distrust:
        yield summary.distrust
    if summary.audit is not None and summary.audit.warning:
        yield summary.audit.warning


def _with_flags(run: DatasetRun, data: str) -> DatasetRun:
    """Add every flag of this call with its value or default, except ``--json``, to the settings of a run.

    ``data`` is the visible name of the images.
    """
    flags = {**click.get_current_context().params, "data": data}
    in_force = {
        name: printable(value) if isinstance(value, Path) else value
        for name, value in flags.items()
        if name != "as_json"
    }
    run.context = msgspec.structs.replace(run.context, settings={**in_force, **run.context.settings})
    return run


def _watch_peers(source: Source, progress: RunProgress, wants_reload: Callable[[], bool]) -> Callable[[], None]:
    """Return a function to call periodically, which shows lost blocks that cannot be skipped.

    When ``wants_reload`` returns true, the source reads peers.yaml again.
    """
    missing_since: float | None = None

    def look() -> None:
        nonlocal missing_since
        if wants_reload():
            reload_source(source, progress.note)
        now = time.monotonic()
        missing = source.snapshot.missing_blocks
        if source.may_skip(missing):
            missing_since = None
            progress.warn("")
            return
        missing_since = now if missing_since is None else missing_since
        if now - missing_since >= LOST_FOR_S:
            progress.warn(
                f"{name_blocks(missing)} lost the last holder; requests wait for one until their budget "
                f"of {source.settings.budget_ms / 1e3:g} s ends (at most {counted(source.max_skips, 'block')} may "
                "be skipped)"
            )

    return look
