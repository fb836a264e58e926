"""Captured members against real processes: each lie of ``tests.faults.lies`` once, with keys.

Two honest peers hold every block, and so does the liar, which has a key and a place in ``peers.yaml``. Whatever it
does, every request is answered, in full and right, and when it is gone nothing of it is left at the honest.
"""

import contextlib
from collections import Counter

import numpy as np
import pytest
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.pipeline import Pipeline, relative_error
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import Complaint, Hello, Welcome
from ls_edge.runtime.source.image_encoding import encode_image
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.handshake import MAX_SOURCES_OF_ONE_KEY
from ls_edge.runtime.transport.keys import load_secret
from ls_edge.runtime.transport.problems import NOTES_A_MINUTE
from tests.faults.cluster import FaultyCluster
from tests.faults.lies import LIES

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq without CURVE")

LIAR, THIEF, LAPTOP = "mallory", "thief", "laptop"
HONEST = ("anna", "ben")
CREDITS = 8
"""What an idle peer offers a source: the other half of its 16 is for peers."""
REQUESTS = 24
ROUNDS = 20
"""Batches of images at most until a liar has got work of one of them."""
WAITS = {"silent", "mute", "slow", "progress", "growth", "releases", "hellos", "changes"}
"""Lies that cost a request a deadline, or a part of its budget: fewer of them, not to wait for long."""


@pytest.fixture(scope="module")
def peers(tiny_bundle, tmp_path_factory):
    """Two honest peers with everything, in processes of their own; a member and a source that may be captured."""
    with FaultyCluster(
        tmp_path_factory.mktemp("members"), tiny_bundle, dict.fromkeys(HONEST, "all"),
        members={LIAR: "all"}, sources=(LAPTOP, THIEF), keys=True,
    ) as local:  # fmt: skip
        local.wait_warm(*HONEST)
        yield local


@pytest.fixture
def lying(peers, wait_until):
    """Start a liar; it is gone, and nothing of it left at the honest, when the test is over."""
    started = []

    def start(lie):
        name = THIEF if LIES[lie].role == "source" else LIAR
        started.append(name)
        peers.start_liar(name, lie)
        return lambda: peers.liar_counts(name)

    yield start
    for name in started:
        peers.stop_liar(name)
    assert all(peers.alive(name) for name in HONEST)


def open_source(peers, bundle, **settings):
    settings = {"max_skips": 0, "budget_ms": 10_000, **settings}
    return Source.open(peers.path, bundle, secret_key=peers.secret_key(LAPTOP), **settings)


def credits_of(source):
    return [source.snapshot.peers[name].credits for name in HONEST]


def linked(source):
    """Names of the peers that the source has a link to."""
    return {name for name, view in source.snapshot.peers.items() if view.state != "lost"}


def answers_of(source, images, count):
    """Answers to so many images, a few at a time."""
    answers = []
    for begin in range(0, count, 6):
        futures = [source.submit(image) for image in images[begin : begin + 6]]
        answers += [future.result(30) for future in futures]
    return answers


def repeated(pictures, answers):
    """The pictures as often as they were asked for, ``[answers, 3, 16, 16]``."""
    return np.concatenate([pictures] * (len(answers) // len(pictures)))


def answers_until(done, ask):
    """Answers of as many rounds as it takes until it is so: which holder gets work is a matter of speed."""
    answers = ask()
    for _ in range(ROUNDS):
        if done(answers):
            return answers
        answers += ask()
    raise AssertionError(f"not so after {len(answers)} answers")


@pytest.mark.parametrize("lie", [n for n, lie in LIES.items() if not lie.spoils and not lie.needs_bands])
def test_all_is_answered_and_right_whatever_a_member_does(
    lie, peers, lying, tiny_bundle, images, assert_replays, wait_until
):
    counts = lying(lie)
    count = REQUESTS // 2 if lie in WAITS else REQUESTS
    pictures = images(count)
    with open_source(peers, tiny_bundle, budget_ms=5_000) as source:
        wait_until(lambda: set(HONEST) <= linked(source), what="the honest")
        if LIES[lie].role == "peer":
            wait_until(lambda: LIAR in linked(source), what="the liar")
        elif LIES[lie].tempts:  # a source acts on its own, as soon as it has started
            wait_until(lambda: counts().received > 0, what="an answer to the liar")
        answers = answers_until(
            lambda _: not LIES[lie].tempts or counts().received > 0, lambda: answers_of(source, pictures, count)
        )
        assert_replays(tiny_bundle, repeated(pictures, answers), answers)
        assert not any(answer.degraded for answer in answers)
        done = [step for answer in answers for step in answer.record.steps]
        assert {holder for _, holder in done} <= set(HONEST)
        if LIES[lie].turn is not None:
            wait_until(lambda: counts().sent > 0, what="the lie")
        peers.stop_liar(THIEF if LIES[lie].role == "source" else LIAR)
        wait_until(lambda: credits_of(source) == [CREDITS, CREDITS], 15.0, "all credits to be free again")


def thin_answers(source, bundle, done):
    """Answers to pixels that are sent as they are until it is so, and the relative errors of their logits."""
    preprocess, rng = Preprocessor(Bundle.open(bundle).manifest.image), np.random.default_rng(5)
    pixels = [rng.integers(0, 256, (20, 24, 3), np.uint8) for _ in range(12)]
    answers = answers_until(done, lambda: answers_of(source, pixels, len(pixels)))
    pixels *= len(answers) // len(pixels)
    with Pipeline.open(Bundle.open(bundle), threads=1) as pipeline:
        rights = [
            pipeline.forward(preprocess(encode_image(one).content)[None], answer.arrangement)[0]
            for one, answer in zip(pixels, answers, strict=True)
        ]
    return answers, [relative_error(a.logits, right) for a, right in zip(answers, rights, strict=True)]


@pytest.mark.parametrize(
    "lie", ["silent", "unreachable", "credit", "poisons", "skips", "waves", "bounces", "nan", "forges", "former"]
)
def test_images_are_answered_and_right_whatever_a_holder_of_stem_and_head_does(
    lie, peers, lying, tiny_bundle, wait_until
):
    counts = lying(lie)
    with open_source(peers, None) as source:
        wait_until(lambda: {*HONEST, LIAR} <= linked(source), what="all peers")
        answers, errors = thin_answers(source, tiny_bundle, lambda _: counts().received > 0)
        assert max(errors) < 1e-4
        assert not any(answer.degraded for answer in answers)
        peers.stop_liar(LIAR)
        wait_until(lambda: credits_of(source) == [CREDITS, CREDITS], 15.0, "all credits to be free again")


@pytest.mark.parametrize("lie", ["wrong", "blames"])
def test_an_audit_by_a_trusted_peer_names_a_liar_with_stem_and_head(lie, peers, lying, tiny_bundle, wait_until):
    lying(lie)
    with open_source(peers, None, audit=1.0, auditor="anna") as source:
        wait_until(lambda: {*HONEST, LIAR} <= linked(source), what="all peers")
        _, errors = thin_answers(source, tiny_bundle, lambda _: named(source.finish_audits(20)))
        found = source.finish_audits(20)
    wrong = sum(error > 1e-3 for error in errors)
    assert (found.mismatched, found.matched, found.dropped) == (wrong, len(errors) - wrong, 0)
    assert found.suspects[LIAR].named + found.suspects[LIAR].one_of == wrong > 0


def test_who_is_rejected_all_the_time_fills_no_log(peers, lying, tiny_bundle, wait_until, caplog):
    """Each message that was not believed was a line of its own."""
    lying("forges")
    with open_source(peers, tiny_bundle) as source:
        wait_until(
            lambda: LIAR in source.snapshot.rejected and source.snapshot.rejected[LIAR].count > 200, what="forgeries"
        )
    assert 0 < sum(record.message == "rejected" for record in caplog.records) <= 2 * NOTES_A_MINUTE


def test_one_key_does_not_take_the_room_of_all_sources(peers, tiny_bundle, images, wait_until):
    """A captured source could be 256 sources at once, so that nobody else was let in."""
    manifest = Bundle.open(tiny_bundle).manifest
    keys = load_secret(peers.secret_key(THIEF))
    poller, answers = zmq.Poller(), []
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        for number in range(MAX_SOURCES_OF_ONE_KEY + 6):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret
            dealer.curve_serverkey = peers.file.peer("anna").public_key.encode()
            dealer.connect(peers.file.peer("anna").address)
            name = f"{THIEF}.{number:08x}"
            dealer.send(framing.encode(Hello(name, "source", number, 0, manifest.model_id, manifest.bundle_id)))
            poller.register(dealer, zmq.POLLIN)

        def take():
            for dealer, _ in poller.poll(100):
                messages = framing.decode(dealer.recv())
                answers.extend(type(message) for message in messages if isinstance(message, Welcome | Complaint))
            return len(answers) == MAX_SOURCES_OF_ONE_KEY + 6

        wait_until(take, 20.0, "an answer to each")
        assert Counter(answers) == {Welcome: MAX_SOURCES_OF_ONE_KEY, Complaint: 6}
        with open_source(peers, tiny_bundle) as source:
            assert source.wait_ready(10) == ()
            assert len(answers_of(source, images(4), 4)) == 4
            wait_until(lambda: set(HONEST) <= linked(source), what="the honest")


def named(audit):
    return LIAR in audit.suspects and audit.suspects[LIAR].named > 0


def audited(peers, bundle, pictures, wait_until, found):
    """Answers until an audit has found enough, their pictures, and what the audit says."""
    with open_source(peers, bundle, audit=1.0) as source:
        wait_until(lambda: {LIAR, *HONEST} <= linked(source), what="all three")
        answers = answers_until(
            lambda _: found(source.finish_audits(30.0)), lambda: answers_of(source, pictures, len(pictures))
        )
        return answers, repeated(pictures, answers), source.finish_audits(30.0)


def wrong(bundle, pictures, answers):
    with Pipeline.open(Bundle.open(bundle), threads=1) as chain:
        right = [chain.forward(p[np.newaxis], a.arrangement)[0] for p, a in zip(pictures, answers, strict=True)]
    return [np.abs(r - a.logits).max() > 1e-3 * np.abs(r).max() for r, a in zip(right, answers, strict=True)]


def test_wrong_tokens_are_noticed_by_an_audit_alone_which_names_who_sent_them(
    peers, lying, tiny_bundle, images, wait_until
):
    lying("wrong")
    answers, pictures, audit = audited(peers, tiny_bundle, images(12), wait_until, named)
    by_liar = [LIAR in answer.record.holders for answer in answers]
    assert wrong(tiny_bundle, pictures, answers) == by_liar
    assert audit.mismatched == sum(by_liar)
    assert not any(audit.suspects[name].named for name in audit.suspects if name != LIAR)


def test_who_says_that_others_sent_wrong_tokens_is_named_with_them(peers, lying, tiny_bundle, images, wait_until):
    """The itinerary is what its holders say: an honest peer was named alone."""
    lying("blames")
    answers, pictures, audit = audited(peers, tiny_bundle, images(12), wait_until, lambda audit: audit.mismatched > 0)
    count = sum(wrong(tiny_bundle, pictures, answers))
    assert audit.mismatched == count > 0
    assert not any(one.named for name, one in audit.suspects.items() if name != LIAR)
    assert audit.suspects[LIAR].one_of + audit.suspects[LIAR].named == count
