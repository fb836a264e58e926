"""``ls-edge analyze TRACE``: orders, skipped blocks and the images that depend on them."""

import json

import msgspec
import pytest

from ls_edge.analysis.trace import TraceAnalysis
from ls_edge.core.records import RequestRecord, encode_record
from ls_edge.data.datasets import open_data
from ls_edge.evaluation.run_summary import wilson

NAMES = [image.name for image in open_data("digits", "eval").images]


def record(number, image, label, prediction, blocks, skipped=(), waves=None, error=None):
    return RequestRecord(
        id=number, image=image, label=label, prediction=prediction, latency_us=900, degraded=bool(skipped),
        error=error, skipped=skipped, attempts=1, logits=None,
        waves=waves or ((tuple((block, "a") for block in blocks),),),
    )  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    """Image 0 depends on the order, image 1 on block 2; image 2 is wrong once, image 3 fails."""
    zero, one, two, three = NAMES[0], NAMES[40], NAMES[80], NAMES[120]
    lines = [
        record(0, zero, 0, 0, (0, 1, 2)),
        record(1, zero, 0, 5, (1, 0, 2)),
        record(2, zero, 0, 0, (0, 1, 2)),
        record(3, one, 1, 1, (0, 1, 2)),
        record(4, one, 1, 7, (0, 1), (2,)),
        record(5, two, 2, 3, (0, 1), (2,)),
        record(6, three, 3, None, (), error="BudgetExceeded: late"),
        record(7, three, 3, 3, (), waves=((((0, "a"),), ((1, "b"),)), (((2, "a"),),))),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(encode_record(line) + b"\n" for line in lines))
    return path


def test_the_document_counts_orders_skips_and_mistakes(command, trace):
    code, out, err = command("analyze", trace, "--data", "digits", "--json")
    assert code == 0, err
    found = msgspec.json.decode(out, type=TraceAnalysis)
    assert (found.requests, found.failed, found.orders) == (8, 1, 4)
    assert (found.all.answers, found.all.top1) == (7, pytest.approx(4 / 7))
    assert {one.of: (one.answers, one.top1) for one in found.by_order} == {
        "0 1 2": (3, 1.0), "0 1": (2, 0.0), "0+1 / 2": (1, 1.0), "1 0 2": (1, 0.0),
    }  # fmt: skip
    assert found.by_order[0].interval == pytest.approx(wilson(2, 2))  # two images
    assert [(one.of, one.answers) for one in found.by_skips] == [("0", 5), ("1", 2)]
    (skipped,) = found.by_block
    assert (skipped.block, skipped.without.top1, skipped.with_it.top1) == (2, 0.0, pytest.approx(0.8))
    assert found.mistakes_after_skips == 2
    assert [(one.image, one.right_otherwise) for one in found.mistakes] == [(NAMES[40], True), (NAMES[80], False)]
    assert (found.repeated, found.dependent) == (2, 2)
    assert [(one.image, one.predictions, one.same) for one in found.images] == [
        (NAMES[40], {"1": 1, "7": 1}, 0.5), (NAMES[0], {"0": 2, "5": 1}, pytest.approx(2 / 3)),
    ]  # fmt: skip


@pytest.mark.leaks_ok  # what draws keeps threads for the process
def test_the_page_shows_the_images(command, trace, tmp_path):
    code, out, err = command("analyze", trace, "--data", "digits", "--report", tmp_path / "t.html")
    assert code == 0, err
    assert "7 answers took 4 orders; the most frequent one, 0 1 2, 42.9 % of them" in out
    assert "Block 2 was missed most: 0.0 % right without it in 2 answers, 80.0 % with it" in out
    assert "2 wrong answers had skipped blocks; 1 of these images were right" in out
    page = (tmp_path / "t.html").read_text()
    assert page.count("data-chart=") == 3
    assert page.count('<img src="data:image/png;base64,') == 4
    assert "<b>7</b>, not 1; without 2, right with all blocks" in page


def test_options_for_models_and_broken_lines_are_refused(command, trace, tmp_path):
    code, _, err = command("analyze", trace, "--data", "digits", "--what", "slots")
    assert (code, "which has no second model and no --what" in err) == (2, True)
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(trace.read_bytes() + b'{"id":8}\n')
    code, _, err = command("analyze", broken, "--data", "digits")
    assert (code, "line 9: not a line of a trace" in err) == (1, True)


def test_ten_thousand_requests_are_read_line_by_line(command, trace, tmp_path):
    many = tmp_path / "many.jsonl"
    many.write_bytes(trace.read_bytes() * 1250)
    code, out, err = command("analyze", many, "--data", "digits", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["requests"], found["mistakes_after_skips"], len(found["mistakes"])) == (10_000, 2_500, 2)
