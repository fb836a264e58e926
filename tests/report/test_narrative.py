"""The sentences at the top of a page."""

import io

from rich.console import Console

from ls_edge.report.tables import summary_table
from tests.report.drawing import data_of, histogram, narrative, record, spec_of


def test_the_reasons_for_skipped_blocks_are_named():
    why = "block 1 of band [1-2] (2 of 2) had no reachable holder"
    gone = [record(id=n, degraded=True, skipped=(1,), why_skipped=why) for n in range(3)]
    late = record(id=3, degraded=True, skipped=(2,), why_skipped="block 2 of band [1-2] (2 of 2) did not run in time")
    data = data_of([*gone, late, record(id=4)])
    assert data.summary.skips.reasons == {why: 3, late.why_skipped: 1}
    assert f"4 answers had to skip blocks, 3 of them because {why}." in narrative(data)
    assert f"3 answers had to skip blocks because {why}." in narrative(data_of(gone))
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_table(data.summary))
    assert f"3 answers: {why}" in console.file.getvalue()


def test_a_single_image_is_singular():
    data = data_of([record()])
    assert narrative(data).startswith("The one image was answered through 2 peers, in 12.0 ms.")
    assert "Histogram of 1 answer." in spec_of(histogram(data))["description"]
