"""Engine work of a peer: failed blocks, calls without finite outputs, calls that hang, images to decode."""

import pytest

from ls_edge.core.parts import HEAD, STEM
from ls_edge.runtime.protocol.messages import Accept
from ls_edge.runtime.routing.state.events import Compute, Computed, ComputeFailed, Decode, Decoded, Forward
from ls_edge.runtime.routing.state.held_request import Stage
from tests.runtime.routing.driver import new_peer, run_of, transfer


def test_one_odd_image_does_not_take_a_block_out_of_service():
    peer = new_peer()
    for number in range(3):
        peer.gets("laptop", run_of(transfer(number)))
        compute = peer.only(Compute)
        peer(ComputeFailed(0, compute.transfers, "NaN", not_finite=True))
        (back,) = peer.sent(Forward, "laptop")
        assert back.returning == "not finite"
        peer.hears("laptop", Accept(back.transfer, 1))
        assert (0 in peer.machine.rules.engine.failed_blocks) == (number == 2)


def test_the_others_of_a_batch_go_on():
    peer = new_peer(max_batch=2)
    peer.meets("b", [2, 3])
    for number in range(3):
        peer.gets("laptop", run_of(transfer(number)))
    while len(peer.calls[0].transfers) == 1:
        peer.computes_next()
    odd, other = peer.calls[0].transfers
    blocks = peer.calls[0].blocks
    rest = Computed(blocks, (other,), (blocks,), 1000)
    peer(ComputeFailed(0, (odd,), "NaN", not_finite=True, rest=rest))
    assert [(m.transfer.request, m.returning) for m in peer.sent(Forward, "laptop")] == [(odd.request, "not finite")]
    (item,) = [item for item in peer.machine.held.values() if item.request == other.request]
    assert item.tokens == blocks
    assert not peer.machine.rules.engine.failed_blocks


def test_odd_requests_in_batches_with_fine_ones_never_fail_a_block():
    engine = new_peer([0], max_batch=2).machine.rules.engine
    fine = Computed((0,), (transfer(99),), ((0,),), 1000)
    for number in range(9):
        odd = tuple(map(transfer, range(number, 2 * number + 1)))
        assert not engine.count_failure(ComputeFailed(0, odd, "NaN", not_finite=True, rest=fine))
    alone = [engine.count_failure(ComputeFailed(0, (transfer(n),), "NaN", not_finite=True)) for n in range(3)]
    assert alone == [False, False, True]


def test_a_call_that_succeeds_begins_the_count_of_failures_again():
    engine = new_peer([0]).machine.rules.engine
    failed = ComputeFailed(0, (transfer(1),), "out of memory")
    assert [engine.count_failure(failed) for _ in range(2)] == [False, False]
    engine.measure(Computed((0,), (transfer(2),), ((0,),), 1000))
    assert [engine.count_failure(failed) for _ in range(3)] == [False, False, True]


def test_an_engine_that_hangs_is_announced_and_gives_back_what_has_not_begun():
    peer = new_peer()
    peer.meets("b", [0, 1])
    for number in range(3):
        peer.gets("laptop", run_of(transfer(number), budget=60.0))
    running = peer.calls[0].transfers
    said = peer.passes(1.0)
    assert "engine is stuck" in peer.notes()
    assert peer.machine.rules.announcer.state("laptop").stuck
    assert {f.transfer.request for f in said if isinstance(f, Forward)} == {transfer(n).request for n in (1, 2)}
    assert [request.stage for request in peer.machine.held.values() if request.transfer in running] == [Stage.RUNNING]
    peer.computes_next()
    assert "engine is back" in peer.notes()
    assert not peer.machine.rules.announcer.state("laptop").stuck


@pytest.mark.parametrize("why", ["", "no image: truncated"])
def test_an_image_is_decoded_before_the_stem_runs(why):
    peer = new_peer((STEM, 0, HEAD))
    peer.gets("laptop", run_of(remaining=(STEM, 0, HEAD)), "image")
    assert peer.only(Decode).image == "image"
    peer(Decoded(transfer(), "pixels", 5, why))
    if why:
        assert [message.returning for message in peer.sent(Forward, "laptop")] == ["no image: truncated"]
    else:
        assert peer.only(Compute).tokens == ("pixels",)
