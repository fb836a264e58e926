import re
import threading

from ls_edge.core.peer_reports import PeerState
from ls_edge.core.records import PeerEvent
from ls_edge.report.progress import RunProgress, StepProgress
from tests.report.terminals import console, written


def test_progress_in_a_file_has_lines_for_events_and_the_end(run_with_loss):
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


def test_steps_in_a_file_say_how_far_they_are_and_for_how_long():
    out = console(terminal=False)
    with StepProgress("train", console=out, line_every_s=1e-9) as progress:
        for done in (10, 20):
            progress(done, 40, "epoch 1/2  35 images/s")
    first, second = written(out).splitlines()
    assert first == "train: epoch 1/2  35 images/s (10/40)"
    assert re.fullmatch(r"train: epoch 1/2  35 images/s \(20/40, \S+ s left\)", second)
    with StepProgress("train", console=(quiet := console(terminal=False)), line_every_s=60) as progress:
        progress(1, 2, "epoch 1/2")
    assert written(quiet) == ""  # a short training prints its epochs only


def test_times_of_progress_count_from_the_start_of_the_run():
    out = console(terminal=False)
    progress = RunProgress(1, ["a"], console=out)
    with progress:  # 50 seconds after the source was opened, as with a long wait for holders
        progress.event(PeerEvent(50_000_000, "a", PeerState.LOST, ""))
    assert re.search(r"run: \d\.\d\d s: a lost", written(out))


def test_progress_on_a_terminal_shows_counts_and_lost_peers(run_with_loss, wait_until):
    out = console(terminal=True)
    before = threading.active_count()
    with RunProgress(400, run_with_loss.context.peers, console=out, label="digits") as progress:
        for event in run_with_loss.events[:-1]:
            progress.event(event)
        for record in run_with_loss.records:
            progress.record(record)
    wait_until(lambda: threading.active_count() <= before)
    text = written(out)
    assert "digits" in text
    assert "400/400" in text
    assert "board-b lost" in text
    assert "2 of 3 peers alive" in text


def test_a_peers_name_cannot_write_to_the_terminal():
    out = console(terminal=False)
    with RunProgress(1, ["[bold]x"], console=out) as progress:
        progress.event(PeerEvent(0, "\x1b]0;title\x07[bold]x", PeerState.LOST, "\x1b[2J"))
    assert "\x1b" not in written(out)
    assert "[bold]x lost" in written(out)
