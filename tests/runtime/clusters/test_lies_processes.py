"""Each lie of ``tests.faults.lies``, told with keys by a real process to real peers and sources.

Two honest peers hold every block, and so does the liar, which has a key and an entry in ``peers.yaml``. Whatever it
does, every request is answered completely and correctly, and when it has gone, no work of it is left at honest peers.
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
from ls_edge.runtime.source.image_encoding import ImageEncoder
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.handshake import MAX_SOURCES_OF_ONE_KEY
from ls_edge.runtime.transport.keys import load_secret
from ls_edge.runtime.transport.problems import NOTES_A_MINUTE
from tests.faults.cluster import FaultyCluster
from tests.faults.lies import LIES

pytestmark = [pytest.mark.release, pytest.mark.skipif(not zmq.has("curve"), reason="libzmq without CURVE")]

LIAR, THIEF, LAPTOP = "mallory", "thief", "laptop"
HONEST = ("anna", "ben")
CREDITS = 8
"""Credits that an idle peer offers a source; the other half of its 16 is for peers."""
REQUESTS = 24
ROUNDS = 20
"""Maximum number of batches until a liar has received work."""
WAITS = {"silent", "mute", "slow", "progress", "growth", "releases", "hellos", "changes"}
"""Lies that cost a request a deadline or a part of its budget, so the tests send fewer of them."""


@pytest.fixture(scope="module")
def members(tiny_bundle, tmp_path_factory):
    """Two honest peers with all parts, and a member and a source that may be captured."""
    with FaultyCluster(
        tmp_path_factory.mktemp("members"), tiny_bundle, dict.fromkeys(HONEST, "all"),
        members={LIAR: "all"}, sources=(LAPTOP, THIEF), keys=True,
    ) as local:  # fmt: skip
        local.wait_warm(*HONEST)
        yield local


@pytest.fixture
def lying(members, wait_until):
    """Start a liar, and stop it after the test; the honest peers must still run."""
    started = []

    def start(lie):
        name = THIEF if LIES[lie].role == "source" else LIAR
        started.append(name)
        members.start_liar(name, lie)
        return lambda: members.liar_counts(name)

    yield start
    for name in started:
        members.stop_liar(name)
    assert all(members.alive(name) for name in HONEST)


def open_source(peers, bundle, **settings):
    settings = {"max_skips": 0, "budget_ms": 10_000, **settings}
    return Source.open(peers.path, bundle, secret_key=peers.secret_key(LAPTOP), **settings)


def credits_of(source):
    return [source.snapshot.peers[name].credits for name in HONEST]


def linked(source):
    """Names of the peers to which the source has links."""
    return {name for name, view in source.snapshot.peers.items() if view.state != "lost"}


def answers_of(source, images, count):
    """Answers to ``count`` images, a few at a time."""
    answers = []
    for begin in range(0, count, 6):
        futures = [source.submit(image) for image in images[begin : begin + 6]]
        answers += [future.result(30) for future in futures]
    return answers


def repeated(pictures, answers):
    """The picture of each answer, ``[answers, 3, 16, 16]``."""
    return np.concatenate([pictures] * (len(answers) // len(pictures)))


def answers_until(done, ask):
    """Answers of rounds of ``ask()`` until ``done``: which holder receives work depends on speed."""
    answers = ask()
    for _ in range(ROUNDS):
        if done(answers):
            return answers
        answers += ask()
    raise AssertionError(f"not done after {len(answers)} answers")


@pytest.mark.parametrize("lie", [n for n, lie in LIES.items() if not lie.spoils and not lie.needs_bands])
def test_every_request_is_answered_correctly_whatever_a_member_does(
    lie, members, lying, tiny_bundle, images, assert_replays, wait_until
):
    counts = lying(lie)
    count = REQUESTS // 2 if lie in WAITS else REQUESTS
    pictures = images(count)
    with open_source(members, tiny_bundle, budget_ms=5_000) as source:
        wait_until(lambda: set(HONEST) <= linked(source), what="honest peers")
        if LIES[lie].role == "peer":
            wait_until(lambda: LIAR in linked(source), what="the liar")
        elif LIES[lie].tempts:  # a source acts as soon as it has started
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
        members.stop_liar(THIEF if LIES[lie].role == "source" else LIAR)
        wait_until(lambda: credits_of(source) == [CREDITS, CREDITS], 15.0, "all credits to be free again")


def thin_answers(source, bundle, done):
    """Answers to encoded images until ``done``, and the relative errors of their logits."""
    preprocess, rng = Preprocessor(Bundle.open(bundle).manifest.image), np.random.default_rng(5)
    pixels = [rng.integers(0, 256, (20, 24, 3), np.uint8) for _ in range(12)]
    answers = answers_until(done, lambda: answers_of(source, pixels, len(pixels)))
    pixels *= len(answers) // len(pixels)
    with Pipeline.open(Bundle.open(bundle), threads=1) as pipeline:
        rights = [
            pipeline.forward(preprocess(ImageEncoder(preprocess.spec)(one).content)[None], answer.arrangement)[0]
            for one, answer in zip(pixels, answers, strict=True)
        ]
    return answers, [relative_error(a.logits, right) for a, right in zip(answers, rights, strict=True)]


@pytest.mark.parametrize(
    "lie", ["silent", "unreachable", "credit", "poisons", "skips", "waves", "bounces", "nan", "forges", "former"]
)
def test_every_image_is_answered_correctly_whatever_a_holder_of_stem_and_head_does(
    lie, members, lying, tiny_bundle, wait_until
):
    counts = lying(lie)
    with open_source(members, None) as source:
        wait_until(lambda: {*HONEST, LIAR} <= linked(source), what="all peers")
        answers, errors = thin_answers(source, tiny_bundle, lambda _: counts().received > 0)
        assert max(errors) < 1e-4
        assert not any(answer.degraded for answer in answers)
        members.stop_liar(LIAR)
        wait_until(lambda: credits_of(source) == [CREDITS, CREDITS], 15.0, "all credits to be free again")


def test_a_peer_that_is_always_rejected_does_not_fill_the_log(members, lying, tiny_bundle, wait_until, caplog):
    """Not every rejected message may be a line."""
    lying("forges")
    with open_source(members, tiny_bundle) as source:
        wait_until(
            lambda: LIAR in source.snapshot.rejected and source.snapshot.rejected[LIAR].count > 200, what="forgeries"
        )
    assert 0 < sum(record.message == "rejected" for record in caplog.records) <= 2 * NOTES_A_MINUTE


def test_one_key_cannot_take_the_places_of_all_sources(members, tiny_bundle, images, wait_until):
    """A captured source must not pose as 256 sources, so that no other is admitted."""
    manifest = Bundle.open(tiny_bundle).manifest
    keys = load_secret(members.secret_key(THIEF))
    poller, answers = zmq.Poller(), []
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        for number in range(MAX_SOURCES_OF_ONE_KEY + 6):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret
            dealer.curve_serverkey = members.file.peer("anna").public_key.encode()
            dealer.connect(members.file.peer("anna").address)
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
        with open_source(members, tiny_bundle) as source:
            assert source.wait_ready(10) == ()
            assert len(answers_of(source, images(4), 4)) == 4
            wait_until(lambda: set(HONEST) <= linked(source), what="honest peers")
