"""Handshake: HELLO, WELCOME and BYE, and the admitted processes.

Two peers dial each other and keep one connection, since heartbeats of a second one would double the cost of an idle
fleet. The peer with the greater name closes the connection that it dialed, and dials again when a link to the other
peer ends.

A handshake terminates. The side that dialed sends HELLO when the link is up, again after a delay that doubles until
WELCOME arrives, and when its content changes. The reply is one WELCOME or COMPLAINT, which is not answered. A link
belongs to one name, and with CURVE to the owner of the key.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from ls_edge.core.peers_file import PeersFile
from ls_edge.core.text import one_line
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import Bye, Complaint, Hello, Message, Welcome
from ls_edge.runtime.transport.admission import GUESTS, Admission
from ls_edge.runtime.transport.connections import Incoming, Link, LinkDown
from ls_edge.runtime.transport.links import Links
from ls_edge.runtime.transport.problems import PeerProblems, RefusedMessages

GREETING_DELAY, MAX_GREETING_DELAY = 0.5, 8.0
"""Seconds until a HELLO without WELCOME is repeated, which double up to the second value."""
MAX_SOURCES = 256
"""Limit on linked processes that are not peers of ``peers.yaml``."""
REST_AFTER = 1.0
"""Seconds for which a second connection between two peers is kept, so that messages in flight arrive."""
_MAX_REASON = 200
"""Maximum length of the reason of a BYE, in characters."""


class LinkedProcesses:
    """Admitted processes, their links, and HELLO messages without a reply."""

    def __init__(self, name: str, peers: PeersFile) -> None:
        """Start without links, for the process ``name``."""
        self.links_of: dict[str, list[Link]] = {}
        """Links of each process, the preferred one first."""
        self.name_of: dict[Link, str] = {}
        self.user_of: dict[Link, str] = {}
        """Owner of the key of each link; empty without CURVE."""
        self.guests: dict[str, str] = {}
        """Role of each observer and pusher, which take no part in routing."""
        self._name = name
        self.greeting_due: dict[Link, tuple[float, float]] = {}
        """Time of the next HELLO, and the wait before it, by link without WELCOME; infinity if that was refused."""
        self.change(peers)
        self.incarnation_of: dict[Link, int] = {}
        self._rest_at: dict[str, float] = {}
        """Time at which to close the connection to a peer that this process dialed, if there is another."""

    def change(self, peers: PeersFile) -> None:
        """Use the peers of this file from now on, and greet those again whose links have no accepted WELCOME."""
        self.greeting_due = dict.fromkeys(self.greeting_due, (0.0, GREETING_DELAY))
        self.listed = {peer.name for peer in peers.peers}
        self._path = peers.path

    def reason_to_refuse(self, link: Link, greeting: Hello | Welcome) -> str:
        """Return why a process may not have its name on this link, or an empty string."""
        name = greeting.name
        if link.dialed and name != link.dialed:
            return (
                f"the process that listens at the address of {link.dialed!r} is {name!r}; correct the addresses in "
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
        return ""

    def add(self, link: Link, greeting: Hello | Welcome, user: str, now: float) -> bool:
        """Record the process of a link; return whether the link is new."""
        name = greeting.name
        links = self.links_of.setdefault(name, [])
        is_new = link not in links
        if is_new:
            links.append(link)
            self.name_of[link], self.user_of[link] = name, user
        self.incarnation_of[link] = greeting.incarnation
        # The end of an earlier process of this name may not have been noticed on its links.
        keeps_own = self._name < name
        links.sort(key=lambda one: (self.incarnation_of[one] != greeting.incarnation, bool(one.dialed) != keeps_own))
        if is_new and self._has_spare_link(name):
            self._rest_at[name] = now + REST_AFTER
        return is_new

    def _has_spare_link(self, name: str) -> bool:
        """Return whether a peer has dialed as well, and that connection is to be kept."""
        links = self.links_of.get(name, ())
        dialed = {self.incarnation_of[link] for link in links if link.dialed}
        return self._name > name and any(not link.dialed and self.incarnation_of[link] in dialed for link in links)

    def due_rests(self, now: float) -> list[str]:
        """Forget the dialed links that are due to be closed, and return the names of their peers."""
        due = [name for name, at in self._rest_at.items() if at <= now]
        for name in due:
            del self._rest_at[name]
        spare = [name for name in due if self._has_spare_link(name)]
        for name in spare:
            self.link_ended(Link(dialed=name))
        return spare

    def link_ended(self, link: Link) -> str | None:
        """Forget a link; return the name of its process, or None."""
        self.greeting_due.pop(link, None)
        name = self.name_of.pop(link, None)
        self.user_of.pop(link, None)
        self.incarnation_of.pop(link, None)
        links = [] if name is None else self.links_of.get(name, [])
        if link in links:
            links.remove(link)
        return name

    def forget(self, name: str, now: float) -> None:
        """Forget a process and its links; greet it again on a link that this process dialed and that still exists."""
        self.guests.pop(name, None)
        for link in self.links_of.pop(name, []):
            self.link_ended(link)
            if link.dialed:  # undone if the link ends soon, as usual after BYE
                self.greeting_due[link] = (now + MAX_GREETING_DELAY, MAX_GREETING_DELAY)

    @property
    def next_due(self) -> float:
        """Time of the next HELLO or of the next of :meth:`due_rests`, or infinity."""
        greetings = (at for at, _ in self.greeting_due.values())
        return min((*greetings, *self._rest_at.values()), default=float("inf"))


class Handshake:
    """Handshake with other processes."""

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
        """Call ``on_admitted(link, greeting, is_first_on_link)`` and ``on_forgotten(name, why, was_pusher)``."""
        self.mismatched: dict[str, tuple[str, str]] = {}
        """Peers with another model, each with its id and the message that names both ids."""
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
        """Greet a peer on a link that this process has dialed."""
        self.problems.clear(link.dialed, "link")
        self.send(link, self.hello())
        self._linked.greeting_due[link] = (now + GREETING_DELAY, GREETING_DELAY)

    def link_down(self, event: LinkDown, now: float) -> None:
        """Forget a link, and its process if it was the last link."""
        name = self._linked.link_ended(event.link)
        if name is None:
            self.problems.note(event.link.dialed, "link", event.why)
            return
        if not self._linked.links_of.get(name):
            self.forget(name, event.why, now)
        else:
            self._links.dialer.resume(name)

    def do_due(self, now: float) -> None:
        """Repeat HELLO and close second connections as they become due."""
        for name in self._linked.due_rests(now):
            self._links.dialer.rest(name)
        greeting_due = self._linked.greeting_due
        for link, wait in [(link, wait) for link, (at, wait) in greeting_due.items() if at <= now]:
            later = min(2 * wait, MAX_GREETING_DELAY)
            greeting_due[link] = (now + later, later)
            self.send(link, self.hello())

    def on_greeting(self, event: Incoming, greeting: Hello | Welcome) -> None:
        """Admit or refuse the process that HELLO or WELCOME describes."""
        link, name = event.link, greeting.name
        if isinstance(greeting, Welcome):
            self._linked.greeting_due.pop(link, None)
        reason = self._linked.reason_to_refuse(link, greeting) or self._admission.reason_to_refuse(greeting, event.user)
        if reason:
            self._refuse(event, greeting, one_line(reason))
            return
        self.mismatched.pop(name, None)
        self.problems.clear(name)
        first = self._linked.add(link, greeting, event.user, time.monotonic())
        if greeting.role in GUESTS:
            self._linked.guests[name] = greeting.role
        if isinstance(greeting, Hello):  # WELCOME goes before all messages of the machine
            self.send(link, Welcome(*msgspec.structs.astuple(self.hello())))
        self._on_admitted(link, greeting, first)

    def on_complaint(self, link: Link, name: str, complaint: Complaint) -> None:
        """Record that a process refused this one, or dropped one of its messages."""
        what = one_line(complaint.what)
        self._refused.count("complaints", name, what)
        if link in self._linked.greeting_due:
            self.problems.note(link.dialed, "greeting", f"it refused us: {what}")
            if complaint.model_id not in ("", self._admission.manifest.model_id):
                self.mismatched[link.dialed] = complaint.model_id, what
        else:
            self.problems.note(name, "complaint", f"it dropped a message of ours: {what}")

    def _refuse(self, event: Incoming, greeting: Hello | Welcome, reason: str) -> None:
        link, name, ours = event.link, greeting.name, self._admission.manifest.model_id
        whose = link.dialed or (name if event.user in ("", name) else "")
        self.problems.note(whose, "greeting", reason)
        if greeting.model_id != ours and name == whose and name in self._linked.listed:
            self.mismatched[name] = greeting.model_id, reason
        if isinstance(greeting, Hello):
            self._refused.drop(event, "hello refused", reason, name, "" if greeting.model_id == ours else ours)
        else:
            self._refused.count("hello refused", name, reason)
            self.send(link, Bye(reason[:_MAX_REASON]))  # it has admitted this process and would send requests
            self.link_down(LinkDown(link, reason), time.monotonic())  # it may have been admitted before a reload
            if link.dialed == name:
                self._linked.greeting_due[link] = (float("inf"), GREETING_DELAY)
            else:
                self._links.dialer.pass_by(link.dialed)

    def left(self, link: Link, why: str, now: float) -> None:
        """Forget a process that has sent BYE; another one of its name has to greet again, on a new link."""
        linked, incarnation_of = self._linked, self._linked.incarnation_of
        name, incarnation = linked.name_of[link], incarnation_of[link]
        others = [one for one in linked.links_of[name] if incarnation_of[one] != incarnation]
        self.forget(name, why, now)
        for one in others:
            self._links.hang_up(one)

    def forget(self, name: str, why: str, now: float) -> None:
        """Forget a process that has left, or whose last link has ended."""
        was_pusher = self._linked.guests.get(name) == "pusher"
        self.problems.note(name, "link", why)
        self._linked.forget(name, now)
        self._links.dialer.resume(name)
        self._on_forgotten(name, why, was_pusher)

    def send_to_all(self, message: Message) -> None:
        """Send a message to all linked processes."""
        for links in list(self._linked.links_of.values()):
            self.send(links[0], message)

    def send(self, link: Link, message: Message) -> None:
        """Send a message on a link."""
        self._links.send(link, [framing.encode(message)])
