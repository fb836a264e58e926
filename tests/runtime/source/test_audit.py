"""Audits name the peer that returns wrong results, and none in an honest run."""

import json
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.records import AuditSummary, Suspect
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.routing.state.events import Returned
from ls_edge.runtime.source.audit import Audit, Auditor, Recomputation, Tolerances
from ls_edge.runtime.source.source import Source
from tests.faults.engines import Faults, write

CHAIN = {"a": [0, 1], "b": [2, 3], "c": [4, 5]}


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
    """Answer images a few at a time, so that no audit is dropped."""
    answers = []
    for first in range(0, len(pictures), at_once):
        futures = [source.submit(image) for image in pictures[first : first + at_once]]
        answers += [future.result(20) for future in futures]
        source.finish_audits(60)
    return answers


@pytest.mark.parametrize("liar", ["a", "b", "c"])
def test_only_the_liar_of_a_chain_is_named(audited, images, liar):
    source = audited(CHAIN, {liar: Faults(lie=1.0)}, max_skips=0)
    answers = answer_all(source, images(6), at_once=1)
    assert not any(answer.degraded for answer in answers)
    found = source.finish_audits(60)
    assert (found.audited, found.matched, found.dropped) == (6, 0, 0)
    assert list(found.suspects) == [liar]
    suspect = found.suspects[liar]
    assert (suspect.named, suspect.one_of) == (6, 0)
    assert suspect.difference > 0.01
    assert liar in found.warning


def test_an_occasional_liar_is_found_and_no_honest_peer_is_named(audited, images):
    source = audited(CHAIN, {"b": Faults(lie=0.5)}, max_skips=0)
    answer_all(source, images(24))
    found = source.finish_audits(60)
    assert found.matched + found.mismatched == found.audited == 24
    assert found.mismatched >= 6
    assert found.suspects["b"].named >= 1
    # If it happened to be honest in the challenge, it is one of all holders.
    assert all(suspect.named == 0 for name, suspect in found.suspects.items() if name != "b")
    assert found.suspects["b"].named + found.suspects["b"].one_of == found.mismatched


@pytest.mark.parametrize("codec", ["raw", "fp16", "int8"])
@pytest.mark.parametrize("policy", ["nearest", "random", "parallel"])
def test_honest_runs_match(audited, images, codec, policy):
    placement = {"a": [0, 1, 2], "b": [3, 4, 5], "c": range(6)}
    source = audited(placement, each={"codec": codec}, policy=policy)
    answer_all(source, images(12))
    found = source.finish_audits(60)
    assert (found.audited, found.mismatched, found.suspects) == (12, 0, {})
    assert found.warning == ""


def test_a_fraction_of_the_answers_is_audited(audited, images):
    source = audited({"a": range(6)}, audit=0.3)
    answer_all(source, images(100), at_once=10)
    found = source.finish_audits(60)
    assert 10 <= found.audited + found.dropped <= 55
    assert found.mismatched == 0
    assert found.share == 0.3


def test_a_source_without_audits_reports_none(audited, images):
    source = audited({"a": range(6)}, audit=0.0)
    source.submit(images(1)[0]).result(20)
    assert source.audits is None
    assert source.finish_audits(0.1) is None
    assert not [thread for thread in threading.enumerate() if thread.name == "audit"]


@pytest.fixture
def slow_disk(tiny_bundle, monkeypatch):
    """The bundle, a function that makes reading its parts wait, and one that ends the wait."""
    may_read, read = threading.Event(), Bundle.read

    def read_later(bundle, part):
        assert may_read.wait(60)
        return read(bundle, part)

    may_read.set()
    monkeypatch.setattr(Bundle, "read", read_later)
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


def test_audits_do_not_change_request_numbers(audited, images):
    source = audited(CHAIN, {"a": Faults(lie=1.0)}, max_skips=0)
    answers = answer_all(source, images(8))
    assert [answer.request for answer in answers] == list(range(8))
    assert source.finish_audits(60).waiting == 0


def test_close_does_not_wait_for_waiting_audits(audited, images, slow_disk):
    folder, hold, release = slow_disk
    source = audited({"a": range(6)}, of=folder)
    hold()
    for future in [source.submit(image) for image in images(10)]:
        future.result(20)
    source.close()
    release()
    for thread in threading.enumerate():
        if thread.name == "audit":
            thread.join(60)
    assert (source.audits.audited, source.audits.dropped) == (1, 9)


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


class Hops:
    """A challenge by hand: the tokens that each holder returned."""

    def __init__(self, bundle, image):
        self.bundle = bundle
        self.returns = []
        with Pipeline.open(bundle, threads=1) as chain:
            self.tokens = self.stem = chain.stem(image[np.newaxis])
        self.ran = ()

    def hop(self, holder, blocks, *, sender=None, spoil=False):
        with Pipeline.open(self.bundle, threads=1) as chain:
            for block in blocks:
                self.tokens = chain.block(block, self.tokens, len(self.ran))
                self.ran = (*self.ran, (block, holder))
        if spoil:
            self.tokens = self.tokens + np.float32(0.5)
        left = tuple(sorted(set(range(6)) - {block for block, _ in self.ran}))
        itinerary = Itinerary("laptop", "nearest", left, 0, True, waves=((self.ran,),) if self.ran else ())
        self.returns.append(Returned(0, sender or holder, itinerary, self.tokens))

    def judged(self, codec="raw"):
        """Suspects of an auditor that is given a wrong answer of x and y."""
        same = self.bundle.manifest.bundle_id

        def challenge(started):
            started.returns += self.returns
            started.on_end(started)

        recomputation = Recomputation(
            self.bundle, Tolerances(self.bundle.manifest, dict.fromkeys("abcxy", codec), lambda _: same)
        )
        auditor = Auditor(1.0, recomputation, challenge)
        answer = Itinerary("laptop", "nearest", (), 0, waves=((((0, "x"), (1, "y")),),))
        auditor.offer(Audit(0, self.stem, answer, np.zeros(10, np.float32)))
        auditor.finish(60)
        auditor.close()
        return {name: (one.named, one.one_of) for name, one in auditor.summary.suspects.items()}


@pytest.fixture
def hops(tiny_bundle, images):
    return Hops(Bundle.open(tiny_bundle), images(1)[0])


def test_only_the_first_wrong_hop_is_blamed(hops):
    hops.hop("a", [0, 1])
    hops.hop("b", [2, 3], spoil=True)
    hops.hop("c", [4, 5], spoil=True)
    assert hops.judged() == {"b": (1, 0)}


def test_a_peer_that_hands_on_tokens_of_another_is_suspected_with_it(hops):
    hops.hop("a", [0, 1, 2], sender="b", spoil=True)
    assert hops.judged() == {"a": (0, 1), "b": (0, 1)}


def test_a_peer_that_changes_tokens_without_running_a_block_is_named(hops):
    hops.hop("a", [0, 1])
    hops.hop("b", [], spoil=True)
    assert hops.judged() == {"b": (1, 0)}


def test_a_copy_on_another_path_is_compared_with_its_own_input(hops):
    stem = hops.tokens
    hops.hop("a", [0, 1])
    hops.tokens, hops.ran = stem, ()
    hops.hop("b", [0, 1, 2])
    hops.hop("c", [3, 4, 5])
    assert hops.judged() == {"x": (0, 1), "y": (0, 1)}


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_rounding_by_the_codec_is_tolerated_and_a_lie_is_not(hops, codec):
    hops.hop("a", [0, 1, 2])
    assert hops.judged(codec) == {"x": (0, 1), "y": (0, 1)}
    hops.tokens = hops.tokens * np.float32(1.5)
    hops.returns[-1] = Returned(0, "a", hops.returns[-1].itinerary, hops.tokens)
    assert hops.judged(codec) == {"a": (1, 0)}


def test_an_answer_that_no_challenge_explains_names_all_holders(hops):
    assert hops.judged() == {"x": (0, 1), "y": (0, 1)}


def test_a_warning_names_suspects_and_counts():
    known = {"b": Suspect(3, 1, 0.4), "a": Suspect(0, 1, 0.4)}
    text = AuditSummary(0.1, 40, 36, 4, 0, 0, known).warning
    assert text.startswith("4 of 40 audited answers are wrong: b (3 times) returned wrong results; other suspects: a")
    assert "the cause is one of a, c" in AuditSummary(0.1, 9, 8, 1, 0, 0, dict.fromkeys("ac", Suspect(0, 1))).warning


@pytest.mark.release
def test_a_run_with_a_liar_names_it_in_json_and_in_a_warning(start_peers, tiny_bundle):
    peers = start_peers(CHAIN)
    peers.set_faults("c", Faults(lie=1.0))
    command = [
        sys.executable, "-m", "ls_edge", "run", "--peers", str(peers.path), "--bundle", str(tiny_bundle),
        "--data", "digits", "--limit", "4", "--max-skips", "0", "--concurrency", "1", "--audit",
    ]  # fmt: skip
    on, off, table = (
        subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=False)
        for more in (["1", "--json"], ["0", "--json"], ["1"])
    )
    found = json.loads(on.stdout)["audit"]
    assert (found["share"], found["audited"], found["mismatched"]) == (1.0, 4, 4)
    assert list(found["suspects"]) == ["c"]
    assert found["suspects"]["c"]["named"] == 4
    for done in (on, table):
        assert "warning: 4 of 4 audited answers are wrong: c (4 times) returned wrong results" in done.stderr
    assert "4 answers recomputed, 4 differ" in table.stdout
    assert json.loads(off.stdout)["audit"] is None
    assert "warning" not in off.stderr
