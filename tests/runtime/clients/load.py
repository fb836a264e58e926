"""Constant load of a real source."""

import threading

from ls_edge.core.bundle import Bundle
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.keys import load_secret


class Load:
    """Images that are answered by the fleet during a ``with`` block."""

    def __init__(self, peers, bundle, images):
        self.source = Source(peers.file, Bundle.open(bundle), keys=load_secret(peers.secret_key("desk")))
        self.images, self.answers, self.failed = images(8), [], []
        self.halt = threading.Event()
        self.thread = threading.Thread(target=self.run, name="load")

    def __enter__(self):
        assert self.source.wait_ready(30) == ()
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.halt.set()
        self.thread.join(30)
        self.source.close()

    def run(self):
        while not self.halt.wait(0.01):  # the peers have other work, too
            for future in [self.source.submit(image) for image in self.images[:4]]:
                try:
                    self.answers.append(future.result(30))
                except Exception as error:  # noqa: BLE001
                    self.failed.append(error)

    def assert_whole(self):
        assert self.failed == []
        assert len(self.answers) > 20
        assert [answer.record for answer in self.answers if answer.record.degraded] == []
