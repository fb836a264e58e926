"""Tables and the live view, on a terminal and into a file."""

import io
import re
import threading

import msgspec
from rich.console import Console

from ls_edge.core.records import PeerEvent, PeerState, RunContext
from ls_edge.evaluation.run_summary import summarize
from ls_edge.report.html import write_report
from ls_edge.report.progress import RunProgress
from ls_edge.report.tables import comparison_table, peers_table, print_summary
from ls_edge.report.terminal import print_table


def console(terminal, width=100):
    colors = "standard" if terminal else None
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=colors, legacy_windows=False)


def written(console):
    return console.file.getvalue()


def test_tables_into_a_file_are_plain(run_with_loss):
    out = console(terminal=False)
    print_summary(run_with_loss.summary, out)
    text = written(out)
    assert text.isascii()
    assert "\x1b" not in text
    assert "400 of 400" in text
    assert "board-b  3-5" in text
    assert "lost once" in text
    for value in ("p50", "p95", "p99", "max", "accuracy", "throughput", "degraded", "hops"):
        assert value in text


def test_tables_go_to_standard_output(run_with_loss, capsys):
    print_summary(run_with_loss.summary)
    captured = capsys.readouterr()
    assert "throughput" in captured.out
    assert "…" not in captured.out
    assert captured.err == ""


def test_tables_on_a_terminal_have_color(run_with_loss):
    out = console(terminal=True)
    print_summary(run_with_loss.summary, out, title="A run")
    assert "\x1b[" in written(out)
    assert "A run" in written(out)


def test_a_narrow_terminal_keeps_the_names_of_rows(run_with_loss):
    out = console(terminal=False, width=60)
    print_summary(run_with_loss.summary, out)
    assert "skipped blocks" in written(out)


def test_the_terminal_and_the_page_write_the_same_numbers(run_with_loss, tmp_path):
    run = run_with_loss
    summary = msgspec.structs.replace(run.summary, throughput=2557.9, duration_s=5.73)
    out = console(terminal=False)
    print_summary(summary, out)
    write_report(tmp_path / "r.html", summary, run.records, run.events)
    page = re.sub(r"<[^>]*>", "", (tmp_path / "r.html").read_text(encoding="utf-8")).replace("\N{NO-BREAK SPACE}", " ")
    assert "medians per hop: wire 0.38 ms" in written(out)
    assert "medians per hop: 0.38 ms wire" in page
    for text in (written(out), page):
        assert "2,558" in text
        assert "2557.9" not in text


def test_comparison(run_with_loss, simulated):
    out = console(terminal=False, width=140)
    bad = simulated(100, quality=0.1)
    runs = [("shuffled", run_with_loss.summary), ("unshuffled [red]", bad.summary)]
    print_table(comparison_table(runs, title="Two models"), out)
    text = written(out)
    assert "unshuffled [red]" in text
    assert f"{100 * bad.summary.top1:.1f} %" in text
    assert comparison_table([]).row_count == 0


def test_an_empty_run_has_tables_too():
    out = console(terminal=False)
    print_summary(summarize([], [], RunContext()), out)
    assert "0 of 0" in written(out)
    assert peers_table(summarize([], [], RunContext())).row_count == 0


def test_progress_into_a_file_says_events_and_the_end(run_with_loss):
    out = console(terminal=False)
    with RunProgress(400, run_with_loss.context.peers, console=out, line_every_s=1e9) as progress:
        progress.note("waiting for block 3")
        for event in run_with_loss.events:
            progress.event(event)
        for record in run_with_loss.records:
            progress.record(record)
    lines = written(out).splitlines()
    assert lines[0] == "run: waiting for block 3"
    assert "board-b lost (the connection was closed)" in lines[1]
    assert "board-b is back" in lines[2]
    assert lines[3].startswith("run: 400/400")
    assert f"{run_with_loss.summary.degraded} degraded" in lines[3]
    assert "3 of 3 peers alive" in lines[3]
    assert len(lines) == 4
    assert "\x1b" not in written(out)


def test_times_of_progress_count_from_the_start_of_the_run():
    out = console(terminal=False)
    progress = RunProgress(1, ["a"], console=out)
    with progress:  # 50 seconds after the source was opened, as with a long wait for holders
        progress.event(PeerEvent(50_000_000, "a", PeerState.LOST, ""))
    assert re.search(r"run: \d\.\d\d s: a lost", written(out))


def test_progress_lines_come_at_their_interval(run_with_loss):
    out = console(terminal=False)
    with RunProgress(3, console=out, line_every_s=0.0) as progress:
        for record in run_with_loss.records[:3]:
            progress.record(record)
    assert [line.split()[1] for line in written(out).splitlines()] == ["1/3", "2/3", "3/3", "3/3"]


def test_progress_on_a_terminal(run_with_loss, wait_until):
    out = console(terminal=True)
    before = threading.active_count()
    with RunProgress(400, run_with_loss.context.peers, console=out, label="digits") as progress:
        for event in run_with_loss.events[:-1]:
            progress.event(event)
        for record in run_with_loss.records:
            progress.record(record)
    wait_until(lambda: threading.active_count() == before)
    text = written(out)
    assert "digits" in text
    assert "400/400" in text
    assert "(lost)" in text


def test_a_peers_name_cannot_write_to_the_terminal():
    out = console(terminal=False)
    with RunProgress(1, ["[bold]x"], console=out) as progress:
        progress.event(PeerEvent(0, "\x1b]0;title\x07[bold]x", PeerState.LOST, "\x1b[2J"))
    assert "\x1b" not in written(out)
    assert "[bold]x lost" in written(out)


def test_many_threads_may_record(run_with_loss):
    out = console(terminal=False)
    with RunProgress(4000, console=out, line_every_s=1e9) as progress:
        threads = [
            threading.Thread(target=lambda: [progress.record(r) for r in run_with_loss.records]) for _ in range(10)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "4,000/4,000" in written(out)
