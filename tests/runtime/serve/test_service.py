"""What a server holds in memory is bounded, whatever its clients do."""

import asyncio
import base64
import itertools
import json
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.runtime.serve import inference_protocol as v2
from ls_edge.runtime.serve.replies import Refusal
from ls_edge.runtime.serve.service import Service
from ls_edge.runtime.source.source import Source
from tests.runtime.serve.serving import picture
from tests.runtime.serve.test_application import in_process

MANY = 20


def peak_of(function, *arguments):
    """Maximum of the memory that a call needs, in bytes."""
    tracemalloc.start()
    try:
        function(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("goes_away", [False, True])
def test_request_keeps_its_place_until_its_decoder_is_free(write_peers, tiny_bundle, goes_away):
    """Otherwise, each late request would leave its images to threads that are busy."""
    service = Service(Source.open(write_peers({"a": "0-5"}), tiny_bundle, max_inflight=1), holder_wait_s=0.0, queue=0)
    is_decoded = threading.Event()

    def decode(_on_slow):
        is_decoded.wait(60)
        return []

    async def late():
        async with service.place(time.monotonic() + 0.01) as place:
            await service.answer(place, decode, time.monotonic() + 0.01)

    async def scenario():
        request = asyncio.ensure_future(late())
        if goes_away:
            await asyncio.sleep(0)
            request.cancel()
        await asyncio.wait((request,))
        assert request.cancelled() == goes_away
        assert goes_away or isinstance(request.exception(), Refusal)
        with pytest.raises(Refusal, match="the limit of images is reached"):
            async with service.place(time.monotonic() + 60):
                pass
        is_decoded.set()
        for _ in itertools.count():
            try:
                async with service.place(time.monotonic() + 60):
                    return
            except Refusal:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    service.close()


def test_images_of_a_late_request_are_not_decoded(write_peers, tiny_bundle, wait_until, monkeypatch):
    source = Source.open(write_peers({"a": "0-5"}), tiny_bundle)
    service, files = Service(source, holder_wait_s=0.0, queue=0), [base64.b64encode(picture()).decode()] * MANY
    decoded, decode = [], service.decoders.decode

    def late(*arguments, **options):
        decoded.append(time.monotonic())
        wait_until(lambda: time.monotonic() > decoded[0] + 0.1)
        return decode(*arguments, **options)

    monkeypatch.setattr(service.decoders, "decode", late)
    inputs = [{"name": "image", "shape": [MANY], "datatype": "BYTES", "data": files}]
    body = json.dumps({"parameters": {"timeout": 100_000}, "inputs": inputs})
    with in_process(service) as status:
        assert status("POST", f"/v2/models/{source.bundle.manifest.model}/infer", body) == 504
        wait_until(lambda: service.places._free == service.places.count)
    assert len(decoded) <= 1
    service.close()


def test_request_that_waits_while_the_model_changes_gets_no_answer_of_another_model(
    write_peers, tiny_bundle, other_bundle, wait_until, monkeypatch
):
    file = write_peers({"a": "0-5"})
    source = Source.open(file, tiny_bundle, max_inflight=1)
    service, is_decoding, may_end = Service(source, holder_wait_s=0.0, queue=1), threading.Event(), threading.Event()
    decode = service.decoders.decode

    def slow(*arguments, **options):
        is_decoding.set()
        may_end.wait(60)
        return decode(*arguments, **options)

    monkeypatch.setattr(service.decoders, "decode", slow)
    image = base64.b64encode(picture()).decode()
    body = json.dumps({"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": [image]}]})
    path = f"/v2/models/{source.bundle.manifest.model}/versions/{v2.version_of(source.bundle)}/infer"
    with in_process(service) as status, ThreadPoolExecutor(2) as pool:
        first = pool.submit(status, "POST", path, body)
        assert is_decoding.wait(60)
        second = pool.submit(status, "POST", path, body)
        wait_until(lambda: service.places.waiting == 1)
        source.bundle = Bundle.open(other_bundle)
        may_end.set()
        assert (first.result(60), second.result(60)) == (503, 404)
    service.close()


@pytest.mark.parametrize("pixel", [b"1,2,3", b"[1,2,3]"])
def test_numbers_in_json_need_little_more_memory_than_their_text(pixel):
    text = b"[%b]" % b",".join([pixel] * 100_000)
    document = b'{"inputs":[{"name":"pixels","shape":[1,100,1000,3],"datatype":"UINT8","data":%b}]}' % text
    request, _ = v2.parse_request(document, None)
    found = []
    peak = peak_of(lambda: found.append(v2._array(request.inputs[0], [1, 100, 1000, 3], None, np.dtype("uint8"))))
    assert found[0].reshape(-1, 3).tolist() == [[1, 2, 3]] * 100_000
    assert peak < 3 * len(text) + 4_000_000
