"""Messages about requests are accepted only if a peer or source may send them."""

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import WireError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.protocol.messages import Itinerary, Run, TransferId
from ls_edge.runtime.protocol.payload import MAX_IMAGE
from ls_edge.runtime.transport.admission import Admission

CHAIN = {"a": "stem, 0-2", "b": "3-5, head"}
ALL = tuple(range(6))
WHOLE = (STEM, *ALL, HEAD)
AT_A, AT_B = ((STEM, "a"), (0, "a"), (1, "a"), (2, "a")), ((3, "b"), (4, "b"), (5, "b"), (HEAD, "b"))


@pytest.mark.parametrize(
    ("ran", "remaining", "frame", "skipped", "why"),
    [
        ((), WHOLE, ("image", 100, 1), (), ""),
        (AT_A, (3, 4, 5, HEAD), ("raw", 16, 32), (), ""),
        ((*AT_A, *AT_B), (), ("logits", 1, 10), (), ""),
        ((), WHOLE, ("raw", 16, 32), (), "an image of at most"),
        ((), WHOLE, ("image", MAX_IMAGE // 2, 2), (), "an image of at most"),
        (AT_A, (3, 4, 5, HEAD), ("image", 100, 1), (), "the model has tokens"),
        (AT_A, (3, 4, 5, HEAD), ("logits", 1, 10), (), "the model has tokens"),
        ((*AT_A, *AT_B), (), ("raw", 16, 32), (), "the model has logits"),
        ((*AT_A, *AT_B), (), ("logits", 1, 11), (), "the model has 1 x 10"),
        ((), ALL, ("image", 100, 1), (), "the model has tokens"),
        ((), (STEM, *ALL), ("image", 100, 1), (), "each has run"),
        ((*AT_A, *AT_B[:3]), (), ("logits", 1, 10), (HEAD,), "blocks skipped"),
        (((STEM, "by the file of a"),), (*ALL, HEAD), ("raw", 16, 32), (), ""),
        (AT_A, (HEAD, 3, 4, 5), ("logits", 1, 10), (), "remains behind"),
        ((*AT_A, (HEAD, "b"), *AT_B[:3]), (), ("logits", 1, 10), (), "runs after"),
    ],
)
def test_an_impossible_itinerary_or_frame_of_stem_or_head_is_refused(
    write_peers, tiny_bundle, ran, remaining, frame, skipped, why
):
    peers, manifest = load_peers(write_peers(CHAIN)), Bundle.open(tiny_bundle).manifest
    admission = Admission("b", "peer", peers, manifest, strict_bundle=False)
    waves = ((ran,),) if ran else ()
    itinerary = Itinerary("laptop", "nearest", remaining, 6, waves=waves, skipped=skipped)
    run = Run(TransferId(b"r" * 16, 1, 1), 1000, itinerary, *frame, "" if remaining else "done")
    if why:
        with pytest.raises(WireError, match=why):
            admission.check_run(run, "a")
    else:
        admission.check_run(run, "a")
