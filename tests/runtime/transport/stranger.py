"""A scripted process at the link of a peer."""

from ls_edge.core.peers_file import HeartbeatSettings
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.transport.connections import Incoming, Link, LinkUp
from ls_edge.runtime.transport.links import Links
from ls_edge.runtime.transport.zap import Curve


class Stranger:
    """A process that dials a peer with whatever key, and says what it likes."""

    def __init__(self, file, to, pair=None, server_key=None):
        curve = None
        if pair is not None:
            curve = Curve(pair, {to: server_key or file.peer(to).public_key.encode()}, {})
        self.to = Link(to)
        self.links = Links(
            {to: file.peer(to).address}, bind=None, heartbeat=HeartbeatSettings(), max_frame=1 << 20, curve=curve
        )
        self.up = False
        self.heard = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.links.close()

    def poll(self):
        for event in self.links.poll(0.02):
            self.up = self.up or isinstance(event, LinkUp)
            if isinstance(event, Incoming):
                self.heard.extend(framing.decode(event.frames[0].bytes))
        return self

    def heard_of(self, kind):
        return [message for message in self.heard if isinstance(message, kind)]

    def says(self, message):
        assert self.links.send(self.to, [framing.encode(message)])
