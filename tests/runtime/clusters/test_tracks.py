"""Waves of tracks between real processes replay, share the work, and survive faults like chains do."""

from concurrent.futures import FIRST_COMPLETED, wait

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.data.datasets import open_data
from tests.faults.engines import Faults

SLOW = Faults(least_ms=8.0)
"""Blocks so slow that waves pay off; the engines sleep, so that two cores are enough."""


@pytest.fixture
def slow(start_peers):
    """Three peers with all blocks, as slow as boards."""
    peers = start_peers(dict.fromkeys("abc", range(6)))
    for name in "abc":
        peers.set_faults(name, SLOW)
    return peers


@pytest.fixture
def source(slow, open_source):
    return open_source(slow.path, policy="parallel", waves=2, budget_ms=15_000)


@pytest.fixture
def pictures(tiny_bundle):
    opened = open_data("digits", "eval").take(40)
    return [image.read() for image in opened.images]


def ask(source, pictures):
    """Submit pictures one after the other, like a camera."""
    arrays = [source.preprocess(picture) for picture in pictures]
    return arrays, [source.submit(array).result(20) for array in arrays]


def in_waves(source, pictures, count):
    """Submit pictures until ``count`` of the answers ran in waves: peers measure their blocks first, and a loaded
    machine may run many images in chains."""
    arrays, answers = [], []
    while sum(not answer.record.is_plain for answer in answers) < count:
        some, got = ask(source, pictures[:8])
        arrays, answers = [*arrays, *some], [*answers, *got]
        assert len(answers) < 400, "no request ran in waves"
    return arrays, answers


def test_an_image_runs_on_several_peers_in_parallel_and_replays(source, slow, pictures, tiny_bundle, assert_replays):
    arrays, answers = in_waves(source, pictures, 10)
    assert_replays(tiny_bundle, arrays, answers)
    blocks, most = list(range(Bundle.open(tiny_bundle).num_blocks)), []
    for record in (answer.record for answer in answers if not answer.record.is_plain):
        assert not record.degraded
        assert sorted(record.arrangement.order) == blocks
        ran = [holder for wave in record.waves for track in wave for _, holder in track]
        most.append(max(map(ran.count, ran)))
        joiners = [visit for visit in record.visits if visit.tracks]
        rows = [track for visit in joiners for track in visit.tracks if track.blocks]
        assert {track.holder for track in rows} >= {
            holder for w in record.waves if len(w) > 1 for t in w for _, holder in t
        }
        assert all(0 <= track.begin_us < track.end_us for track in rows)
        inside = sum(v.queue_us + v.engine_us + v.codec_us + v.wait_us + record.hop_us for v in record.visits)
        whole = inside + record.stem_us + record.head_us + record.hop_us
        assert whole == pytest.approx(record.latency_us, rel=0.02, abs=200)
    assert sorted(most)[len(most) // 2] <= len(blocks) * 2 // 3  # shared work is what makes waves faster


def test_faults_in_the_middle_of_waves_lose_no_request(source, slow, pictures, tiny_bundle, assert_replays):
    """Peers are killed and hang in turn."""
    in_waves(source, pictures, 6)
    arrays = [source.preprocess(picture) for picture in pictures]
    futures = []
    for index, array in enumerate(arrays):
        futures.append(source.submit(array))
        wait(futures[-4:], 20, FIRST_COMPLETED)  # at most four in flight, so that faults meet requests in any stage
        turn = index // 12
        name, dies = "abc"[turn % 3], turn % 2 == 0
        if index % 12 == 4:
            slow.kill(name) if dies else slow.set_faults(name, Faults(hang=True))
        elif index % 12 == 10:
            if dies:
                slow.start(name)
                slow.wait_warm(name)
            else:
                slow.set_faults(name, SLOW)
    answers = [future.result(20) for future in futures]
    assert not any(answer.degraded for answer in answers)
    assert any(not answer.record.is_plain for answer in answers)
    assert_replays(tiny_bundle, arrays, answers)
