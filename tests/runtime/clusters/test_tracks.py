"""Waves of tracks between real processes: exact, sooner, and as hard to lose as chains."""

import signal
import time

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.data.datasets import open_data
from ls_edge.runtime.source.source import Source
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults

SLOW = Faults(least_ms=8.0)
"""The tiny blocks take so long that side by side is worth its transfer; sleeping, so that two cores are enough."""


@pytest.fixture
def peers(tmp_path, tiny_bundle):
    """Three peers with every block, slow as boards are."""
    blocks = list(range(Bundle.open(tiny_bundle).num_blocks))
    with FaultyCluster(tmp_path / "peers", tiny_bundle, dict.fromkeys("abc", blocks)) as local:
        for name in "abc":
            local.set_faults(name, SLOW)
        local.wait_warm()
        yield local


@pytest.fixture
def source(peers, tiny_bundle):
    with Source.open(peers.path, tiny_bundle, policy="parallel", waves=2, budget_ms=15_000) as opened:
        assert opened.wait_ready() == ()
        yield opened


@pytest.fixture
def pictures(tiny_bundle):
    opened = open_data("digits", "eval").take(40)
    return [image.read() for image in opened.images]


def ask(source, pictures):
    """One after the other, as a camera that wants each answer soon."""
    arrays = [source.preprocess(picture) for picture in pictures]
    return arrays, [source.submit(array).result(20) for array in arrays]


def warmed_up(source, pictures):
    """Until the peers have learnt how long their blocks take."""
    for _ in range(6):
        _, answers = ask(source, pictures[:8])
        if sum(not answer.record.is_plain for answer in answers) >= 6:
            return
    pytest.fail("nothing ever ran side by side")


def test_an_image_runs_on_several_devices_at_once_and_replays(source, peers, pictures, tiny_bundle, assert_replays):
    warmed_up(source, pictures)
    arrays, answers = ask(source, pictures[:20])
    assert_replays(tiny_bundle, arrays, answers)
    waved = [answer.record for answer in answers if not answer.record.is_plain]
    assert len(waved) >= 15
    for record in waved:
        assert not record.degraded
        assert sorted(record.arrangement.order) == list(range(Bundle.open(tiny_bundle).num_blocks))
        joiners = [visit for visit in record.visits if visit.tracks]
        rows = [track for visit in joiners for track in visit.tracks if track.blocks]
        assert {track.holder for track in rows} >= {
            holder for w in record.waves if len(w) > 1 for t in w for _, holder in t
        }
        assert all(0 <= track.begin_us < track.end_us for track in rows)
        inside = sum(v.queue_us + v.engine_us + v.codec_us + v.wait_us + record.hop_us for v in record.visits)
        whole = inside + record.stem_us + record.head_us + record.hop_us
        assert whole == pytest.approx(record.latency_us, rel=0.02, abs=200)


def test_nobody_runs_more_than_a_share_of_the_blocks(source, pictures, tiny_bundle):
    """What makes it sooner, without a clock: no device has all of the work of an image."""
    warmed_up(source, pictures)
    _, answers = ask(source, pictures[:9])
    blocks = Bundle.open(tiny_bundle).num_blocks
    most = []
    for record in (answer.record for answer in answers if not answer.record.is_plain):
        ran = [holder for wave in record.waves for track in wave for _, holder in track]
        most.append(max(map(ran.count, ran)))
    assert len(most) >= 6
    assert sorted(most)[len(most) // 2] <= blocks * 2 // 3


@pytest.mark.parametrize("harm", ["kill", "stop", "hang"])
def test_harm_to_any_of_them_in_the_middle_of_waves_loses_nothing(
    source, peers, pictures, tiny_bundle, assert_replays, harm
):
    warmed_up(source, pictures)
    arrays = [source.preprocess(picture) for picture in pictures]
    futures = []
    for index, array in enumerate(arrays):
        futures.append(source.submit(array))
        time.sleep(0.03)
        name = "abc"[index // 12 % 3]
        if index % 12 == 4:
            {
                "kill": lambda name=name: peers.kill(name),
                "stop": lambda name=name: peers.signal(name, signal.SIGSTOP),
                "hang": lambda name=name: peers.set_faults(name, Faults(hang=True)),
            }[harm]()
        elif index % 12 == 10:
            {
                "kill": lambda name=name: (peers.start(name), peers.wait_warm(name)),
                "stop": lambda name=name: peers.signal(name, signal.SIGCONT),
                "hang": lambda name=name: peers.set_faults(name, SLOW),
            }[harm]()
    answers = [future.result(20) for future in futures]
    assert not any(answer.degraded for answer in answers)
    assert any(not answer.record.is_plain for answer in answers)
    assert_replays(tiny_bundle, arrays, answers)
    # The harmed holder, the keeper of the copy before and the source have the tokens, and each may finish.
    assert max(source.snapshot.duplicates.values(), default=0) <= 2


def test_late_tracks_may_be_left_out(peers, pictures, tiny_bundle, assert_replays):
    settings = {"policy": "parallel", "waves": 1, "on_straggler": "skip", "max_skips": 3, "budget_ms": 15_000}
    with Source.open(peers.path, tiny_bundle, **settings) as source:
        assert source.wait_ready() == ()
        warmed_up(source, pictures)
        arrays, answers = [], []
        for name in "abc":
            peers.set_faults(name, Faults(hang=True))
            some, got = ask(source, pictures[len(arrays) : len(arrays) + 2])
            arrays, answers = [*arrays, *some], [*answers, *got]
            peers.set_faults(name, SLOW)
            ask(source, pictures[:6])
    assert_replays(tiny_bundle, arrays, answers)
    left_out = [answer for answer in answers if answer.degraded]
    assert left_out
    for answer in left_out:
        assert 0 < len(answer.record.skipped) <= 3
        assert any(track.why for visit in answer.record.visits for track in visit.tracks)


def test_parallel_needs_peers_that_reach_one_another(peers, tiny_bundle):
    with pytest.raises(UsageError, match="parallel needs peers that reach one another"):
        Source.open(peers.path, tiny_bundle, policy="parallel", via_source=True)
