"""The handshake: HELLO, WELCOME and BYE, and the processes that were admitted by it.

Two peers dial each other, and keep one connection: the heartbeats of a second one would double the cost of an idle
fleet. The peer with the greater name closes the one that it has dialled, and dials again when a link to the other one
ends.

A handshake terminates: HELLO is sent by the side that dialled, when the link is up, again after a delay that doubles
until WELCOME arrives, and when its content changes. It is answered by one WELCOME or COMPLAINT, which are not answered.
A link carries one name, and on a CURVE link the name that the key belongs to.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import msgspec

from ls_edge.core.peers_file import PeersFile
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import Bye, Complaint, Hello, Message, Welcome
from ls_edge.runtime.transport.admission import GUESTS, Admission
from ls_edge.runtime.transport.connections import Incoming, Link, LinkDown
from ls_edge.runtime.transport.links import Links
from ls_edge.runtime.transport.problems import PeerProblems, RefusedMessages, one_line

GREETING_DELAY, MAX_GREETING_DELAY = 0.5, 8.0
"""Seconds until a HELLO without a WELCOME is repeated; doubled each time, up to the second value."""
MAX_SOURCES = 256
"""Largest number of linked processes that are not peers of ``peers.yaml``."""
MAX_SOURCES_OF_ONE_KEY = 64
"""Largest number of these with one key, so that one source cannot crowd out the others."""
REST_AFTER = 1.0
"""Seconds for which a second connection between two peers is kept, so that messages on their way arrive."""
_MAX_REASON = 200
"""Longest reason of a BYE, in characters."""


class LinkedProcesses:
    """The admitted processes, their links, and the HELLOs that wait for an answer."""

    def __init__(self, name: str, peers: PeersFile) -> None:
        """``name`` is the name of this process."""
        self.links_of: dict[str, list[Link]] = {}
        """The links of each process; the one to send on comes first."""
        self.name_of: dict[Link, str] = {}
        self.user_of: dict[Link, str] = {}
        """The name behind the key of each link; empty without CURVE."""
        self.guests: dict[str, str] = {}
        """The role of each observer and pusher, which take no part in routing."""
        self._name = name
        self.change(peers)
        self.greeting_due: dict[Link, tuple[float, float]] = {}
        """Links without a WELCOME: time of the next HELLO, and the wait before it."""
        self._incarnation_of: dict[Link, int] = {}
        self._rest_at: dict[str, float] = {}
        """Peers with two connections, and when the one that this process dialled is closed."""

    def change(self, peers: PeersFile) -> None:
        """Take the peers of this file for those of ``peers.yaml`` from now on."""
        self.listed = {peer.name for peer in peers.peers}
        self._path = peers.path

    def reason_to_refuse(self, link: Link, greeting: Hello | Welcome, user: str) -> str:
        """Return why a process may not have this name on this link, or an empty string."""
        name = greeting.name
        if link.dialled and name != link.dialled:
            return (
                f"the process that listens at the address of {link.dialled!r} is {name!r}; correct the addresses in "
                f"{self._path}"
            )
        before = self.name_of.get(link, name)
        if name != before:
            return f"hello from {name!r} on the link of {before!r}; a link carries one name"
        if name in self.links_of and self.guests.get(name, "") != (greeting.role if greeting.role in GUESTS else ""):
            return f"hello from {name!r} as {greeting.role!r}, but it has a link in another role"
        if name in self.listed or name in self.links_of:
            return ""
        others = sum(one not in self.listed for one in self.links_of)
        if others >= MAX_SOURCES:
            return f"{others} sources are linked to {self._name}, which is the limit; try again later"
        if user and sum(self.user_of[links[0]] == user for links in self.links_of.values()) >= MAX_SOURCES_OF_ONE_KEY:
            return f"{MAX_SOURCES_OF_ONE_KEY} sources have the key of {user!r} at {self._name}, which is the limit"
        return ""

    def add(self, link: Link, greeting: Hello | Welcome, user: str, now: float) -> bool:
        """Record the process behind a link; return whether the link is new."""
        name = greeting.name
        links = self.links_of.setdefault(name, [])
        is_new = link not in links
        if is_new:
            links.append(link)
            self.name_of[link], self.user_of[link] = name, user
        self._incarnation_of[link] = greeting.incarnation
        # Links of an earlier process of this name have not noticed its end yet.
        keeps_own = self._name < name
        links.sort(key=lambda one: (self._incarnation_of[one] != greeting.incarnation, bool(one.dialled) != keeps_own))
        if is_new and self._has_spare_link(name):
            self._rest_at[name] = now + REST_AFTER
        return is_new

    def _has_spare_link(self, name: str) -> bool:
        """Return whether the link dialled to a peer is one too many, since the peer's own is the one to keep."""
        links = self.links_of.get(name, ())
        dialled = {self._incarnation_of[link] for link in links if link.dialled}
        return self._name > name and any(not link.dialled and self._incarnation_of[link] in dialled for link in links)

    def due_rests(self, now: float) -> list[str]:
        """Return the peers whose dialled link is to be closed now, and forget these links."""
        due = [name for name, at in self._rest_at.items() if at <= now]
        for name in due:
            del self._rest_at[name]
        spare = [name for name in due if self._has_spare_link(name)]
        for name in spare:
            self.link_ended(Link(dialled=name))
        return spare

    def link_ended(self, link: Link) -> str | None:
        """Forget a link; return the name of the process behind it, or None."""
        self.greeting_due.pop(link, None)
        name = self.name_of.pop(link, None)
        self.user_of.pop(link, None)
        self._incarnation_of.pop(link, None)
        links = [] if name is None else self.links_of.get(name, [])
        if link in links:
            links.remove(link)
        return name

    def forget(self, name: str, now: float) -> None:
        """Forget a process and its links; greet it again where a link that this process dialled still exists."""
        self.guests.pop(name, None)
        for link in self.links_of.pop(name, []):
            self.name_of.pop(link, None)
            self.user_of.pop(link, None)
            self._incarnation_of.pop(link, None)
            if link.dialled:  # after a goodbye it usually ends soon, and this is undone
                self.greeting_due[link] = (now + MAX_GREETING_DELAY, MAX_GREETING_DELAY)

    @property
    def next_due(self) -> float:
        """Time of the next of :meth:`due_greetings` or :meth:`due_rests`, or infinity."""
        greetings = (at for at, _ in self.greeting_due.values())
        return min(itertools.chain(greetings, self._rest_at.values()), default=float("inf"))

    def due_greetings(self, now: float) -> list[Link]:
        """Return the links on which HELLO is to be repeated now, and schedule the next repetition."""
        due = [(link, wait) for link, (at, wait) in self.greeting_due.items() if at <= now]
        for link, wait in due:
            later = min(2 * wait, MAX_GREETING_DELAY)
            self.greeting_due[link] = (now + later, later)
        return [link for link, _ in due]


class Handshake:
    """Greets, admits and forgets processes."""

    def __init__(
        self,
        linked: LinkedProcesses,
        links: Links,
        admission: Admission,
        refused: RefusedMessages,
        *,
        hello: Callable[[], Hello],
        on_admitted: Callable[[Link, Hello | Welcome, bool], None],
        on_forgotten: Callable[[str, str, bool], None],
    ) -> None:
        """Call ``on_admitted(link, greeting, first)`` and ``on_forgotten(name, why, was_pusher)``.

        ``first`` says whether it is the first greeting on that link.
        """
        self.mismatched: dict[str, str] = {}
        """Peers that serve another model: name to the message with both ids."""
        self.problems = PeerProblems(linked.listed - {admission.name})
        self._linked = linked
        self._links = links
        self._admission = admission
        self._refused = refused
        self.hello = hello
        self._on_admitted = on_admitted
        self._on_forgotten = on_forgotten

    def change(self, peers: PeersFile) -> None:
        """Admit the processes of this file from now on."""
        self._linked.change(peers)
        self._admission.change(peers)
        self.problems.change(self._linked.listed - {self._admission.name})
        for name in self.mismatched.keys() - self._linked.listed:
            del self.mismatched[name]

    def link_up(self, link: Link, now: float) -> None:
        """Greet the peer behind a link that this process has dialled."""
        self.problems.clear(link.dialled, "link")
        self._send(link, self.hello())
        self._linked.greeting_due[link] = (now + GREETING_DELAY, GREETING_DELAY)

    def link_down(self, event: LinkDown, now: float) -> None:
        """Forget a link, and the process behind it if it was the last one."""
        name = self._linked.link_ended(event.link)
        if name is None:
            self.problems.note(event.link.dialled, "link", event.why)
            return
        if not self._linked.links_of.get(name):
            self._forget(name, event.why, now)
        else:
            self._links.dialer.resume(name)

    def no_link(self, name: str, why: str) -> None:
        """Record why a peer cannot be dialled, unless it has dialled this process."""
        if name not in self._linked.links_of:
            self.problems.note(name, "link", why)

    def do_due(self, now: float) -> None:
        """Repeat each HELLO that is due, and close second connections."""
        for name in self._linked.due_rests(now):
            self._links.dialer.rest(name)
        for link in self._linked.due_greetings(now):
            self._send(link, self.hello())

    def on_greeting(self, event: Incoming, greeting: Hello | Welcome) -> None:
        """Admit the process that a HELLO or WELCOME describes, or refuse it."""
        link, name = event.link, greeting.name
        if isinstance(greeting, Welcome):
            self._linked.greeting_due.pop(link, None)
        reason = self._linked.reason_to_refuse(link, greeting, event.user) or self._admission.reason_to_refuse(
            greeting, event.user
        )
        if reason:
            self._refuse(event, greeting, one_line(reason))
            return
        self.mismatched.pop(name, None)
        self.problems.clear(name)
        first = self._linked.add(link, greeting, event.user, time.monotonic())
        if greeting.role in GUESTS:
            self._linked.guests[name] = greeting.role
        if isinstance(greeting, Hello):  # the WELCOME precedes everything that the machine sends
            self._send(link, Welcome(*msgspec.structs.astuple(self.hello())))
        self._on_admitted(link, greeting, first)

    def on_complaint(self, link: Link, name: str, complaint: Complaint) -> None:
        """Record that a process refused this one, or dropped a message of it."""
        what = one_line(complaint.what)
        self._refused.count("complaints", name, what)
        if link in self._linked.greeting_due:
            self.problems.note(link.dialled, "greeting", f"it refused us: {what}")
            if complaint.model_id not in ("", self._admission.manifest.model_id):
                self.mismatched[link.dialled] = what
        else:
            self.problems.note(name, "complaint", f"it dropped a message of ours: {what}")

    def on_bye(self, name: str, reason: str, now: float) -> None:
        """Forget a process that leaves."""
        self._forget(name, f"left ({one_line(reason)})" if reason else "left", now)

    def _refuse(self, event: Incoming, greeting: Hello | Welcome, reason: str) -> None:
        link, name, ours = event.link, greeting.name, self._admission.manifest.model_id
        whose = link.dialled or (name if event.user in ("", name) else "")
        self.problems.note(whose, "greeting", reason)
        if greeting.model_id != ours and name == whose and name in self._linked.listed:
            self.mismatched[name] = reason
        if isinstance(greeting, Hello):
            self._refused.drop(event, "hello refused", reason, name, "" if greeting.model_id == ours else ours)
        else:
            self._refused.count("hello refused", name, reason)
            self._send(link, Bye(reason[:_MAX_REASON]))  # it has admitted this process, and would send work

    def _forget(self, name: str, why: str, now: float) -> None:
        was_pusher = self._linked.guests.get(name) == "pusher"
        self.problems.note(name, "link", why)
        self._linked.forget(name, now)
        self._links.dialer.resume(name)
        self._on_forgotten(name, why, was_pusher)

    def send_to_all(self, message: Message) -> None:
        """Send a message to all linked processes."""
        for links in list(self._linked.links_of.values()):
            self._send(links[0], message)

    def _send(self, link: Link, message: Message) -> None:
        self._links.send(link, [framing.encode(message)])
