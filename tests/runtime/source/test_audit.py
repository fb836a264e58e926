"""Audits count the holders of wrong answers, and none in an honest run."""

import itertools
import shutil
import threading
from collections import Counter

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.reference import relative_error
from ls_edge.runtime.source.source import Source
from tests.faults.engines import Faults, write


@pytest.fixture(autouse=True)
def not_nice(monkeypatch):
    """Give audits normal priority, so that they finish in time on a busy machine."""
    monkeypatch.setattr("ls_edge.runtime.source.audit.NICENESS", 0)


@pytest.fixture
def audited(tiny_bundle, serve_peers, open_source, tmp_path):
    """Serve peers, some of which lie, and open a source that audits."""

    def start(placement, faults=(), *, audit=1.0, each=None, of=tiny_bundle, **settings):
        for name, wrong in dict(faults).items():
            write(tmp_path / f"{name}.faults", wrong)
        return open_source(serve_peers(placement, faulty=True, **(each or {})), of, audit=audit, **settings)

    return start


def answer_all(source, pictures, at_once=4):
    """Classify images a few at a time, so that no audit is dropped."""
    answers = []
    for first in range(0, len(pictures), at_once):
        futures = [source.submit(image) for image in pictures[first : first + at_once]]
        answers += [future.result(20) for future in futures]
        source.finish_audits(60)
    return answers


def test_holders_of_wrong_answers_are_counted(audited, images):
    source = audited({"a": [0, 1, 2], "b": [3, 4, 5], "c": [3, 4, 5]}, {"c": Faults(lie=0.5)}, max_skips=0)
    answers = answer_all(source, images(24))
    audits = source.finish_audits(60)
    with Pipeline.open(source.bundle, threads=1) as chain:
        wrong = [
            answer.record.holders
            for image, answer in zip(images(24), answers, strict=True)
            if relative_error(answer.logits, chain.forward(image[np.newaxis], answer.arrangement)[0]) > 1e-3
        ]
    assert (audits.audited, audits.mismatched, audits.dropped) == (24, len(wrong), 0)
    assert {name: one.wrong for name, one in audits.suspects.items()} == Counter(itertools.chain(*wrong))
    assert audits.suspects["c"].wrong == len(wrong) >= 2
    assert audits.suspects["c"].difference > 0.01
    assert f"{len(wrong)} of 24 audited answers are wrong" in audits.warning
    assert f"c ({len(wrong)} times)" in audits.warning


@pytest.mark.parametrize(("codec", "policy"), [("raw", "parallel"), ("fp16", "random"), ("int8", "nearest")])
def test_honest_runs_match(audited, images, codec, policy):
    placement = {"a": [0, 1, 2], "b": [3, 4, 5], "c": range(6)}
    source = audited(placement, each={"codec": codec}, policy=policy)
    answer_all(source, images(12))
    found = source.finish_audits(60)
    assert (found.audited, found.mismatched, found.suspects) == (12, 0, {})
    assert found.warning == ""


def test_a_source_without_audits_reports_none(audited, images):
    source = audited({"a": range(6)}, audit=0.0)
    source.submit(images(1)[0]).result(20)
    assert source.audits is None
    assert source.finish_audits(0.1) is None
    assert not [thread for thread in threading.enumerate() if thread.name == "audit"]


@pytest.fixture
def slow_disk(tiny_bundle, monkeypatch):
    """The bundle, a function that makes reading its parts wait, and one that ends the wait."""
    may_read, opened = threading.Event(), Bundle.opened

    def open_later(bundle, part):
        assert may_read.wait(60)
        return opened(bundle, part)

    may_read.set()
    monkeypatch.setattr(Bundle, "opened", open_later)
    return tiny_bundle, may_read.clear, may_read.set


def test_answers_do_not_wait_for_audits_and_excess_audits_are_counted(audited, images, slow_disk, wait_until):
    folder, hold, release = slow_disk
    source = audited({"a": range(6)}, of=folder)
    hold()
    answers = [future.result(20) for future in [source.submit(image) for image in images(40)]]
    assert len(answers) == 40
    wait_until(lambda: source.audits.dropped == 24, what="24 dropped audits")
    release()
    found = source.finish_audits(60)
    assert (found.audited, found.matched, found.dropped) == (16, 16, 24)


def test_auditing_without_block_files_is_a_usage_error(tiny_bundle, tmp_path, write_peers):
    folder = tmp_path / "source-only"
    shutil.copytree(tiny_bundle, folder)
    (folder / Bundle.open(folder).part("block 2").file).unlink()
    peers = write_peers({"a": range(6)})
    with pytest.raises(UsageError, match=r"no blocks.02\.onnx.*copy the whole bundle"):
        Source.open(peers, folder, audit=0.01)
    Source.open(peers, folder).close()


def test_a_damaged_block_file_is_logged_and_no_peer_is_suspected(tiny_bundle, audited, images, tmp_path, caplog):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_bundle, folder)
    source = audited({"a": range(6)}, of=folder)
    (folder / source.bundle.part("block 0").file).write_bytes(b"x")
    source.submit(images(1)[0]).result(20)
    found = source.finish_audits(60)
    assert (found.audited, found.dropped, found.suspects) == (0, 1, {})
    assert "an audit failed" in caplog.text
