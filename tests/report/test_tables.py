import re

import msgspec

from ls_edge.core.text import show_ms
from ls_edge.report.html import write_report
from ls_edge.report.tables import comparison_table, print_summary
from ls_edge.report.terminal import print_table
from tests.report.terminals import console, written


def test_tables_into_a_file_are_plain(run_with_loss):
    out = console(terminal=False)
    print_summary(run_with_loss.summary, out)
    text = written(out)
    assert text.isascii()
    assert "\x1b" not in text
    assert not re.search(" $", text, re.M)
    assert "400 of 400" in text
    assert "board-b  3-5" in text
    assert "lost once" in text
    for value in ("p50", "p95", "p99", "max", "accuracy", "throughput", "degraded", "hops"):
        assert value in text


def test_tables_on_a_terminal_have_color(run_with_loss):
    out = console(terminal=True)
    print_summary(run_with_loss.summary, out)
    assert "\x1b[" in written(out)


def test_the_terminal_and_the_page_write_the_same_numbers(run_with_loss, tmp_path):
    run = run_with_loss
    summary = msgspec.structs.replace(run.summary, throughput=2557.9, duration_s=5.73)
    out = console(terminal=False)
    print_summary(summary, out)
    write_report(tmp_path / "r.html", summary, run.records, run.events)
    page = re.sub(r"<[^>]*>", "", (tmp_path / "r.html").read_text(encoding="utf-8")).replace("\N{NO-BREAK SPACE}", " ")
    wire = show_ms(summary.hops.wire_ms_p50)
    assert f"medians per hop: wire {wire}" in written(out)
    assert f"medians per hop: {wire} wire" in page
    for text in (written(out), page):
        assert "2,558" in text
        assert "2557.9" not in text


def test_a_comparison_has_a_row_for_each_run(run_with_loss, simulated):
    out = console(terminal=False, width=140)
    bad = simulated(100, quality=0.1)
    runs = [("shuffled", run_with_loss.summary), ("unshuffled [red]", bad.summary)]
    print_table(comparison_table(runs), out)
    text = written(out)
    assert "unshuffled [red]" in text
    assert f"{100 * bad.summary.top1:.1f} %" in text
    assert comparison_table([]).row_count == 0
